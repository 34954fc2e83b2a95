"""Logs: one JSON object a line, or words for a person at a terminal."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import msgspec

_EXTRAS = ("request_id", "tenant", "seconds", "code", "why")  # the last two: of a request that was refused or failed


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


def set_up(kind: str, level: str) -> None:
    """Send our logs to stderr; `auto` is words on a terminal and JSON elsewhere."""
    handler = logging.StreamHandler()
    handler.setFormatter(Words() if kind == "words" or (kind == "auto" and sys.stderr.isatty()) else JsonLines())
    for name in ("chairlift", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
