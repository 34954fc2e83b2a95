"""Numbers for a report: percentiles, medians over runs, and short formats."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from statistics import fmean, median

Metrics = dict[str, float]


def machine() -> dict[str, str]:
    """Return the processor, system and Python version, which are recorded with the numbers."""
    return {"processor": platform.machine(), "system": platform.system(), "python": platform.python_version()}


def medians(runs: Sequence[Metrics]) -> Metrics:
    """Return the median of each number over the runs."""
    return {key: median(run[key] for run in runs) for key in runs[0]} if runs else {}


def spread(values: Sequence[float], *shares: int, prefix: str = "") -> Metrics:
    """Return the mean and the percentiles `shares` of the values; empty for no values.

    >>> spread([1, 2, 3], 50, prefix="ttft_")
    {'ttft_mean': 2.0, 'ttft_p50': 2.0}
    """
    if not values:
        return {}
    return {f"{prefix}mean": fmean(values), **{f"{prefix}p{share}": percentile(values, share) for share in shares}}


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two answers of equal length.

    >>> common_length([1, 2, 3], [1, 2, 4])
    2
    """
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile, with linear interpolation.

    >>> percentile([1, 2, 3, 4, 5], 50), percentile([0, 10], 99)
    (3.0, 9.9)
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def scaled(value: float, unit: str) -> str:
    """Format a value with three digits and an SI prefix.

    >>> scaled(4.2371e12, "B/s"), scaled(0.0000051, "s"), scaled(31e9, "B/s")
    ('4.24 TB/s', '5.1 µs', '31 GB/s')
    """
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "µ")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}".rstrip()
    return f"{value / 1e-9:.3g} n{unit}"


def rounded(number: float) -> str:
    """Format a large number in thousands or millions.

    >>> rounded(935936), rounded(4679680)
    ('936k', '4.7M')
    """
    return f"{number / 1e6:.1f}M" if number >= 1e6 else f"{number / 1e3:.0f}k"
