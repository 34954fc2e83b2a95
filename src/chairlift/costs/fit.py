"""Fit a cost model to measured steps, and measure its error on held-out steps.

Two forms are fitted by relative error: first the analytic one, which schedulers use, then a curve over the number of
tokens in place of its linear layers, pulled to the analytic form where there are few steps. The curve is needed because
steps of 1, 2, 4 or 16 tokens have kernels of their own: no root of a sum of squares fits the times of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from chairlift.core.cost import Cost, Work
from chairlift.core.errors import ChairliftError
from chairlift.core.words import counted

_LEAST = 40  # measured steps
_HELD_OUT = 5  # every fifth step is held out, to measure the error
_DELAYED = 3.0  # times the prediction: such a step was delayed by something else
_PULL = 0.7  # weight of the analytic form at each point of the curve, in steps
_KNOTS = tuple(sorted({round(base * 2**power) for power in range(14) for base in (1, 1.5)}))
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
    wake: float = 0.0  # seconds that a step takes longer when the engine was idle before it


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
    """Fit by errors relative to the measured seconds, then, without delayed steps, relative to that prediction.

    Relative to the measured seconds, a slow step counts little: robust, but too fast on average. Relative to the
    predicted seconds the mean is right, which throughput needs.
    """
    work = np.array([_features(each.work) for each in steps], float)
    seconds = np.array([step.seconds for step in steps])
    predicted = _columns(work, (found := _search(work, seconds, seconds))[0]) @ found[1]
    kept = seconds <= _DELAYED * predicted
    if kept.sum() >= _LEAST // 2:
        work, seconds, predicted = work[kept], seconds[kept], predicted[kept]
    knee, values = _search(work, seconds, predicted)
    fixed, token, context, pair, sample, prompt = map(float, values)
    cost = Cost(fixed, knee * token, max(token, 1e-12), context, pair, sample, prompt, block_copy)
    return _with_curve(cost, work, seconds, _columns(work, knee) @ values)


def _features(work: Work) -> tuple[int, ...]:
    return work.tokens, work.context, work.pairs, work.samples, work.prompts


def _with_curve(cost: Cost, work: np.ndarray, seconds: np.ndarray, predicted: np.ndarray) -> Cost:
    """Fit the curve over tokens, and the other parts beside it again."""
    tokens = work[:, 0]
    knots = [knot for knot in _KNOTS if tokens.min() <= knot < tokens.max()] + [int(tokens.max())]
    shares = _shares(tokens, knots)
    columns = np.column_stack([shares, work[:, 1:]]) / predicted[:, None]
    expected = np.array([cost.fixed + float(np.hypot(cost.weights, cost.token * knot)) for knot in knots])
    others = np.array([cost.context, cost.pair, cost.sample, cost.prompt])
    scale = np.maximum(np.concatenate([expected, others]), 1e-15)
    pulled = np.diag(_PULL / scale)[: len(knots)]
    wanted = np.concatenate([seconds / predicted, np.full(len(knots), _PULL)])
    values = _non_negative(np.vstack([columns, pulled]), wanted)
    curve = tuple((knot, float(value) - cost.fixed) for knot, value in zip(knots, values, strict=False))
    context, pair, sample, prompt = map(float, values[len(knots) :])
    return replace(cost, context=context, pair=pair, sample=sample, prompt=prompt, curve=curve)


def _shares(tokens: np.ndarray, knots: Sequence[int]) -> np.ndarray:
    """Return each step's weight at each knot of a piecewise linear curve."""
    found = np.zeros((len(tokens), len(knots)))
    above = np.clip(np.searchsorted(knots, tokens, "left"), 1, max(1, len(knots) - 1))
    if len(knots) == 1:
        return np.ones_like(found)
    points = np.array(knots, float)
    share = np.clip((tokens - points[above - 1]) / (points[above] - points[above - 1]), 0, 1)
    rows = np.arange(len(tokens))
    found[rows, above] = share
    found[rows, above - 1] += 1 - share
    return found


def _columns(work: np.ndarray, knee: float) -> np.ndarray:
    return np.column_stack([np.ones(len(work)), np.hypot(knee, work[:, 0]), work[:, 1:]])


def _search(work: np.ndarray, seconds: np.ndarray, scale: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the knee, the tokens at which computing takes as long as reading the weights, and the coefficients.

    They have the least squared error relative to `scale`.
    """
    low, high = 0.5, 4096.0
    best: tuple[float, float, np.ndarray] | None = None
    for _ in range(_ROUNDS):
        knees = np.geomspace(low, high, 24)
        for knee in knees:
            columns = _columns(work, float(knee)) / scale[:, None]
            values = _non_negative(columns, seconds / scale)
            total = float(np.square(columns @ values - seconds / scale).sum())
            if best is None or total < best[0]:
                best = total, float(knee), values
        assert best is not None
        ratio = float(knees[1] / knees[0])
        low, high = best[1] / ratio, best[1] * ratio
    assert best is not None
    return best[1], best[2]


def _non_negative(columns: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return coefficients of at least 0 with which the columns sum nearly to what is wanted."""
    scale = columns.max(0)
    used = np.flatnonzero(scale > 0)
    values = np.zeros(columns.shape[1])
    while used.size:
        own = columns[:, used] / scale[used]
        found = np.linalg.lstsq(own, wanted, rcond=None)[0]
        if (found >= 0).all():
            values[used] = found / scale[used]
            break
        used = np.delete(used, int(found.argmin()))
    return values
