"""StepTimes: the duration of steps with few tokens, such as decodes and checks of drafts, by their number of tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from math import exp, log

_ALL, _OWN = 0.15, 0.05  # shares of a step's error, in logarithms, that correct all times, and its own
_FIRST = 12  # steps that correct all times by one factor: the measurements at start do not include the host's part
_SANE = 1.4  # largest error that counts: a longer step was delayed by something else


class StepTimes:
    """Measured seconds of some sizes. A step between two sizes is interpolated, or padded to the next larger one.

    Where the cost model (cost.py) has one line for all sizes, this has a point for each: whether another draft pays
    depends on the difference of neighbours.
    """

    def __init__(self, points: Iterable[tuple[int, float]], *, is_padded: bool = False) -> None:
        ordered = sorted(points)
        self._sizes = [size for size, _ in ordered]
        self._seconds = [seconds for _, seconds in ordered]
        self._is_padded = is_padded
        self._learned = 0  # steps
        for place in range(len(self._seconds) - 2, -1, -1):  # whatever disturbs a measurement makes it longer
            self._seconds[place] = min(self._seconds[place], self._seconds[place + 1])

    def seconds(self, tokens: int) -> float:
        """Predict the seconds of a step with so many tokens.

        >>> StepTimes([(1, 0.010), (3, 0.020)]).seconds(2)
        0.015
        """
        sizes, seconds = self._sizes, self._seconds
        place = bisect_left(sizes, tokens)
        if place == len(sizes):  # larger than any: in proportion to the last
            return seconds[-1] * tokens / sizes[-1]
        if place == 0 or self._is_padded or sizes[place] == tokens:
            return seconds[place]
        low, high = sizes[place - 1], sizes[place]
        return seconds[place - 1] + (seconds[place] - seconds[place - 1]) * (tokens - low) / (high - low)

    def rises_after(self, tokens: int) -> bool:
        """Whether one more token takes longer; it does not if the step is padded to the same size."""
        return (
            not self._is_padded or tokens >= self._sizes[-1] or self._sizes[bisect_left(self._sizes, tokens)] == tokens
        )

    def learn(self, tokens: int, seconds: float) -> None:
        """Correct all times by a finished step, since load and contexts change all of them, and its own time more."""
        if seconds <= 0 or tokens > self._sizes[-1]:
            return
        error = max(-_SANE, min(_SANE, log(seconds / self.seconds(tokens))))
        self._learned += 1
        if self._learned <= _FIRST:
            factor = exp(error / 2)
            self._seconds = [each * factor for each in self._seconds]
            return
        factor = exp(_ALL * error)
        self._seconds = [each * factor for each in self._seconds]
        place = bisect_left(self._sizes, tokens)
        self._seconds[place] *= exp(_OWN * error)
        if place and self._sizes[place] != tokens and not self._is_padded:
            self._seconds[place - 1] *= exp(_OWN * error)
        for other in range(1, len(self._seconds)):  # no step takes less time than a smaller one
            self._seconds[other] = max(self._seconds[other], self._seconds[other - 1])
