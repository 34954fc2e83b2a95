"""Other processes as /proc shows them: whether they run, their memory and CPU time."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie (ended, but its parent has not waited for it) does not."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return _stat(pid)[0] != "Z"
    return False


def cpu_seconds(pid: int) -> float:
    user, system = _stat(pid)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def megabytes(pid: int, what: str) -> float:
    """The memory of a process: VmRSS is what it has now, VmHWM its peak."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """Stop a process for a while."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
