"""What the fair policy counts: a tenant's debt outlasts its absence, and no token is charged twice."""

from __future__ import annotations

from collections import Counter

import pytest
from examples import WORD
from fakes import VOCAB

from chairlift.core.assemble import assemble_scheduler
from chairlift.core.blocks import BlockPool
from chairlift.core.cost import Cost
from chairlift.core.limits import Limits
from chairlift.core.params import SamplingParams
from chairlift.core.plan import StepPlan
from chairlift.core.policies import Fair
from chairlift.core.request import Request
from chairlift.core.scheduler import Scheduler
from chairlift.core.settings import SchedulingSettings
from chairlift.core.step import StepResult


def made(seats: int, blocks: int = 100, preemption: str = "recompute") -> tuple[Scheduler, Fair]:
    limits, pool, host = Limits(seats, 64, 60, VOCAB), BlockPool(blocks, 4), BlockPool(100, 4)
    settings = SchedulingSettings(policy="fair", predictor="max_tokens", preemption=preemption)
    scheduler = assemble_scheduler(settings, limits, pool, host, Cost())
    assert isinstance(scheduler.policy, Fair)
    return scheduler, scheduler.policy


def ask(scheduler: Scheduler, name: str, tenant: str, answer: int, n: int = 1, prompt: int = 3) -> None:
    params = SamplingParams(max_tokens=answer, ignore_eos=True, n=n)
    scheduler.submit(Request(name, [WORD] * prompt, params, tenant=tenant))


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan(0.0)
    scheduler.apply(plan, StepResult([WORD] * len(plan.samples)))
    scheduler.check()
    return plan


def waiting(scheduler: Scheduler, tenant: str) -> int:
    return sum(sequence.request.tenant == tenant for sequence in scheduler.waiting)


@pytest.mark.parametrize("pause", [0, 1, 5])
@pytest.mark.parametrize("others", [1, 4, 8])
def test_a_tenant_that_is_idle_between_its_requests_gets_no_more_than_those_that_always_wait(
    others: int, pause: int
) -> None:
    """It asks for four answers at once, waits for them, and only then asks again, at once or a few steps later."""
    scheduler, _ = made(seats=4)
    served: Counter[str] = Counter()
    last, idle = "none", 0
    for number in range(600):
        for tenant in map(str, range(others)):
            if waiting(scheduler, tenant) < 4:
                ask(scheduler, f"{tenant}.{number}", tenant, answer=10)
        idle = 0 if scheduler.is_live(last) else idle + 1
        if idle > pause:
            last = f"wide{number}"
            ask(scheduler, last, "wide", answer=10, n=4)
        served.update(sequence.request.tenant for sequence in step(scheduler).samples)
    least = min(count for tenant, count in served.items() if tenant != "wide")
    assert served["wide"] <= 1.25 * least, served


def test_a_debt_outlasts_an_absence_until_the_others_have_been_served_as_much() -> None:
    scheduler, policy = made(seats=1)
    ask(scheduler, "a", "a", answer=20)
    ask(scheduler, "b", "b", answer=1)
    while scheduler.is_live("a"):
        step(scheduler)
    owed = 3 + 2 * 20
    assert not scheduler.is_live("a") and "a" not in policy.service
    ask(scheduler, "a again", "a", answer=1)
    assert policy.service == {"a": owed, "b": 0}
    scheduler.abort("a again")
    for number in range(20):
        ask(scheduler, f"b{number}", "b", answer=10)
    while policy.service["b"] < owed:
        step(scheduler)
    ask(scheduler, "a at last", "a", answer=1)
    assert policy.service["a"] == policy.service["b"], "they are level, and nothing is owed for the time away"


def test_accounts_of_idle_tenants_that_owe_nothing_are_forgotten() -> None:
    scheduler, policy = made(seats=2)
    for number in range(200):
        ask(scheduler, f"r{number}", f"tenant {number}", answer=2)
        while scheduler.has_work:
            step(scheduler)
    assert len(policy._idle) <= 1
    assert not policy.service and not policy._paid


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_preempted_answer_is_charged_once(preemption: str) -> None:
    scheduler, policy = made(seats=2, preemption=preemption)
    ask(scheduler, "first", "a", answer=20)
    ask(scheduler, "second", "a", answer=20)
    for _ in range(8):
        step(scheduler)
    ask(scheduler, "other", "b", answer=4)  # takes one of two seats, its share
    assert [each.request.id for each in step(scheduler).preempted] == ["second"]
    charged = 0.0
    while scheduler.has_work:
        charged = policy.service.get("a", charged)
        step(scheduler)
    assert charged == 2 * (3 + 2 * 20)
