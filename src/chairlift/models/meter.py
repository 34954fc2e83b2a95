"""Progress of a download, in bytes and percent: one changing line on a terminal, a line per tenth elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TaskProgressColumn, TextColumn, TransferSpeedColumn


class Meter:
    """Shows on stderr how much of a file has been downloaded."""

    def __init__(self, name: str, size: int, *, is_shown: bool) -> None:
        self._name, self._size = name, size
        console = Console(stderr=True, quiet=not is_shown, highlight=False, soft_wrap=True)
        self._lines = None if console.is_terminal else console
        columns = (
            TextColumn("fetching {task.description}", markup=False),  # no bar, so that the line fits in 80 columns
            TaskProgressColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal or not is_shown)
        self._task = self._bar.add_task(name, total=size)
        self._tenths = -1

    def __enter__(self) -> Meter:
        self._bar.start()
        self.show(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, done: int, *, since: int = 0) -> None:
        """Show `since + done` bytes as downloaded."""
        done = min(since + done, self._size)  # a wheel is slightly larger than the file in it
        self._bar.update(self._task, completed=done)
        tenths = 10 * done // self._size
        if self._lines is not None and tenths > self._tenths:
            self._tenths = tenths
            share = f"{done / 1e6:,.1f} of {self._size / 1e6:,.1f} MB ({100 * done // self._size}%)"
            self._lines.print(f"fetching {self._name}: {share}", markup=False)
