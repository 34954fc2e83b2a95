"""Numbers for a report: percentiles, medians of several runs, and figures in few letters."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from statistics import fmean, median

Metrics = dict[str, float]


def machine() -> dict[str, str]:
    """Where the numbers come from."""
    return {"processor": platform.machine(), "system": platform.system(), "python": platform.python_version()}


def middle(runs: Sequence[Metrics]) -> Metrics:
    """The median of each number."""
    return {key: median(run[key] for run in runs) for key in runs[0]} if runs else {}


def spread(values: Sequence[float], *shares: int, prefix: str = "") -> Metrics:
    """The mean, and what `shares` percent of the values do not exceed; nothing of no values.

    >>> spread([1, 2, 3], 50, prefix="ttft_")
    {'ttft_mean': 2.0, 'ttft_p50': 2.0}
    """
    if not values:
        return {}
    return {f"{prefix}mean": fmean(values), **{f"{prefix}p{share}": percentile(values, share) for share in shares}}


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two answers of one length have in common before they part.

    >>> common_length([1, 2, 3], [1, 2, 4])
    2
    """
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` percent are not above, between neighbours by straight line.

    >>> percentile([1, 2, 3, 4, 5], 50), percentile([0, 10], 99)
    (3.0, 9.9)
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def scaled(value: float, unit: str) -> str:
    """A figure of three digits with the prefix that suits it.

    >>> scaled(4.2371e12, "B/s"), scaled(0.0000051, "s"), scaled(31e9, "B/s")
    ('4.24 TB/s', '5.1 µs', '31 GB/s')
    """
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "µ")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}".rstrip()
    return f"{value / 1e-9:.3g} n{unit}"


def rounded(number: float) -> str:
    """A large number in few letters.

    >>> rounded(935936), rounded(4679680)
    ('936k', '4.7M')
    """
    return f"{number / 1e6:.1f}M" if number >= 1e6 else f"{number / 1e3:.0f}k"
