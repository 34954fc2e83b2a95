"""RecordFile: what the scheduler did, in a file of JSON lines that `chairlift view` shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from chairlift.core.errors import ChairliftError
from chairlift.core.request import Request
from chairlift.engine.engine import Engine
from chairlift.engine.recorder import Recorder

KIND, VERSION = "chairlift record", 1
MOST_STEPS = 50_000  # of an engine at one stride; then only half as many of the steps that follow are recorded


class RecordFile:
    """Records engines, each under a name, from `record` to its end or to that of the file."""

    def __init__(self, path: Path, title: str) -> None:
        self._path = path
        try:
            self._file = path.open("w")
        except OSError as error:
            raise self._trouble(error) from None
        self._write({"kind": KIND, "version": VERSION, "title": title})

    def record(
        self,
        engine: Engine,
        model: str,
        replica: int | None = None,
        name_of: Callable[[Request], str] = lambda request: request.id,
    ) -> Callable[[], None]:
        """Record an engine; the returned function ends that."""
        recorder = Recorder(engine, name_of)
        label = {"model": model} if replica is None else {"model": model, "replica": replica}
        written = 0

        def write() -> None:
            nonlocal written
            if (record := recorder.take()) is not None:
                self._write({**label, **record})
                written += len(record.get("steps", ()))
                if written >= MOST_STEPS:
                    written = 0
                    recorder.stride *= 2

        def end() -> None:
            write()
            recorder.close()

        recorder.on_full = write
        write()
        return end

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            raise self._trouble(error) from None

    def _trouble(self, error: OSError) -> ChairliftError:
        return ChairliftError(f"{self._path} cannot be written: {error.strerror or error}; name another file")

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as error:
            raise self._trouble(error) from None
