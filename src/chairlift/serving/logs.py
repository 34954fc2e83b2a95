"""Logs: one JSON object per line, or plain text on a terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

_EXTRAS = ("request_id", "tenant", "seconds", "code", "why")  # code and why: of a rejected or failed request
_KINDS = 1000  # most kinds of messages that are counted at a time


def printable(text: str) -> str:
    """Escape line breaks and control characters: the text may hold what a client sent.

    >>> printable("a\\nb\\x1b[2J")
    'a\\\\nb\\\\x1b[2J'
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class JsonLines(logging.Formatter):
    """Format records as JSON: time, level, message and the request's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        entry |= {name: value for name in _EXTRAS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


class Words(logging.Formatter):
    """Format records as plain text."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, followed by the traceback of an exception."""
        extras = " ".join(f"{name}={value}" for name in _EXTRAS if (value := getattr(record, name, None)) is not None)
        line = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {record.getMessage()} {extras}".rstrip()
        line = printable(line)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class Limited(logging.Filter):
    """Passes at most `most` warnings of each kind per minute, and then logs how many it dropped.

    A kind is a message before its values are inserted. Repeated errors that a client causes must not fill a disk. The
    access log is not limited: it has one line per request.
    """

    def __init__(self, most: int = 60, period: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._most, self._period, self._clock = most, period, clock
        self._kinds: dict[object, tuple[float, int]] = {}  # start of the current minute, and records since

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write the record."""
        if record.levelno < logging.WARNING:
            return True
        now = self._clock()
        kind = record.name, record.msg
        begun, count = self._kinds.get(kind, (now, 0))
        if now - begun >= self._period:
            if count > self._most:
                record.msg, record.args = f"{record.getMessage()} (and {count - self._most:,} more like it before)", ()
            begun, count = now, 0
        if len(self._kinds) >= _KINDS:
            self._kinds.clear()
        self._kinds[kind] = begun, count + 1
        return count < self._most


def set_up(kind: str, level: str) -> None:
    """Send the server's logs to stderr; `auto` is plain text on a terminal and JSON elsewhere."""
    handler = logging.StreamHandler()
    handler.setFormatter(Words() if kind == "words" or (kind == "auto" and sys.stderr.isatty()) else JsonLines())
    handler.addFilter(Limited())
    for name in ("chairlift", "uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
