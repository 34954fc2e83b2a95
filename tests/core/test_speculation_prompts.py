"""Drafts beside prompts: however many would pay, prompts in prefill and waiting requests get tokens in every step."""

from __future__ import annotations

import pytest
from examples import END, WORD, names, request
from fakes import VOCAB, drafts_of

from chairlift.core.assemble import assemble_scheduler
from chairlift.core.blocks import BlockPool
from chairlift.core.cost import Cost
from chairlift.core.limits import Limits
from chairlift.core.plan import StepPlan
from chairlift.core.scheduler import Scheduler
from chairlift.core.settings import SchedulingSettings
from chairlift.core.step import StepResult

WRONG = [END] * 8  # drafts that are never accepted


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan(0.0)
    counts = [1] * len(plan.samples) if plan.drafts else None
    scheduler.apply(plan, StepResult([WORD] * len(plan.samples), counts=counts))
    scheduler.check()
    return plan


def drafting(
    decodes: int, step_tokens: int, max_length: int = 100, cost: Cost | None = None, **chosen: object
) -> Scheduler:
    """A scheduler with so many sequences that get all drafts they can."""
    limits, blocks = Limits(decodes + 1, step_tokens, max_length, VOCAB), BlockPool(1000, 4)
    settings = SchedulingSettings(**chosen)  # type: ignore[arg-type]
    scheduler = assemble_scheduler(settings, limits, blocks, BlockPool(0, 4), cost or Cost())
    for number in range(decodes):
        scheduler.submit(request(f"d{number}", eos=None, max_tokens=80))
    while scheduler.waiting or any(not each.output for each in scheduler.running):
        step(scheduler)
    scheduler.planner.speculation = drafts_of(WRONG)
    return scheduler


def prompt_tokens(plan: StepPlan) -> int:
    return sum(each.count for each in plan.slices if each.sequence.request.id == "prompt")


def drafts(plan: StepPlan) -> int:
    return sum(len(tokens) for _, tokens in plan.drafts)


@pytest.mark.parametrize(("decodes", "step_tokens"), [(1, 3), (2, 16), (4, 20), (8, 40)])
def test_prompts_get_half_of_what_decodes_leave_or_more(decodes: int, step_tokens: int) -> None:
    scheduler = drafting(decodes, step_tokens)
    assert drafts(step(scheduler)) == min(8 * decodes, step_tokens - decodes), "no prompt waits"
    scheduler.submit(request("prompt", 90, eos=None, max_tokens=2))
    for _ in range(3):
        plan = step(scheduler)
        left = step_tokens - decodes
        assert prompt_tokens(plan) + drafts(plan) == left
        assert prompt_tokens(plan) >= left / 2 and drafts(plan) == min(8 * decodes, left // 2)


def test_a_whole_prompt_fits_beside_checks_of_drafts() -> None:
    scheduler = drafting(4, 110, prefill="whole")
    assert drafts(step(scheduler)) == 32
    scheduler.submit(request("prompt", 99, eos=None, max_tokens=1))
    plan = step(scheduler)
    assert prompt_tokens(plan) == 99 and drafts(plan) == 110 - 100 - 4


@pytest.mark.parametrize("decodes", [1, 2, 4, 8, 20])
def test_a_latency_target_that_decodes_miss_leaves_prompts_their_tokens_and_allows_no_draft(decodes: int) -> None:
    scheduler = drafting(decodes, 256, cost=Cost(fixed=0.01, token=0.001), target_tpot=0.005)
    scheduler.submit(request("prompt", 90, eos=None, max_tokens=2))
    plan = step(scheduler)
    assert prompt_tokens(plan) == 16 and not plan.drafts


def test_drafts_fit_a_latency_target() -> None:
    scheduler = drafting(4, 256, cost=Cost(fixed=0.01, token=0.001), target_tpot=0.025)
    assert step(scheduler).tokens == 15
    scheduler.submit(request("prompt", 90, eos=None, max_tokens=2))
    plan = step(scheduler)
    assert prompt_tokens(plan) == 16, "some tokens more than fit, but always a few"
    assert names([each.sequence for each in plan.slices][-1:]) == ["prompt"]
