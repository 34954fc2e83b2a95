"""The output file of a batch job: one line per request, and the job's only state.

A line is appended when its request ends. Answers are never removed; an error line is removed when a later run retries
its request, so that each custom_id has one line. A killed job loses no answer: lines are appended whole, and error
lines are removed by writing a new file and renaming it over the old one. On a full disk the job ends with an error and
the file has whole lines only. A file is truncated only to remove an incomplete last line that a job has written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from chairlift.core.errors import ChairliftError
from chairlift.openai import replies

SYNC_SECONDS = 1.0  # of answers that a power failure may lose; a killed process loses none
KEPT_FAILURES = 5  # failures in the summary; the output file has all

# The beginning of every line that a job writes, as a pattern and as an example.
_BEGINNING = re.compile(rb'\{"id": "batch_req-[0-9a-f]{32}", "custom_id": ')
_EXAMPLE = b'{"id": "batch_req-' + b"0" * 32 + b'", "custom_id": '


@dataclass(frozen=True, slots=True)
class Failure:
    """An input line without an answer, and the reason."""

    line: int
    custom_id: str | None
    reason: str

    def __str__(self) -> str:
        named = "" if self.custom_id is None else f", custom_id {self.custom_id!r}"
        return f"line {self.line}{named}: {self.reason}"


@dataclass(slots=True)
class Tally:
    """Counts of input lines by their result in this run, and of the tokens of its answers."""

    done: int = 0
    failed: int = 0
    skipped: int = 0  # answered by an earlier run
    tokens: int = 0
    failures: list[Failure] = field(default_factory=list)  # the first few

    @property
    def lines(self) -> int:
        """The number of input lines processed."""
        return self.done + self.failed + self.skipped


Report = Callable[[Tally], None]


class BatchOutput:
    """The output file: reads which requests have answers, and appends lines."""

    def __init__(self, path: Path, report: Report) -> None:
        check_output(path)
        self.answered: set[str] = set()
        self.has_failures = False  # of earlier runs
        self.tally = Tally()
        self._report = report
        self._synced = time.monotonic()
        self._path = path
        try:
            self._path = path.resolve()  # a link stays a link when its target is replaced
            self._file = _open_locked(self._path)
            self._read()
        except OSError as error:
            raise self._unwritable(error) from None

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            if kind is None:  # else the first error is more useful
                raise self._unwritable(error) from None
        finally:
            self._file.close()

    def answer(self, custom_id: str, body: dict[str, Any]) -> None:
        """Write the answer to a request."""
        self.tally.done += 1
        self.tally.tokens += body["usage"]["completion_tokens"]
        self._write(custom_id, _response(200, body), None)

    def refuse(self, line: int, custom_id: str, message: str, status: int = 400, code: str = "invalid_request") -> None:
        """Write that a request was rejected."""
        body = replies.error_object(message, code=None if code == "invalid_request" else code)
        self._fail(Failure(line, custom_id, message), code, _response(status, body))

    def fail(self, line: int, custom_id: str, message: str) -> None:
        """Write that a request failed in the engine."""
        body = replies.error_object(message, "server_error")
        self._fail(Failure(line, custom_id, message), "server_error", _response(500, body))

    def write_off(self, line: int, custom_id: str | None, code: str, message: str) -> None:
        """Write that an input line is not a request."""
        self._fail(Failure(line, custom_id, message), code, None)

    def skip(self) -> None:
        """Count a request that an earlier run has answered."""
        self.tally.skipped += 1
        self._report(self.tally)

    def remove_failures(self, custom_ids: Set[str]) -> None:
        """Remove the error lines of requests that are retried, and those without a custom_id.

        Answers stay, and so do error lines of other requests, which may be from another input file. If the job is
        killed before the rename, the old file is unchanged; after it, the new file is complete.
        """
        tried_again = {None, *custom_ids}
        scratch = self._path.with_name(f".{self._path.name}.rewrite")
        try:
            scratch.unlink(missing_ok=True)  # left by a run that was killed here
            with scratch.open("xb") as kept, self._path.open("rb") as lines:
                shutil.copymode(self._path, scratch)
                for line in lines:
                    custom_id, is_answer = _read_record(line)
                    if is_answer or custom_id not in tried_again:
                        kept.write(line)
                kept.flush()
                os.fsync(kept.fileno())
            self._replace_by(scratch)
        except OSError as error:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)
            raise ChairliftError(
                f"{self._path} cannot be rewritten to try failed requests again: {error.strerror or error}"
            ) from None
        self.has_failures = False

    def _replace_by(self, scratch: Path) -> None:
        before = self._file
        if sys.platform == "win32":
            before.close()  # Windows cannot replace an open file
            scratch.replace(self._path)
            self._file = _open_locked(self._path)
            return
        after = _open_locked(scratch)  # before another job can open it
        scratch.replace(self._path)
        self._file = after
        before.close()

    def _fail(self, failure: Failure, code: str, response: dict[str, Any] | None) -> None:
        self.tally.failed += 1
        if len(self.tally.failures) < KEPT_FAILURES:
            self.tally.failures.append(failure)
        self._write(failure.custom_id, response, {"code": code, "message": failure.reason, "line": failure.line})

    def _write(self, custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None) -> None:
        record = {"id": replies.new_id("batch_req"), "custom_id": custom_id, "response": response, "error": error}
        self._append(json.dumps(record).encode() + b"\n")
        self._report(self.tally)

    def _append(self, line: bytes) -> None:
        """Write a whole line or, on an error, nothing of it."""
        size = os.fstat(self._file.fileno()).st_size
        try:
            left = memoryview(line)
            while left:
                left = left[self._file.write(left) :]  # a disk that becomes full may accept a part of it
            if (now := time.monotonic()) - self._synced > SYNC_SECONDS:
                os.fsync(self._file.fileno())
                self._synced = now
        except OSError as error:
            with suppress(OSError):  # if this fails, the next run removes the incomplete line
                self._file.truncate(size)
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> ChairliftError:
        return ChairliftError(
            f"{self._path} cannot be written ({error.strerror or error}): it keeps what it holds; "
            "make room or name another file, and run this again"
        )

    def _read(self) -> None:
        """Read which requests have an answer, and remove a last line that a crash left incomplete."""
        end, has_ours = 0, False
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    custom_id, is_answer = _read_record(line)
                except ValueError:
                    if _is_torn(line, has_ours):
                        self._file.truncate(end)
                        return
                    raise ChairliftError(
                        f"{self._path}, line {number}, is no batch result: is this the right file? Nothing was changed"
                    ) from None
                end += len(line)
                has_ours = has_ours or _BEGINNING.match(line) is not None
                if not is_answer:
                    self.has_failures = True
                elif custom_id is not None:
                    self.answered.add(custom_id)
        if end and not line.endswith(b"\n"):
            self._append(b"\n")  # the last line lacks only its line end


def check_output(path: Path) -> None:
    """Raise an error for an output path that cannot be a file."""
    if path.is_dir():
        raise ChairliftError(f"{path} is a folder: name a file for the answers")
    if path.exists() and not path.is_file():
        raise ChairliftError(f"{path} is no regular file, and a job is continued from what its file holds: name a file")
    if not path.absolute().parent.is_dir():
        raise ChairliftError(f"{path} cannot be written: there is no folder {path.parent}")


def _read_record(line: bytes) -> tuple[str | None, bool]:
    """Return the custom_id of an output line and whether it has an answer; ValueError if it is not a batch result.

    An error may be in the response alone.
    """
    try:
        match json.loads(line):
            case {"custom_id": str() | None as custom_id, "response": dict() | None as response, "error": error}:
                return custom_id, error is None and (response or {}).get("status_code") == 200
    except RecursionError:
        pass
    raise ValueError("no batch result")


def _is_torn(line: bytes, has_ours: bool) -> bool:
    """Whether an invalid line is the beginning of a line that a job has written.

    A few bytes could be the beginning of any file: they count only after whole lines that a job has written.
    """
    if line.endswith(b"\n"):
        return False
    if len(line) >= len(_EXAMPLE):
        return _BEGINNING.match(line) is not None
    return has_ours and _BEGINNING.match(line + _EXAMPLE[len(line) :]) is not None


def _response(status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": replies.new_id("req"), "body": body}


def _open_locked(path: Path) -> FileIO:
    """Open and lock a file to append, without a buffer, so that each write raises its own errors."""
    while True:
        file = path.open("ab", buffering=0)
        _lock(file, path)
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()  # another job has replaced it since it was opened


def _lock(file: FileIO, path: Path) -> None:
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ChairliftError(f"{path} is in use by another job: wait for it, or name another file") from None
