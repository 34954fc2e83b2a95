"""Fit a cost model to measured steps, and tell its error on steps that it has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from chairlift.core.cost import Cost, Work
from chairlift.core.errors import ChairliftError
from chairlift.core.words import counted

_LEAST = 40  # measured steps
_HELD_OUT = 5  # one step in so many is kept for the error
_OUTLIER = 4.0  # times the typical error: such a step was delayed by something else
_ROUNDS = 4  # of refining the number of tokens at which computing takes as long as reading


class MeasuredStep(NamedTuple):
    """A step's work and seconds."""

    work: Work
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A cost model, and its relative errors on held-out steps."""

    cost: Cost
    steps: int
    median_error: float
    p90_error: float
    bias: float  # of the sum of all held-out steps


def fit(steps: Sequence[MeasuredStep], block_copy: float = 1e-4) -> Fit:
    """Fit all coefficients but `block_copy` to steps, of which every fifth is held out."""
    if len(steps) < _LEAST:
        raise ChairliftError(
            f"{counted(len(steps), 'step')} measured, and a cost model needs {_LEAST}: use more requests"
        )
    held = steps[::_HELD_OUT]
    seen = [step for number, step in enumerate(steps) if number % _HELD_OUT]
    cost = _fit(seen, block_copy)
    errors = np.array([cost.seconds(step.work) / step.seconds - 1 for step in held])
    real = sum(step.seconds for step in held)
    bias = float(sum(cost.seconds(step.work) for step in held) / real - 1)
    sizes = np.abs(errors)
    return Fit(cost, len(steps), float(np.median(sizes)), float(np.quantile(sizes, 0.9)), bias)


def _fit(steps: Sequence[MeasuredStep], block_copy: float) -> Cost:
    """Fit twice, the second time without the steps that the first fit is far from."""
    work = np.array(
        [(each.work.tokens, each.work.context, each.work.pairs, each.work.samples) for each in steps], float
    )
    seconds = np.array([step.seconds for step in steps])
    found, errors = _search(work, seconds)
    kept = errors <= _OUTLIER * max(float(np.median(errors)), 1e-3)
    if kept.sum() >= _LEAST // 2:
        found, _ = _search(work[kept], seconds[kept])
    knee, values = found
    fixed, token, context, pair, sample = map(float, values)
    return Cost(fixed, knee * token, max(token, 1e-12), context, pair, sample, block_copy)


def _search(work: np.ndarray, seconds: np.ndarray) -> tuple[tuple[float, np.ndarray], np.ndarray]:
    """Return the best knee, the tokens at which computing takes as long as reading the weights, and coefficients."""
    low, high = 0.5, 4096.0
    best: tuple[float, float, np.ndarray, np.ndarray] | None = None
    for _ in range(_ROUNDS):
        knees = np.geomspace(low, high, 24)
        for knee in knees:
            columns = np.column_stack(
                [np.ones(len(work)), np.hypot(knee, work[:, 0]), work[:, 1], work[:, 2], work[:, 3]]
            )
            values = _non_negative(columns / seconds[:, None])
            errors = np.abs(columns @ values / seconds - 1)
            total = float(np.square(errors).sum())
            if best is None or total < best[0]:
                best = total, float(knee), values, errors
        assert best is not None
        ratio = float(knees[1] / knees[0])
        low, high = best[1] / ratio, best[1] * ratio
    assert best is not None
    return (best[1], best[2]), best[3]


def _non_negative(columns: np.ndarray) -> np.ndarray:
    """Return coefficients of at least 0 with which the columns sum to nearly 1, so that errors are relative."""
    scale = columns.max(0)
    used = np.flatnonzero(scale > 0)
    values = np.zeros(columns.shape[1])
    while used.size:
        own = columns[:, used] / scale[used]
        found = np.linalg.lstsq(own, np.ones(len(columns)), rcond=None)[0]
        if (found >= 0).all():
            values[used] = found / scale[used]
            break
        used = np.delete(used, int(found.argmin()))
    return values
