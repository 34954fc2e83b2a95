"""Logs: one JSON object a line, or words for a person at a terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

_EXTRAS = ("request_id", "tenant", "seconds", "code", "why")  # the last two: of a request that was refused or failed
_KINDS = 1000  # of messages that are counted at a time


def printable(text: str) -> str:
    """The text in one line, without control characters: it may hold what a client sent.

    >>> printable("a\\nb\\x1b[2J")
    'a\\\\nb\\\\x1b[2J'
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class JsonLines(logging.Formatter):
    """For machines: time, level, message, and what the request was called."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
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
    """For people."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, or several where something broke."""
        extras = " ".join(f"{name}={value}" for name in _EXTRAS if (value := getattr(record, name, None)) is not None)
        line = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {record.getMessage()} {extras}".rstrip()
        line = printable(line)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class Limited(logging.Filter):
    """Lets a few records of each kind pass in a minute, and then says how many it dropped.

    A kind is a message before its values are put in. What a client can cause must not fill a disk, however often it
    does. The access log passes: it has one line for each request.
    """

    def __init__(self, most: int = 60, period: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._most, self._period, self._clock = most, period, clock
        self._kinds: dict[object, tuple[float, int]] = {}  # when each one's minute began, and how many came since

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write it."""
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
    """Send our logs to stderr; `auto` is words on a terminal and JSON elsewhere."""
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
