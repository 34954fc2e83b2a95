"""A cost model fitted to steps finds the coefficients they were made with, and tells its error on others."""

from __future__ import annotations

import random
from dataclasses import replace

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


def seconds_of_kernels(work: Work) -> float:
    """A device with kernels for few rows that are faster than its matrix product, and rows padded to 8."""
    rows = work.tokens if work.tokens <= 4 else 8 * -(-work.tokens // 8)
    linear = 0.004 + 0.003 * rows if work.tokens <= 4 else 0.02 + 0.0006 * rows
    return linear + 2e-6 * work.context + 3e-7 * work.pairs + 0.001 * work.prompts


def test_kernels_for_few_rows_are_in_the_curve() -> None:
    r, steps = random.Random(0), []
    for _ in range(600):
        decodes, prompt = r.choice([1, 2, 3, 4, 6, 8, 12, 16, 24, 32]), r.choice([0, 0, 40, 120, 250])
        context = sum(r.randint(16, 400) for _ in range(decodes))
        work = Work(decodes + prompt, context, pairs_of(0, prompt), decodes + bool(prompt), int(prompt > 0))
        steps.append(MeasuredStep(work, seconds_of_kernels(work) * (1 + r.gauss(0, 0.03))))
    found = fit(steps)
    assert found.p90_error < 0.08
    root = replace(found.cost, curve=())
    for tokens in (1, 2, 4, 8, 16):
        work = Work(tokens, 200 * tokens, 0, tokens)
        assert found.cost.seconds(work) == pytest.approx(seconds_of_kernels(work), rel=0.1)
    assert root.seconds(Work(1, 200, 0, 1)) > 1.2 * seconds_of_kernels(Work(1, 200, 0, 1))
    assert found.cost.seconds(Work(1000, 0, 0, 1)) > found.cost.seconds(Work(400, 0, 0, 1))  # beyond what was measured


def test_the_mean_is_right_though_some_steps_are_slow() -> None:
    r = random.Random(3)
    steps = [step._replace(seconds=step.seconds * (1.9 if r.random() < 0.2 else 1.0)) for step in steps_of(GPU, 0.05)]
    found = fit(steps)
    total = sum(step.seconds for step in steps)
    assert sum(found.cost.seconds(step.work) for step in steps) == pytest.approx(total, rel=0.03)
