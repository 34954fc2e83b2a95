"""What one step holds: decodes, admissions, chunks of prompts, preemptions; each as a plain example."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest
from examples import WORD, ask, engine_of, give, names, request, scheduler_of, shape_of, step, step_until_one_yields

from chairlift.core.policy import Policy
from chairlift.core.request import FinishReason, Phase, Sequence
from chairlift.core.step import PromptLogprobs, StepResult, TokenLogprobs

# ---- one budget


def test_an_idle_scheduler_plans_nothing() -> None:
    scheduler = scheduler_of()
    assert not scheduler.plan(0.0)
    assert not scheduler.has_work


def test_a_prompt_that_fits_is_one_slice_and_samples_at_its_last_token() -> None:
    scheduler = scheduler_of()
    sequence = ask(scheduler, "a", prompt=5)
    plan = scheduler.plan(0.0)
    assert plan.slices == [(sequence, 0, 5)]
    assert plan.samples == [sequence]
    assert plan.sampled_at == [4]
    assert plan.placed == [sequence]
    assert plan.tokens == 5


def test_a_decode_is_a_slice_of_the_token_sampled_last() -> None:
    scheduler = scheduler_of()
    sequence = ask(scheduler, "a", prompt=5)
    step(scheduler, 9)
    plan = scheduler.plan(0.0)
    assert plan.slices == [(sequence, 5, 1)]
    assert plan.samples == [sequence]
    assert sequence.tokens == [WORD] * 5 + [9]


def test_decodes_come_first_then_prompts_under_way_then_newcomers() -> None:
    scheduler = scheduler_of(step_tokens=10)
    ask(scheduler, "decode", prompt=1)
    step(scheduler)
    ask(scheduler, "under way", prompt=24)
    assert shape_of(step(scheduler)) == [("decode", 1, 1), ("under way", 0, 9)]
    ask(scheduler, "newcomer", prompt=5)
    assert shape_of(step(scheduler)) == [("decode", 2, 1), ("under way", 9, 9)]
    plan = step(scheduler)
    assert shape_of(plan) == [("decode", 3, 1), ("under way", 18, 6), ("newcomer", 0, 3)]
    assert names(plan.samples) == ["decode", "under way"]
    assert plan.sampled_at == [0, 6]


def test_a_step_never_holds_more_tokens_than_its_budget() -> None:
    scheduler = scheduler_of(step_tokens=6)
    for name in "abc":
        ask(scheduler, name, prompt=4)
    plan = step(scheduler)
    assert shape_of(plan) == [("a", 0, 4), ("b", 0, 2)]
    assert plan.tokens == 6
    plan = step(scheduler)
    assert shape_of(plan) == [("a", 4, 1), ("b", 2, 2), ("c", 0, 3)]
    assert plan.tokens == 6


def test_a_long_prompt_is_cut_into_chunks_and_only_its_last_samples() -> None:
    scheduler = scheduler_of(step_tokens=4)
    ask(scheduler, "a", prompt=10)
    plans = [step(scheduler) for _ in range(4)]
    assert [shape_of(plan) for plan in plans] == [[("a", 0, 4)], [("a", 4, 4)], [("a", 8, 2)], [("a", 10, 1)]]
    assert [len(plan.samples) for plan in plans] == [0, 0, 1, 1]


def test_a_prompt_under_way_holds_all_its_blocks_from_the_start() -> None:
    scheduler = scheduler_of(step_tokens=4, block_size=4)
    sequence = ask(scheduler, "a", prompt=10)
    step(scheduler)
    assert len(sequence.tables[0].blocks) == 3


def test_blocks_come_one_at_a_time_as_an_answer_grows() -> None:
    scheduler = scheduler_of(block_size=4)
    sequence = ask(scheduler, "a", prompt=3)
    grown = []
    for _ in range(7):
        plan = step(scheduler)
        grown.append((sequence.computed, len(sequence.tables[0].blocks), plan.table_rows == [sequence.row]))
    assert grown == [
        (3, 1, False),
        (4, 1, False),
        (5, 2, True),
        (6, 2, False),
        (7, 2, False),
        (8, 2, False),
        (9, 3, True),
    ]


# ---- admission


def test_newcomers_join_in_the_order_they_came_while_seats_last() -> None:
    scheduler = scheduler_of(seats=2)
    for name in "abc":
        ask(scheduler, name)
    assert names(step(scheduler).placed) == ["a", "b"]
    assert step(scheduler).placed == []
    scheduler.abort("a")
    assert names(step(scheduler).placed) == ["c"]


def test_a_sequence_keeps_its_row_while_it_runs_and_the_next_one_takes_it() -> None:
    scheduler = scheduler_of(seats=2)
    a, b = ask(scheduler, "a"), ask(scheduler, "b")
    step(scheduler)
    taken, kept = a.row, b.row
    assert {taken, kept} == {0, 1}
    c = ask(scheduler, "c")
    scheduler.abort("a")
    step(scheduler)
    assert (a.row, b.row, c.row) == (-1, kept, taken)


def test_a_newcomer_waits_until_its_whole_prompt_and_a_block_to_spare_are_free() -> None:
    scheduler = scheduler_of(blocks=6, block_size=4, max_length=24)
    ask(scheduler, "a", prompt=8)  # 2 of 6 blocks
    ask(scheduler, "b", prompt=13)  # 4 blocks: they are free, but then none would be left to grow
    assert names(step(scheduler).placed) == ["a"]
    assert scheduler.pool.free == 4
    scheduler.abort("b")
    ask(scheduler, "c", prompt=11)
    step(scheduler)  # a takes its third block, which leaves 3: one too few
    assert names(scheduler.running) == ["a"]
    scheduler.abort("a")
    assert names(step(scheduler).placed) == ["c"]


def test_alone_a_request_may_take_the_whole_cache() -> None:
    scheduler = scheduler_of(blocks=6, block_size=4, max_length=24)
    ask(scheduler, "a", prompt=22)
    assert names(step(scheduler).placed) == ["a"]
    assert scheduler.pool.free == 0


def test_the_first_in_line_that_does_not_fit_holds_up_those_behind_it() -> None:
    scheduler = scheduler_of(blocks=6, block_size=4, max_length=24)
    for name, prompt in (("a", 4), ("large", 20), ("small", 1)):
        ask(scheduler, name, prompt=prompt)
    step(scheduler)
    step(scheduler)
    assert names(scheduler.running) == ["a"]
    assert {sequence.request.id for sequence in scheduler.waiting} == {"large", "small"}


def test_a_request_for_several_answers_waits_until_all_of_them_have_seats() -> None:
    scheduler = scheduler_of(seats=4)
    for name, n in (("a", 2), ("b", 3), ("c", 1)):
        ask(scheduler, name, n=n)
    assert names(step(scheduler).placed) == ["a", "a"]
    assert step(scheduler).placed == []
    scheduler.abort("a")
    assert names(step(scheduler).placed) == ["b", "b", "b", "c"]


def test_the_time_of_the_first_seat_is_kept() -> None:
    scheduler = scheduler_of(seats=1)
    first, second = ask(scheduler, "a"), ask(scheduler, "b")
    give(scheduler, scheduler.plan(3.0))
    assert (first.started, second.started) == (3.0, None)


# ---- preemption


def test_the_youngest_yields_its_blocks_to_the_oldest_and_keeps_its_place_in_the_queue() -> None:
    scheduler = scheduler_of(seats=2, blocks=5, block_size=4, max_length=20)
    old, young = ask(scheduler, "old", prompt=8), ask(scheduler, "young", prompt=4)
    last = ask(scheduler, "last", prompt=4)
    step(scheduler)
    assert names(scheduler.running) == ["old", "young"]
    step(scheduler)  # both grow: 3 and 2 blocks, none is left
    for _ in range(3):
        step(scheduler)
    plan = step(scheduler)
    assert plan.preempted == [young]
    assert shape_of(plan) == [("old", 12, 1)]
    assert young.phase is Phase.WAITING
    assert young.computed == 0
    assert young.tables[0].blocks == []
    assert young.output == [WORD] * 5  # the answer so far is kept
    assert scheduler.counters.preemptions == 1
    assert scheduler.waiting.peek() is young, "it was here before the last"
    assert last.phase is Phase.WAITING
    assert old.phase is Phase.RUNNING


def test_a_preempted_sequence_computes_prompt_and_answer_again_as_one_prompt_and_goes_on() -> None:
    scheduler = scheduler_of(blocks=5, block_size=4, max_length=20)
    ask(scheduler, "old", prompt=8)
    young = ask(scheduler, "young", prompt=4)
    step_until_one_yields(scheduler)
    known = list(young.tokens)
    scheduler.abort("old")
    plan = scheduler.plan(0.0)
    assert plan.slices == [(young, 0, len(known))]
    assert plan.samples == [young]
    give(scheduler, plan, 9)
    assert young.tokens == [*known, 9]


def test_a_sequence_with_nobody_behind_it_yields_itself() -> None:
    scheduler = scheduler_of(blocks=4, block_size=4, max_length=16)
    ask(scheduler, "old", prompt=7)
    young = ask(scheduler, "young", prompt=3)
    plan = step_until_one_yields(scheduler)
    assert plan.preempted == [young]
    assert names(scheduler.running) == ["old"]


def test_a_fork_that_cannot_copy_its_block_makes_its_sibling_yield() -> None:
    scheduler = scheduler_of(seats=2, blocks=2, block_size=4, max_length=8)
    ask(scheduler, "a", prompt=6, n=2)
    step(scheduler)
    plan = step(scheduler)
    assert [sequence.index for sequence in plan.preempted] == [1]
    assert plan.copies == []  # alone with its block again, the other may write it
    assert shape_of(plan) == [("a", 6, 1)]


def test_every_answer_survives_a_cache_that_holds_only_one_of_them() -> None:
    scheduler = scheduler_of(seats=3, blocks=3, block_size=4, max_length=12)
    engine, _ = engine_of(scheduler, overlap=False)
    for number in range(3):
        engine.submit(request(f"r{number}", prompt=4, max_tokens=8, eos=None, seed=number))
    events = []
    while engine.has_work:
        events += engine.step()
    assert scheduler.counters.preemptions > 0
    ends = [event.sequence.request.id for event in events if event.finish_reason]
    assert ends == ["r0", "r1", "r2"]
    assert all(len(event.sequence.output) == 8 for event in events if event.finish_reason)


# ---- any policy


class ShortestFirst(Policy):
    """A key that lets newcomers pass."""

    def key(self, sequence: Sequence) -> float:
        return sequence.prompt_length


class OldestYields(Policy):
    """A victim rule that is as bad as can be."""

    def victim(self, candidates: list[Sequence]) -> Sequence:
        return candidates[0]


def test_the_policys_key_orders_the_queue_and_the_batch_whoever_joined_first() -> None:
    scheduler = scheduler_of(seats=2, policy=ShortestFirst())
    ask(scheduler, "long", prompt=9)
    step(scheduler)
    ask(scheduler, "middle", prompt=5)
    ask(scheduler, "short", prompt=2)
    step(scheduler)
    assert names(scheduler.running) == ["short", "long"]
    assert shape_of(step(scheduler)) == [("short", 2, 1), ("long", 10, 1)]


def test_nobody_joins_in_a_step_that_preempts() -> None:
    scheduler = scheduler_of(seats=2, blocks=5, block_size=4, max_length=20, policy=ShortestFirst())
    ask(scheduler, "short", prompt=3)
    ask(scheduler, "long", prompt=12)
    step(scheduler)
    ask(scheduler, "middle", prompt=4)
    plan = step_until_one_yields(scheduler)
    assert names(plan.preempted) == ["long"]
    assert plan.placed == [], "a seat and blocks are free for it, but memory was short a moment ago"
    assert names(step(scheduler).placed) == ["middle"]


def test_only_who_has_no_slice_in_the_step_may_yield_and_it_costs_no_other_its_turn() -> None:
    scheduler = scheduler_of(blocks=4, block_size=4, max_length=16, policy=OldestYields())
    for name, prompt in (("a", 4), ("b", 4), ("c", 1)):
        ask(scheduler, name, prompt=prompt)
    step(scheduler)
    plan = step(scheduler)  # a takes the last block, and b needs one
    assert names(plan.preempted) == ["b"]
    assert shape_of(plan) == [("a", 4, 1), ("c", 1, 1)]


# ---- what comes back


def test_a_stop_token_ends_a_sequence_and_is_part_of_its_output() -> None:
    scheduler = scheduler_of()
    sequence = ask(scheduler, "a", stop_token_ids=[9])
    plan = scheduler.plan(0.0)
    (event,) = give(scheduler, plan, 9)
    assert (event.token, event.finish_reason) == (9, FinishReason.STOP)
    assert sequence.output == [9]


def test_the_models_own_end_is_ignored_when_asked() -> None:
    scheduler = scheduler_of()
    ask(scheduler, "a", ignore_eos=True)
    (event,) = give(scheduler, scheduler.plan(0.0), 0)
    assert event.finish_reason is None


def test_a_stop_token_in_the_last_place_counts_as_a_stop() -> None:
    scheduler = scheduler_of()
    ask(scheduler, "a", max_tokens=1)
    (event,) = give(scheduler, scheduler.plan(0.0), 0)
    assert event.finish_reason is FinishReason.STOP


def test_a_sequence_ends_with_its_last_token_allowed() -> None:
    scheduler = scheduler_of()
    sequence = ask(scheduler, "a", max_tokens=3)
    reasons = []
    while scheduler.has_work:
        (event,) = give(scheduler, scheduler.plan(0.0))
        reasons.append(event.finish_reason)
    assert reasons == [None, None, FinishReason.LENGTH]
    assert len(sequence.output) == 3


@pytest.mark.parametrize("max_tokens", [None, 50])
def test_a_sequence_ends_when_the_context_is_full(max_tokens: int | None) -> None:
    scheduler = scheduler_of(max_length=6)
    sequence = ask(scheduler, "a", prompt=4, max_tokens=max_tokens)
    step(scheduler)
    (event,) = give(scheduler, scheduler.plan(0.0))
    assert event.finish_reason is FinishReason.LENGTH
    assert len(sequence.tokens) == 6


def test_scores_travel_with_their_tokens() -> None:
    scheduler = scheduler_of()
    a, b = ask(scheduler, "a", prompt=3), ask(scheduler, "b", max_tokens=1)
    plan = scheduler.plan(0.0)
    score, prompt = TokenLogprobs(5, -0.5, 1, []), PromptLogprobs(1, [TokenLogprobs(WORD, -1.0, 2, [])])
    events = scheduler.apply(plan, StepResult([5, 6], [None, score], [(0, prompt)]))
    assert [(event.sequence, event.token, event.logprobs, event.prompt_logprobs) for event in events] == [
        (a, None, None, prompt),
        (b, 6, score, None),
        (a, 5, None, None),
    ]
    assert (events.sequences, events.tokens) == ([a], [5]), "the sequence with a token, and no other"


def test_scores_of_a_prompt_whose_request_has_ended_are_dropped() -> None:
    scheduler = scheduler_of()
    ask(scheduler, "a")
    plan = scheduler.plan(0.0)
    scheduler.abort("a")
    assert not scheduler.apply(plan, StepResult([5], None, [(0, PromptLogprobs(1, []))]))


def test_an_executor_that_owes_a_token_is_found_out() -> None:
    scheduler = scheduler_of()
    ask(scheduler, "a")
    plan = scheduler.plan(0.0)
    with pytest.raises(AssertionError, match="for each sample"):
        scheduler.apply(plan, StepResult([]))


# ---- cost


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of the core a call runs: its cost, without a clock, and whatever a collection of garbage runs."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> object:
        nonlocal count
        if not frame.f_globals.get("__name__", "").startswith("chairlift.core"):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_a_step_costs_the_same_however_many_wait() -> None:
    costs = set()
    for waiting in (1, 10, 3000):
        scheduler = scheduler_of(seats=4)
        for number in range(4 + waiting):
            scheduler.submit(request(f"r{number}", ignore_eos=True))
        step(scheduler)
        assert len(scheduler.waiting) == waiting
        costs.add(lines_run(lambda scheduler=scheduler: give(scheduler, scheduler.plan(0.0))))
    assert len(costs) == 1
