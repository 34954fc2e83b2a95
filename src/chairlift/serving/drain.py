"""Drain: the rate at which requests leave the queue. Returns: Retry-After times for rejected clients."""

from __future__ import annotations

import math
from collections.abc import Callable

MEMORY = 30.0  # seconds of busy time after which a departure has weight 1/e
STALE = 60.0  # seconds of idle time after which the rate is reset: the next requests may be quite different
ENOUGH_DEPARTURES, ENOUGH_SECONDS = 16, 5.0  # busy; either one makes the measured rate usable
LONGEST_RETRY = 60.0  # seconds; OpenAI's client ignores a longer Retry-After
_GUESS = 0.02  # seconds between two departures while the rate is unknown
_PACE = 0.8  # rejected clients return at this fraction of the drain rate, so that they find room


class Drain:
    """The rate at which requests leave the queue: exponentially weighted sums over the time in which it was busy.

    Idle time says nothing about the rate and is not counted; busy time without a departure lowers the rate.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._seconds = 0.0
        self._requests = 0.0
        self._tokens = 0.0
        self._departures = 0
        self._elapsed = 0.0  # all busy time, unweighted
        self._standstill = 0.0  # busy time since the last departure
        self._idle = 0.0

    def busy(self, seconds: float) -> None:
        """Add time in which requests waited for room in the batch."""
        self._idle = 0.0
        self._elapsed += seconds
        self._standstill += seconds
        fade = math.exp(-seconds / MEMORY)
        self._seconds = self._seconds * fade + MEMORY * (1 - fade)
        self._requests *= fade
        self._tokens *= fade

    def idle(self, seconds: float) -> None:
        """Add time in which no request waited for room in the batch."""
        self._idle += seconds
        self._standstill = 0.0
        if self._idle > STALE:
            self._forget()

    def leave(self, requests: int, tokens: int) -> None:
        """Count requests, and their prompt tokens, that left a busy queue."""
        self._standstill = 0.0
        self._departures += requests
        self._requests += requests
        self._tokens += tokens

    @property
    def is_known(self) -> bool:
        """Whether enough departures or busy time were counted for a prediction."""
        return self._departures >= ENOUGH_DEPARTURES or (self._departures > 0 and self._elapsed >= ENOUGH_SECONDS)

    def seconds_for(self, requests: int, tokens: int) -> float:
        """Predict the seconds until so many requests and tokens leave the queue; at least one of the two is above 0.

        While the rate is unknown, return the busy time since the last departure, a lower bound.
        """
        if not self.is_known:
            return self._standstill
        pairs = ((requests, self._requests), (tokens, self._tokens))
        # A sum is 0 if the departed requests had no tokens, or if none departed for hours.
        return max(amount * self._seconds / left if left else math.inf for amount, left in pairs if amount > 0)

    def seconds_each(self) -> float:
        """Return the mean seconds between two departures, or a guess while the rate is unknown."""
        return self.seconds_for(1, 0) if self.is_known else _GUESS


class Returns:
    """Spreads the Retry-After times of rejected clients, a little slower than the queue drains.

    Clients that are rejected together would otherwise retry together, and be rejected again.
    """

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._next = -math.inf  # when the next rejected client should retry

    def book(self, now: float, soonest: float, seconds_each: float) -> float:
        """Return the whole seconds after which a client should retry: at least `soonest`, at most a minute."""
        self._next = max(self._next, now + soonest)
        seconds = self._next - now
        if seconds >= LONGEST_RETRY:  # the minute is fully booked: spread further retries over its second half
            self._next = now + LONGEST_RETRY
            seconds = LONGEST_RETRY * (1 + self._random()) / 2
        else:
            between = min(LONGEST_RETRY, seconds_each / _PACE)
            self._next += between
            seconds += self._random() * max(1.0, between)
        return float(math.ceil(min(LONGEST_RETRY, max(1.0, seconds))))
