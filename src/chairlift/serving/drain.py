"""How fast the queue empties, and when refused clients should try again."""

from __future__ import annotations

import math
from collections.abc import Callable

MEMORY = 30.0  # seconds of a busy queue after which a departure counts for 1/e
STALE = 60.0  # seconds without a busy queue after which the rate is forgotten: the next requests may be quite different
ENOUGH_DEPARTURES, ENOUGH_SECONDS = 16, 5.0  # either makes a rate out of what has been seen
LONGEST_RETRY = 60.0  # seconds; OpenAI's client does not heed a longer Retry-After
_GUESS = 0.02  # seconds between two departures
_PACE = 0.8  # of the rate at which the queue empties: so fast refused clients return, and find room


class Drain:
    """The rate at which requests leave the queue: sums that fade exponentially, over the time in which it was busy.

    Time without a busy queue says nothing about the rate and is not counted; a busy queue that nothing leaves counts as
    slow.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._seconds = 0.0
        self._requests = 0.0
        self._tokens = 0.0
        self._departures = 0
        self._elapsed = 0.0  # all busy time, without fading
        self._standstill = 0.0  # busy time since the last departure
        self._idle = 0.0

    def busy(self, seconds: float) -> None:
        """Count time in which requests had to wait."""
        self._idle = 0.0
        self._elapsed += seconds
        self._standstill += seconds
        fade = math.exp(-seconds / MEMORY)
        self._seconds = self._seconds * fade + MEMORY * (1 - fade)
        self._requests *= fade
        self._tokens *= fade

    def idle(self, seconds: float) -> None:
        """Count time in which no request had to wait."""
        self._idle += seconds
        self._standstill = 0.0
        if self._idle > STALE:
            self._forget()

    def leave(self, requests: int, tokens: int) -> None:
        """Count requests, with the tokens of their prompts, that left a busy queue."""
        self._standstill = 0.0
        self._departures += requests
        self._requests += requests
        self._tokens += tokens

    @property
    def is_known(self) -> bool:
        """Whether enough has been seen to predict by."""
        return self._departures >= ENOUGH_DEPARTURES or (self._departures > 0 and self._elapsed >= ENOUGH_SECONDS)

    def seconds_for(self, requests: int, tokens: int) -> float:
        """Predict how long it takes until so many have left, of which one is above 0.

        While the rate is unknown it is as long as nothing has left a busy queue, the least that can be said.
        """
        if not self.is_known:
            return self._standstill
        pairs = ((requests, self._requests), (tokens, self._tokens))
        # A sum is 0 when what has left had no tokens, or when nothing has left for hours.
        return max(amount * self._seconds / left if left else math.inf for amount, left in pairs if amount > 0)

    def seconds_each(self) -> float:
        """Return the mean time between two departures, or a guess while it is unknown."""
        return self.seconds_for(1, 0) if self.is_known else _GUESS


class Returns:
    """When refused clients are told to return: one after the other, a little slower than the queue empties.

    Clients that are refused together would otherwise return together, and be refused again.
    """

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._next = -math.inf  # when the next refused client should return

    def book(self, now: float, soonest: float, seconds_each: float) -> float:
        """Return after how many whole seconds a client should try again: `soonest` or later, and at most a minute."""
        self._next = max(self._next, now + soonest)
        seconds = self._next - now
        if seconds >= LONGEST_RETRY:  # too many are booked: the rest are spread over the second half of the minute
            self._next = now + LONGEST_RETRY
            seconds = LONGEST_RETRY * (1 + self._random()) / 2
        else:
            between = min(LONGEST_RETRY, seconds_each / _PACE)
            self._next += between
            seconds += self._random() * max(1.0, between)
        return float(math.ceil(min(LONGEST_RETRY, max(1.0, seconds))))
