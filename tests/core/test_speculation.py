"""The controller: how many drafts pay, by what was accepted, by what steps cost, and by what else is in the step."""

from __future__ import annotations

import random
from typing import Any

import pytest

from chairlift.core.assemble import assemble_scheduler
from chairlift.core.beams import Beams
from chairlift.core.blocks import BlockPool
from chairlift.core.constraint import Constraint
from chairlift.core.cost import Cost
from chairlift.core.drafting import MAX_DRAFTS, Drafter, Proposal
from chairlift.core.limits import Limits
from chairlift.core.params import SamplingParams
from chairlift.core.plan import StepPlan
from chairlift.core.policies import Fair
from chairlift.core.request import Request, Sequence
from chairlift.core.settings import SchedulingSettings
from chairlift.core.speculation import Speculation
from chairlift.core.step import StepResult
from chairlift.core.step_times import StepTimes

FREE = [(1, 1.0), (600, 1.0)]  # another token costs nothing, as where reading the weights takes all the time
DEAR = [(1, 1.0), (600, 600.0)]  # another token costs as much as the first


class Endless(Drafter):
    def propose(self, sequence: Sequence, most: int) -> Proposal:
        return Proposal(list(range(most)))


def make(points: list[tuple[int, float]], **more: int) -> Speculation:
    return Speculation(Endless(), StepTimes(points), **more)


def sequences(count: int, **more: object) -> list[Sequence]:
    return [
        Sequence(Request(f"r{i}", [1, 2, 3], SamplingParams(), **more), i, 1000)  # type: ignore[arg-type]
        for i in range(count)
    ]


def depths(speculation: Speculation, them: list[Sequence], beside: int = 0) -> list[int]:
    return [len(each.tokens) for each in speculation.choose(them, len(them), beside)]


def teach(speculation: Speculation, sequence: Sequence, acceptance: float, checks: int = 40) -> None:
    draw = random.Random(0)
    for _ in range(checks):
        accepted = 0
        while accepted < 8 and draw.random() < acceptance:
            accepted += 1
        speculation.observe(sequence, 8, accepted)


def test_free_drafts_are_all_checked_and_dear_ones_not_at_all() -> None:
    [one] = sequences(1)
    assert depths(make(FREE), [one]) == [MAX_DRAFTS]
    assert depths(make(FREE, max_drafts=3), [one]) == [3]
    assert depths(make(DEAR), [one]) == [0]
    assert make(FREE).may_pay(1) and not make(DEAR).may_pay(1), "then no drafter is asked"


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.75, 0.9])
@pytest.mark.parametrize("slope", [0.02, 0.1, 0.3])
def test_one_stream_gets_the_number_with_the_most_tokens_a_second(acceptance: float, slope: float) -> None:
    speculation = make([(1, 1.0), (101, 1.0 + 100 * slope)])
    [one] = sequences(1)
    teach(speculation, one, acceptance, checks=400)
    estimate = speculation.acceptance(one)
    assert abs(estimate - acceptance) < 0.2
    rates = [sum(estimate**i for i in range(k + 1)) / (1 + slope * k) for k in range(9)]
    assert depths(speculation, [one]) == [max(range(9), key=lambda k: (rates[k], -k))]


def test_sequences_that_accept_more_are_drafted_more() -> None:
    speculation = make([(1, 1.0), (101, 16.0)])
    good, bad = sequences(2)
    teach(speculation, good, 0.9)
    teach(speculation, bad, 0.05)
    first, second = depths(speculation, [good, bad])
    assert first > second == 0


def test_drafts_pay_less_in_a_larger_batch_and_beside_prompts() -> None:
    # Reading the weights takes as long as computing 64 tokens.
    roofline = [(1, 1.0), (64, 1.0), (640, 10.0)]
    few, many = sequences(4), sequences(128)
    assert min(depths(make(roofline), few)) == 8
    assert depths(make(roofline), many) == [0] * 128
    half = depths(make(roofline), sequences(32))
    assert 32 <= sum(half) <= 64, "about as many as are free"


def test_steps_padded_to_the_next_size_are_filled() -> None:
    speculation = Speculation(Endless(), StepTimes([(4, 1.0), (8, 1.2), (16, 9.0)], is_padded=True))
    assert sum(depths(speculation, sequences(3))) + 3 == 8


def test_a_step_has_no_more_drafts_than_the_executor_has_room_for() -> None:
    assert sum(depths(make(FREE, most=10), sequences(4))) == 10


def test_a_sequence_that_rejects_all_is_left_alone_and_tried_again_some_time_later() -> None:
    speculation = make([(1, 1.0), (101, 31.0)])
    [one] = sequences(1)
    steps = []
    for step in range(2000):
        [count] = depths(speculation, [one])
        if count:
            steps.append(step)
            speculation.observe(one, count, 0)
    assert 2 <= len(steps) < 40, "2% of the steps at most"
    assert steps[-1] > 500
    teach(speculation, one, 0.95)
    assert depths(speculation, [one])[0] > 3, "it has become better"


def test_drafts_end_before_the_limit_of_a_sequence() -> None:
    [one] = sequences(1)
    one.limit = one.length + 3
    assert depths(make(FREE), [one]) == [2], "and a token behind them"
    one.limit = one.length + 1
    assert depths(make(FREE), [one]) == [0]


class Digits(Constraint):
    """Allows 0, 1, 2 and so on, in order, up to a number."""

    def __init__(self, last: int, at: int = 0) -> None:
        self.last, self.at = last, at

    def mask(self) -> bytes | None:
        if self.last < 0:
            raise ValueError("no rule applies here")
        return (1 << self.at).to_bytes(4, "little")

    def accept(self, token: int) -> None:
        assert token == self.at
        self.at += 1

    def fork(self) -> Digits:
        return Digits(self.last, self.at)

    @property
    def is_complete(self) -> bool:
        return self.at > self.last


def test_a_draft_that_a_grammar_forbids_is_cut_there() -> None:
    [one] = sequences(1, constraint=Digits(20))
    assert depths(make(FREE), [one]) == [8]
    [two] = sequences(1, constraint=Digits(2))
    assert depths(make(FREE), [two]) == [3], "nothing follows a complete answer"
    three = sequences(1, constraint=Digits(20, at=5))
    assert depths(make(FREE), three) == [0]
    assert one.constraint is not None and one.constraint.at == 0, "asking changes nothing"  # type: ignore[attr-defined]
    broken = sequences(1, constraint=Digits(-1))
    assert depths(make(FREE), broken) == [0], "its step reports the error, not the plan"


def test_times_follow_what_steps_take() -> None:
    times = StepTimes([(1, 1.0), (2, 1.0), (8, 2.0)])
    for _ in range(200):
        times.learn(1, 2.0)
        times.learn(8, 8.0)
    assert times.seconds(1) == pytest.approx(2.0, rel=0.2)
    assert times.seconds(8) == pytest.approx(8.0, rel=0.2)
    assert times.seconds(16) == pytest.approx(2 * times.seconds(8)), "beyond the last, in proportion"
    assert all(times.seconds(n) <= times.seconds(n + 1) for n in range(1, 40))


def planned(**columns: Any) -> StepPlan:
    """Return a plan with these columns."""
    plan = StepPlan()
    for name, value in columns.items():
        setattr(plan, name, value)
    return plan


def test_only_steps_without_prompts_teach_times() -> None:
    speculation = make(FREE)
    [one] = sequences(1)
    prompt = planned(sequences=[one], counts=[50], samples=[one], tokens=50)
    speculation.observe_step(prompt, 90.0)
    assert speculation.times.seconds(1) == 1.0
    speculation.observe_step(planned(sequences=[one], counts=[3], samples=[one], tokens=3, drafts=[(0, [1, 2])]), 2.0)
    assert speculation.times.seconds(1) > 1.0


@pytest.mark.parametrize(("each", "price"), [(0.5, 0.1), (0.0, 0.3)])
def test_what_checks_of_a_draft_model_take_is_told_apart_from_what_its_passes_take(each: float, price: float) -> None:
    times, passes = StepTimes([(1, 1.0), (400, 1.0)]), StepTimes([(1, 0.1), (400, 0.1)])
    speculation = Speculation(Endless(), times, draft_times=passes)
    [one] = sequences(1)
    for number in range(1500):
        drafts = [1, 2, 3, 4, 5, 6][: 1 + number % 6]
        step = planned(sequences=[one], counts=[1], samples=[one], tokens=1 + len(drafts), drafts=[(0, drafts)])
        speculation.observe_step(step, 1.0 + each + price * len(drafts))
    assert times.seconds(3) == 1.0
    assert speculation.overhead(1) == pytest.approx(each, abs=0.03)
    assert passes.seconds(1) == pytest.approx(price, rel=0.1)


def test_an_overlapped_engine_seldom_collects_early_where_nothing_is_worth_it() -> None:
    speculation = make([(1, 1.0), (101, 2.0)])
    [one] = sequences(1)
    teach(speculation, one, 0.0, checks=100)
    speculation._regime(1).overhead = 0.5
    one.computed = one.length - 1
    early = 0
    for _ in range(1000):
        if speculation.collects_early(False, [one]):
            early += 1
            speculation.choose([one], 1, 0)
    assert 5 < early < 15, "after each miss only half as often, down to one step in 512"
    assert speculation.collects_early(True, [one]), "a check tells where the next step begins"
    teach(speculation, one, 0.9, checks=100)
    assert (
        sum(speculation.collects_early(False, [one]) and bool(speculation.choose([one], 1, 0)) for _ in range(300))
        > 200
    )


def test_an_overlapped_engine_collects_no_step_early_where_nothing_may_be_drafted() -> None:
    speculation = make(FREE)
    [prompt, last, decode] = sequences(3)
    for each in (last, decode):
        each.computed = each.length - 1
    last.limit = last.length + 1
    [beam] = sequences(1)
    beam.group, beam.computed = Beams(beam, 9), beam.length - 1
    assert not any(speculation.collects_early(False, [prompt, last, beam]) for _ in range(100))
    assert speculation.collects_early(False, [prompt, decode]), "as soon as one decodes"


def test_a_sequence_is_not_drafted_for_in_the_step_that_brings_it_back() -> None:
    """A head has no state of it; another tenant's fair share brings it back before the running ones decode."""
    limits, pools = Limits(2, 64, 200, 100, 8), (BlockPool(64, 4), BlockPool(64, 4))
    scheduler = assemble_scheduler(SchedulingSettings(policy="fair", preemption="swap"), limits, *pools, Cost(), None)
    scheduler.planner.speculation = make(FREE)
    scheduler.planner.speculation.fixed = 1

    def submit(name: str, tenant: str) -> None:
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        scheduler.submit(Request(name, [1] * 9, params, tenant=tenant))

    def step() -> StepPlan:
        plan = scheduler.plan(0.0)
        scheduler.apply(plan, StepResult([2] * len(plan.samples), counts=[1] * len(plan.samples)))
        return plan

    submit("b1", "b")
    submit("b2", "b")
    for _ in range(9):
        step()
    submit("a1", "a")
    assert [each.request.id for each in step().preempted] == ["b2"]
    submit("a2", "a")
    scheduler.abort("b1")
    assert isinstance(scheduler.policy, Fair)
    scheduler.policy.service["a"] = 0.0  # less than the other's, so that its second request is admitted first
    step()
    plan = step()
    assert [each.request.id for each in (*plan.preempted, *plan.placed)] == ["a2", "b2"]
    assert [plan.samples[place].request.id for place, _ in plan.drafts] == ["a1"]
    assert len(step().drafts) == 2
