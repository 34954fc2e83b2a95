"""Statistics in bounded memory: percentiles from a histogram, and a series over time that halves its resolution."""

from __future__ import annotations

from math import inf, log

_RATIO = 1.01  # between the bounds of a bucket: percentiles are within 1%
_LOG = log(_RATIO)
_LEAST = 1e-7  # smaller values count as this


class Histogram:
    """Counts values in buckets of equal ratio.

    >>> times = Histogram()
    >>> for value in range(1, 101):
    ...     times.add(value)
    >>> round(times.percentile(50)), times.mean, times.most
    (50, 50.5, 100)
    """

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.most = 0.0
        self._buckets: dict[int, int] = {}

    def add(self, value: float, count: int = 1) -> None:
        """Count a value, several times if asked."""
        bucket = int(log(value if value > _LEAST else _LEAST) // _LOG)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + count
        self.count += count
        self.total += value * count
        if value > self.most:
            self.most = value

    @property
    def mean(self) -> float:
        """The mean of all values; 0 if there is none."""
        return self.total / self.count if self.count else 0.0

    def percentile(self, share: float) -> float:
        """Return the value that `share` percent do not exceed, within 1%; 0 if there is none."""
        wanted, seen = share / 100 * self.count, 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return min(float(_RATIO ** (bucket + 0.5)), self.most)
        return self.most

    def curve(self) -> list[tuple[float, float]]:
        """Return the values by the percent of all values that do not exceed them."""
        found, seen = [], 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            found.append((100 * seen / self.count, min(float(_RATIO ** (bucket + 0.5)), self.most)))
        return found

    def summary(self, scale: float = 1.0) -> dict[str, float]:
        """Return mean, percentiles and maximum, times `scale`."""
        shares = {f"p{share}": scale * self.percentile(share) for share in (50, 90, 99)}
        return {"mean": scale * self.mean, **shares, "max": scale * self.most}


class Series:
    """Means of several values over time, weighted by duration, in at most `most` intervals of equal length."""

    def __init__(self, names: tuple[str, ...], most: int = 1024) -> None:
        self.names = names
        self.interval = 0.25  # seconds; doubles when there are too many
        self._most = most
        self._sums: list[list[float]] = []  # of each interval: value times seconds, and the seconds
        self._last = 0.0
        self._own: list[float] = []  # the sums of the interval that `_last` is in, and its end
        self._end = 0.0

    def add(self, until: float, values: tuple[float, ...]) -> None:
        """Note the values since the last call."""
        if self._last < until <= self._end:  # like most steps, within the interval of the one before
            self._note(until, values)
            return
        while self._last < until:
            place = int(self._last / self.interval + 1e-9)
            if place >= self._most:
                self._halve()
                continue
            self._end = (place + 1) * self.interval
            if self._end <= self._last:  # the next number above is the interval's end: no time is left in it
                break
            while len(self._sums) <= place:
                self._sums.append([0.0] * (len(self.names) + 1))
            self._own = self._sums[place]
            self._note(min(until, self._end), values)

    def _note(self, until: float, values: tuple[float, ...]) -> None:
        """Add the values until a moment within the present interval."""
        own, span = self._own, until - self._last
        for column, value in enumerate(values):
            if value:
                own[column] += span * value
        own[-1] += span
        self._last = until

    def _halve(self) -> None:
        """Join pairs of intervals."""
        pairs = zip(self._sums[::2], [*self._sums[1::2], None], strict=False)
        self._sums = [a if b is None else [x + y for x, y in zip(a, b, strict=True)] for a, b in pairs]
        self.interval *= 2
        self._end = 0.0  # it is looked up again

    def rows(self) -> list[dict[str, float]]:
        """Return each interval with its start and the means."""
        return [
            {
                "at": place * self.interval,
                **{name: total / (own[-1] or inf) for name, total in zip(self.names, own, strict=False)},
            }
            for place, own in enumerate(self._sums)
        ]
