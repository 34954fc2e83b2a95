"""A cost model fitted to steps finds the coefficients they were made with, and tells its error on others."""

from __future__ import annotations

import random

import pytest

from chairlift.core.cost import Cost, Work, pairs_of
from chairlift.core.errors import ChairliftError
from chairlift.costs.fit import MeasuredStep, fit

GPU = Cost(2e-3, 2.9e-3, 2.3e-5, 3.8e-8, 1.8e-11, 1e-6)
CPU = Cost(0.0, 0.018, 4.2e-3, 9e-6, 1.4e-5, 0.0)


def steps_of(cost: Cost, noise: float, count: int = 300) -> list[MeasuredStep]:
    r = random.Random(0)
    found = []
    for _ in range(count):
        decodes = r.choice([0, 1, 2, 4, 8, 16, 32, 64])
        prompt = r.choice([0, 0, 16, 100, 256]) or (0 if decodes else 8)
        context = sum(r.randint(16, 2000) for _ in range(decodes))
        work = Work(decodes + prompt, context, pairs_of(r.randint(0, 500), prompt), decodes + bool(prompt))
        found.append(MeasuredStep(work, cost.seconds(work) * (1 + r.gauss(0, noise))))
    return found


@pytest.mark.parametrize("cost", [GPU, CPU], ids=["gpu", "cpu"])
def test_exact_steps_give_exact_predictions(cost: Cost) -> None:
    found = fit(steps_of(cost, 0.0))
    assert found.p90_error < 0.01 and abs(found.bias) < 0.01
    for work in (Work(1, 10, 0, 1), Work(40, 20000, 0, 40), Work(256, 0, pairs_of(0, 256), 1)):
        assert found.cost.seconds(work) == pytest.approx(cost.seconds(work), rel=0.05)


def test_noise_is_told_and_steps_that_were_delayed_do_not_count() -> None:
    steps = steps_of(GPU, 0.05)
    delayed = [
        step._replace(seconds=20 * step.seconds) if number % 9 == 1 else step for number, step in enumerate(steps)
    ]
    found = fit(delayed)
    assert 0.01 < found.median_error < 0.1
    exact = sum(GPU.seconds(step.work) for step in steps)
    assert sum(found.cost.seconds(step.work) for step in steps) == pytest.approx(exact, rel=0.03)


def test_no_coefficient_is_negative_and_few_steps_are_refused() -> None:
    steps = [MeasuredStep(Work(n % 7 + 1, 100 * (n % 3), 0, 1), 0.01 - 1e-4 * (n % 3)) for n in range(80)]
    cost = fit(steps).cost
    assert min(cost.fixed, cost.weights, cost.token, cost.context, cost.pair, cost.sample) >= 0
    with pytest.raises(ChairliftError, match="12 steps measured, and a cost model needs 40"):
        fit(steps[:12])
