"""Pace: delays answers that only ask for a retry, so that clients that retry at once leave the CPU to the engine."""

from __future__ import annotations

import math

AT_ONCE = 10  # answers without a delay
EVERY = 0.05  # seconds between two answers beyond those
LONGEST = 1.0  # seconds; a client, or a router that has other servers, must not wait for long


class Pace:
    """Books the times of answers: some at once, then one every 50 ms, none later than a second."""

    def __init__(self) -> None:
        self._next = -math.inf  # when the next answer would be due if none were sent at once

    def delay(self, now: float) -> float:
        """Book an answer; return the seconds until it is due.

        >>> pace = Pace()
        >>> [round(pace.delay(now=5.0), 2) for _ in range(12)][8:]
        [0.0, 0.0, 0.05, 0.1]
        """
        self._next = max(self._next, now - (AT_ONCE - 1) * EVERY)
        due = max(0.0, self._next - now)
        self._next = min(self._next + EVERY, now + LONGEST)
        return due
