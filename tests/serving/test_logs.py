"""Logs: what a client can cause often is written a few times a minute."""

from __future__ import annotations

import logging

from chairlift.serving.logs import Limited


def record(message: str, *args: object, level: int = logging.ERROR) -> logging.LogRecord:
    return logging.LogRecord("chairlift", level, "", 0, message, args, None)


def test_a_message_that_comes_too_often_is_dropped_and_counted() -> None:
    now = 0.0
    limited = Limited(most=3, period=60.0, clock=lambda: now)
    passed = [limited.filter(record("no connection can be accepted: %s", number)) for number in range(10)]
    assert passed == [True] * 3 + [False] * 7
    assert limited.filter(record("another message"))
    now = 61.0
    next_one = record("no connection can be accepted: %s", "again")
    assert limited.filter(next_one)
    assert next_one.getMessage() == "no connection can be accepted: again (and 7 more like it before)"
    assert limited.filter(record("no connection can be accepted: %s", "and again"))


def test_the_access_log_is_written_in_full() -> None:
    limited = Limited(most=3)
    assert all(limited.filter(record("%s %s %d", "GET", "/health", 200, level=logging.INFO)) for _ in range(100))


def test_messages_of_endlessly_many_kinds_take_bounded_memory() -> None:
    limited = Limited(most=3)
    for number in range(5000):
        assert limited.filter(record(f"kind {number}"))
    assert len(limited._kinds) <= 1000
