"""Recording: the traffic of a server in a file of JSON lines that `chairlift simulate` and `chairlift plan` read.

A line has a request's arrival time, lengths, tenant, endpoint and priority, and hashes of its prompt's blocks. Tenants
and blocks are hashed with a key that is drawn when the server starts and never written: the lines say which requests
have a common prefix and a common tenant, and nothing of their content. A thread hashes and writes.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import secrets
import threading
import time
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from chairlift.core.errors import ChairliftError

log = logging.getLogger("chairlift")

BLOCK_TOKENS = 64  # tokens of a hashed block; a prompt's last, partial block is not hashed
_KEY_FILE = "record.key"
_MOST_WAITING = 4096  # requests that are not written yet
_MOST_TOKENS = 4 << 20  # of their prompts
_MOST_BYTES = 4 << 30  # of the file
_LONGEST_LINE = 4 << 20  # bytes: a prompt of a million tokens has a quarter of it
_CLOSE_SECONDS = 5.0


class Served(NamedTuple):
    """A request that has ended, with the length of each of its answers."""

    arrival: float  # on the monotonic clock
    prompt: Sequence[int]
    outputs: list[int]
    tenant: str
    endpoint: str
    priority: int
    salt: str  # only requests with the same salt share blocks


class Recording:
    """Appends requests to a file, in a thread of its own; `add` never blocks and never raises.

    Further HTTP processes append to the same file. When requests end faster than they are written, some are left out,
    and `close` logs how many. An error of the disk is logged once and ends the recording; the lines before it stay.
    """

    def __init__(self, path: Path, key: bytes) -> None:
        self._path = path
        self._key = key
        self._epoch = time.time() - time.monotonic()
        self._waiting: queue.SimpleQueue[Served | None] = queue.SimpleQueue()
        self._added_tokens = self._written_tokens = 0  # each changed by one thread alone
        self._left_out = 0
        self._has_failed = False
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    @staticmethod
    def open(path: str, folder: str) -> Recording:
        """Open a file with the key in the server's private folder."""
        try:
            key = (Path(folder) / _KEY_FILE).read_bytes()
        except OSError:  # a cleaner of /tmp has removed it: this process's hashes equal no other's
            key = secrets.token_bytes(16)
        return Recording(Path(path), key)

    def add(self, served: Served) -> None:
        """Queue a request for the thread; leave it out if too many wait."""
        if self._has_failed:
            return
        size = len(served.prompt)
        if self._waiting.qsize() >= _MOST_WAITING or self._added_tokens + size - self._written_tokens > _MOST_TOKENS:
            self._left_out += 1
            return
        self._added_tokens += size
        self._waiting.put(served)

    def close(self) -> None:
        """Write what waits, for a few seconds at most, and close the file."""
        self._waiting.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if self._left_out:
            log.warning("%d requests are not in %s: they ended too fast to be written", self._left_out, self._path)

    # ---- the thread

    def _run(self) -> None:
        while (served := self._waiting.get()) is not None:
            if self._has_failed:
                continue
            try:
                lines = self._lines(served)
                self._written_tokens += len(served.prompt)
                self._append(lines)
            except Exception as error:
                self._has_failed = True
                reason = getattr(error, "strerror", None) or error
                log.error("%s cannot be written: %s; no more requests are recorded in it", self._path, reason)
        os.close(self._file)

    def _lines(self, served: Served) -> bytes:
        """Return a line for each answer: a simulated request has one."""
        line: dict[str, Any] = {
            "timestamp": round(self._epoch + served.arrival, 4),
            "prompt_tokens": len(served.prompt),
            "output_tokens": 0,
        }
        if served.tenant:
            line["tenant"] = self._hashed(served.tenant.encode()).hex()
        line["endpoint"] = served.endpoint
        if served.priority:
            line["priority"] = served.priority
        line["block_tokens"] = BLOCK_TOKENS
        line["hash_ids"] = self._blocks(served)
        return b"".join(
            json.dumps(line | {"output_tokens": count}, separators=(",", ":")).encode() + b"\n"
            for count in served.outputs
        )

    def _blocks(self, served: Served) -> list[int]:
        """Return an id for each whole block of the prompt, which depends on all tokens before its end."""
        found, before = [], self._hashed(served.salt.encode())
        for start in range(0, len(served.prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            before = self._hashed(before + array("q", served.prompt[start : start + BLOCK_TOKENS]).tobytes())
            found.append(int.from_bytes(before))
        return found

    def _hashed(self, content: bytes) -> bytes:
        return blake2b(content, key=self._key, digest_size=6).digest()

    def _append(self, lines: bytes) -> None:
        """Append whole lines or nothing."""
        written = os.write(self._file, lines)
        end = os.lseek(self._file, 0, os.SEEK_CUR)
        if written < len(lines):
            if os.fstat(self._file).st_size == end:  # no other process has written behind it
                os.ftruncate(self._file, end - written)
            raise OSError("the disk is full")
        if end > _MOST_BYTES:
            raise OSError(f"it has {_MOST_BYTES >> 30} GiB")


def prepare(path: Path) -> None:
    """Raise for a file that cannot be recorded to; remove an incomplete last line."""
    try:
        with open(path, "a+b", opener=_private) as file:
            size = file.tell()
            file.seek(0)
            first = file.readline(_LONGEST_LINE)
            if first and not first.startswith(b'{"timestamp":'):
                raise ChairliftError(f"{path} has other content than recorded requests: name another file")
            file.seek(max(0, size - _LONGEST_LINE))
            tail = file.read()
            if tail and not tail.endswith(b"\n"):
                file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)
    except OSError as error:
        reason = error.strerror or error
        raise ChairliftError(f"{path} cannot be recorded to: {reason}; name another file") from None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def make_key(folder: str) -> None:
    """Draw the key of this server's recordings, which all its HTTP processes read."""
    file = os.open(Path(folder) / _KEY_FILE, os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(file, secrets.token_bytes(16))
    os.close(file)
