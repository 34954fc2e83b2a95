"""Each choice a scheduler can be given, as plain examples: gates, prompt modes, policies, budgets, ways to yield."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from examples import WORD, names, shape_of
from fakes import VOCAB

from chairlift.core.assemble import assemble_scheduler
from chairlift.core.blocks import BlockPool
from chairlift.core.cost import Cost, Work, pairs_of
from chairlift.core.errors import SettingsError
from chairlift.core.limits import Limits
from chairlift.core.params import SamplingParams
from chairlift.core.plan import StepPlan
from chairlift.core.request import Request
from chairlift.core.scheduler import Scheduler
from chairlift.core.settings import SchedulingSettings
from chairlift.core.step import StepResult
from chairlift.core.watermark import Watermark


def made(
    seats: int = 4,
    step_tokens: int = 64,
    blocks: int = 100,
    max_length: int = 60,
    host: int = 100,
    cost: Cost | None = None,
    **chosen: Any,
) -> Scheduler:
    """A scheduler of these choices, with room enough but for what the example is about."""
    limits = Limits(seats, step_tokens, max_length, VOCAB)
    settings = SchedulingSettings(**chosen)
    return assemble_scheduler(settings, limits, BlockPool(blocks, 4), BlockPool(host, 4), cost or Cost())


def ask(scheduler: Scheduler, name: str, prompt: int = 3, answer: int = 20, at: float = 0.0, **more: Any) -> None:
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    scheduler.submit(Request(name, [WORD] * prompt, params, arrival=at, **more))


def step(scheduler: Scheduler, now: float = 0.0) -> StepPlan:
    plan = scheduler.plan(now)
    scheduler.check()
    scheduler.apply(plan, StepResult([WORD] * len(plan.samples)))
    scheduler.check()
    return plan


def run(scheduler: Scheduler, now: float = 0.0) -> list[str]:
    """Step until nothing is left; return the admitted requests, in order."""
    seated = []
    while scheduler.has_work:
        seated += names(step(scheduler, now).placed)
        now += 0.001
    return seated


# ---- gates


def test_a_static_batch_waits_until_it_is_full_and_lets_nobody_in_until_all_of_it_is_done() -> None:
    scheduler = made(seats=2, batching="static")
    ask(scheduler, "a", answer=2)
    assert not step(scheduler)
    assert scheduler.pause(0.0) == inf
    ask(scheduler, "b", answer=5)
    ask(scheduler, "c", answer=1)
    ask(scheduler, "d", answer=1)
    assert names(step(scheduler).placed) == ["a", "b"]
    steps = [step(scheduler) for _ in range(4)]
    assert [len(plan.slices) for plan in steps] == [2, 1, 1, 1]
    assert not any(plan.placed for plan in steps)
    assert names(step(scheduler).placed) == ["c", "d"]


def test_a_static_batch_starts_short_when_the_input_has_ended() -> None:
    scheduler = made(seats=3, batching="static")
    ask(scheduler, "a")
    assert not step(scheduler)
    scheduler.planner.is_input_over = True
    assert scheduler.pause(0.0) == 0
    assert names(step(scheduler).placed) == ["a"]


def test_a_large_static_batch_may_take_several_steps_to_sit_down() -> None:
    scheduler = made(seats=3, step_tokens=8, batching="static")
    for name in "abc":
        ask(scheduler, name, prompt=6)
    assert names(step(scheduler).placed) == ["a", "b"]
    assert names(step(scheduler).placed) == ["c"]


def test_a_dynamic_batch_starts_when_its_first_request_has_waited_for_the_window() -> None:
    scheduler = made(seats=4, batching="dynamic", batch_window=0.5)
    ask(scheduler, "a", at=10.0)
    ask(scheduler, "b", at=10.2)
    assert not step(scheduler, 10.3)
    assert scheduler.pause(10.3) == pytest.approx(0.2)
    assert names(step(scheduler, 10.5).placed) == ["a", "b"]
    ask(scheduler, "c", at=10.6)
    assert step(scheduler, 20.0).placed == []


def test_a_dynamic_batch_starts_at_once_when_it_is_full() -> None:
    scheduler = made(seats=2, batching="dynamic", batch_window=100.0)
    ask(scheduler, "a", at=1.0)
    ask(scheduler, "b", at=1.0)
    assert names(step(scheduler, 1.0).placed) == ["a", "b"]


def test_bins_fill_a_closed_batch_with_answers_of_one_length() -> None:
    scheduler = made(seats=2, batching="static", policy="multibin", predictor="oracle")
    for name, length in (("long1", 50), ("short1", 4), ("long2", 50), ("short2", 4)):
        ask(scheduler, name, known_length=length)
    assert names(step(scheduler).placed) == ["long1", "long2"]
    for name in ("long1", "long2"):
        scheduler.abort(name)
    assert names(step(scheduler).placed) == ["short1", "short2"]


# ---- prompts


def test_prefill_first_lets_decodes_wait_for_newcomers() -> None:
    scheduler = made(step_tokens=8, prefill="prefill-first")
    ask(scheduler, "a", prompt=2)
    step(scheduler)
    ask(scheduler, "b", prompt=12)
    assert [shape_of(step(scheduler)) for _ in range(3)] == [
        [("b", 0, 8)],
        [("b", 8, 4)],
        [("a", 2, 1), ("b", 12, 1)],
    ]


def test_a_whole_prompt_is_one_slice_beside_the_decodes() -> None:
    scheduler = made(seats=2, step_tokens=62, prefill="whole")
    ask(scheduler, "a", prompt=2)
    step(scheduler)
    ask(scheduler, "b", prompt=50)
    assert shape_of(step(scheduler)) == [("a", 2, 1), ("b", 0, 50)]


def test_whole_prompts_need_a_step_that_can_hold_them() -> None:
    with pytest.raises(SettingsError, match=r"step_tokens is 61, but with whole prompts .* use 62 or more"):
        made(seats=2, step_tokens=61, prefill="whole")


def test_splitfuse_makes_every_step_one_moderate_size() -> None:
    scheduler = made(seats=4, step_tokens=64, prefill="splitfuse", cost=Cost(fixed=0.0, weights=0.008, token=0.001))
    for name in "abc":
        ask(scheduler, name, prompt=13, answer=30)
    sizes = [step(scheduler).tokens for _ in range(4)]
    assert sizes == [10, 10, 10, 10]  # the knee: a quarter above what the weights take
    assert made(seats=30, prefill="splitfuse", cost=Cost(token=1.0)).planner.prefill.step_tokens == 60  # 2 per row


# ---- policies


def test_a_higher_priority_starts_in_the_very_next_step_of_a_full_batch() -> None:
    scheduler = made(seats=2, policy="priority")
    ask(scheduler, "low1")
    ask(scheduler, "low2")
    step(scheduler)
    ask(scheduler, "high", priority=1)
    plan = step(scheduler)
    assert names(plan.preempted) == ["low2"]
    assert names(plan.samples) == ["low1", "high"] or names(plan.samples) == ["high", "low1"]
    ask(scheduler, "equal", priority=0)
    assert step(scheduler).preempted == []


def test_a_higher_priority_takes_memory_as_well_and_only_from_lower_ones() -> None:
    scheduler = made(seats=4, blocks=15, max_length=60, policy="priority")
    ask(scheduler, "high1", prompt=20, priority=2)
    ask(scheduler, "low", prompt=20)
    step(scheduler)
    ask(scheduler, "high2", prompt=24, priority=1)
    plan = step(scheduler)
    assert names(plan.preempted) == ["low"]
    assert names(plan.placed) == ["high2"]
    ask(scheduler, "too large", prompt=50, priority=1)  # only one of its own priority and a higher one could yield
    assert step(scheduler).preempted == []


def test_without_aging_a_low_priority_waits_for_all_higher_ones_and_with_it_only_so_long() -> None:
    for aging, order in ((None, ["high", "low"]), (1.0, ["low", "high"])):
        scheduler = made(seats=1, policy="priority", aging=aging)
        ask(scheduler, "first", priority=9)
        step(scheduler)
        ask(scheduler, "low", at=1.0)
        ask(scheduler, "high", at=4.0, priority=2)  # two levels are worth two seconds
        scheduler.abort("first")
        assert run(scheduler, 4.0) == order


def test_the_shortest_predicted_answer_goes_first_and_age_counts() -> None:
    scheduler = made(seats=1, policy="sjf", predictor="oracle")
    ask(scheduler, "running", known_length=1)
    step(scheduler)
    ask(scheduler, "long", at=0.0, known_length=40)
    ask(scheduler, "short", at=1.0, known_length=5)
    ask(scheduler, "late and short", at=36.0, known_length=5)  # 40 tokens are overtaken for 40 - 5 seconds
    assert run(scheduler, 36.0) == ["short", "long", "late and short"]


def test_predictions_worse_than_chance_give_way_to_the_order_of_arrival_also_for_those_who_wait() -> None:
    scheduler = made(seats=1, policy="sjf", predictor="oracle")
    ask(scheduler, "running", at=0.0, answer=30, known_length=1)
    step(scheduler)
    ask(scheduler, "first", at=1.0, known_length=30)
    ask(scheduler, "second", at=2.0, known_length=3)
    assert scheduler.waiting.peek(2.0).request.id == "second"  # type: ignore[union-attr]
    for number in range(300):  # an oracle that is always wrong
        request = Request(f"r{number}", [WORD], known_length=20 - number % 20)
        scheduler.predictor.predict(request)
        scheduler.predictor.learn(request, 1 + number % 20)
    assert not scheduler.predictor.is_trusted
    ask(scheduler, "third", at=3.0, known_length=1)
    assert run(scheduler, 3.0) == ["first", "second", "third"]  # it noticed when the running one ended


def test_bins_take_turns_in_a_continuous_batch() -> None:
    scheduler = made(seats=1, policy="multibin", predictor="oracle")
    for number in range(3):
        ask(scheduler, f"long{number}", answer=20, known_length=20)
    for number in range(2):
        ask(scheduler, f"short{number}", answer=20, known_length=2)
    assert run(scheduler) == ["long0", "short0", "long1", "short1", "long2"]


def test_a_bin_that_was_empty_has_no_turns_to_catch_up_on() -> None:
    scheduler = made(seats=1, policy="multibin", predictor="oracle")
    ask(scheduler, "long", answer=4, known_length=4)
    ask(scheduler, "short", answer=4, known_length=1)
    for number in range(20):
        ask(scheduler, f"long{number}", answer=4, known_length=4)
    while len(scheduler.waiting) > 2:
        step(scheduler)
    for number in range(3):
        ask(scheduler, f"short{number}", answer=4, known_length=1)
    assert run(scheduler) == ["long18", "short0", "long19", "short1", "short2"]


def test_a_flood_by_one_tenant_costs_another_neither_its_turn_nor_its_seat() -> None:
    scheduler = made(seats=4, policy="fair", predictor="max_tokens")
    for number in range(20):
        ask(scheduler, f"flood{number}", tenant="loud")
    step(scheduler)
    assert len(scheduler.running) == 4
    for number in range(3):
        ask(scheduler, f"quiet{number}", tenant="quiet")
    plan = step(scheduler)
    assert names(plan.placed) == ["quiet0"]
    assert names(plan.preempted) == ["flood3"]
    assert step(scheduler).preempted == []  # it has had as much as the other: now they take turns
    seated = run(scheduler)
    assert seated.index("quiet2") < 6


def test_weights_divide_the_service() -> None:
    scheduler = made(seats=1, policy="fair", predictor="max_tokens")
    for number in range(30):
        ask(scheduler, f"a{number}", answer=4, tenant="a", weight=3.0)
        ask(scheduler, f"b{number}", answer=4, tenant="b")
    seated: list[str] = []
    while len(seated) < 24:
        seated += [name[0] for name in names(step(scheduler).placed)]
    assert 17 <= seated.count("a") <= 19


def test_a_tenant_that_was_away_is_owed_nothing() -> None:
    scheduler = made(seats=1, policy="fair", predictor="max_tokens")
    for number in range(40):
        ask(scheduler, f"a{number}", answer=2, tenant="a")
    for _ in range(20):
        step(scheduler)
    for number in range(10):
        ask(scheduler, f"b{number}", answer=2, tenant="b")
    seated = [name[0] for name in run(scheduler)]
    assert abs(seated[:10].count("a") - seated[:10].count("b")) <= 2


def test_the_earliest_deadline_goes_first_and_the_hopeless_do_not_sink_the_others() -> None:
    scheduler = made(seats=1, policy="deadline", cost=Cost(fixed=0.0, token=0.1))
    ask(scheduler, "running", deadline=9.0)
    step(scheduler)
    ask(scheduler, "too late", at=0.0, deadline=1.1, prompt=3)
    ask(scheduler, "in time", at=0.0, deadline=2.0, prompt=3)
    ask(scheduler, "later", at=0.0, deadline=3.0, prompt=3)
    ask(scheduler, "no hurry", at=0.0)
    scheduler.abort("running")
    seated = []
    while scheduler.has_work:
        seated += names(step(scheduler, 1.0).placed)
    assert seated == ["in time", "later", "no hurry", "too late"]


def test_every_eighth_turn_is_for_those_whom_deadlines_leave_aside() -> None:
    scheduler = made(seats=1, policy="deadline")
    ask(scheduler, "no hurry", answer=1)
    for number in range(12):
        ask(scheduler, f"r{number}", answer=1, deadline=100.0 + number)
    assert run(scheduler).index("no hurry") == 7


# ---- budgets


def test_a_latency_target_cuts_prompts_to_what_fits_beside_the_decodes() -> None:
    cost = Cost(fixed=0.01, token=0.001)
    scheduler = made(step_tokens=64, target_tpot=0.04, cost=cost)
    ask(scheduler, "a", prompt=2)
    step(scheduler)
    ask(scheduler, "b", prompt=50)
    plan = step(scheduler)
    assert plan.tokens == 30
    cost.token = 0.002  # it turns out to be slower
    ask(scheduler, "c", prompt=50)
    assert step(scheduler).tokens == max(15, 1 + 16)  # what fits, but always a few


def test_the_cost_of_a_step_is_learned_from_steps() -> None:
    cost, true = Cost(fixed=0.001, token=0.001, pair=1e-6), Cost(fixed=0.004, token=0.0005, context=1e-6, pair=3e-6)
    cost.context = 1e-7
    work = [Work(tokens, context, pairs_of(0, tokens)) for tokens in (1, 16, 64, 400) for context in (0, 4000)]
    for _ in range(300):
        for each in work:
            cost.learn(each, true.seconds(each))
    for each in work:
        assert cost.seconds(each) == pytest.approx(true.seconds(each), rel=0.15)


def test_one_step_that_was_held_up_does_not_spoil_what_was_learned() -> None:
    cost = Cost(fixed=0.001, token=0.001)
    cost.learn(Work(tokens=9), 100.0)
    assert cost.seconds(Work(tokens=9)) < 0.02


def test_pairs_are_counted_as_attention_computes_them() -> None:
    assert pairs_of(3, 4) == sum(range(4, 8))


# ---- yielding


def test_what_a_swapped_sequence_had_comes_back_without_being_computed_again() -> None:
    scheduler = made(seats=2, blocks=16, max_length=60, preemption="swap")
    ask(scheduler, "a", prompt=24, answer=30)
    ask(scheduler, "b", prompt=24, answer=30)
    plan = step(scheduler)
    while not plan.preempted:
        plan = step(scheduler)
    (victim,) = plan.preempted
    assert [source for source, _ in plan.saved] and len(plan.saved) == -(-victim.computed // 4)
    computed = victim.computed
    while not plan.restored:
        plan = step(scheduler)
    assert [piece for piece in plan.slices if piece.sequence is victim] == [(victim, computed, 1)]
    assert len(plan.restored) == -(-computed // 4)
    run(scheduler)
    scheduler.memory.preemption.check([])


def test_one_that_has_yielded_three_times_yields_no_more() -> None:
    scheduler = made(seats=3, policy="priority")
    ask(scheduler, "low", answer=40)
    step(scheduler)
    for number in range(5):
        for seat in range(3):
            ask(scheduler, f"high{number}.{seat}", answer=3, priority=1)
        for _ in range(6):
            step(scheduler)
    (low,) = [sequence for sequence in scheduler.running if sequence.request.id == "low"]
    assert low.preemptions == 3
    assert len(low.tables[0].blocks) == 11  # all it can ever need


def test_auto_swaps_what_is_dear_to_compute_and_computes_what_is_dear_to_move() -> None:
    for cost, swaps in ((Cost(token=1.0, block_copy=1e-6), True), (Cost(token=1e-9, block_copy=1.0), False)):
        scheduler = made(seats=2, blocks=16, max_length=60, preemption="auto", cost=cost)
        ask(scheduler, "a", prompt=24, answer=30)
        ask(scheduler, "b", prompt=24, answer=30)
        plan = step(scheduler)
        while not plan.preempted:
            plan = step(scheduler)
        assert bool(plan.saved) is swaps


def test_the_watermark_rises_with_preemptions_and_sinks_in_calm() -> None:
    mark = Watermark(1000)
    assert mark.blocks == 10
    for _ in range(3):
        mark.learn(has_preempted=True)
    assert mark.blocks == 70
    for _ in range(10_000):
        mark.learn(has_preempted=False)
    assert mark.blocks == 10
    for _ in range(1000):
        mark.learn(has_preempted=True)
    assert mark.blocks == 500
