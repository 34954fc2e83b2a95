"""A prompt with several answers: computed once, its blocks shared, and copied only where one writes."""

from __future__ import annotations

from examples import WORD, ask, scheduler_of, shape_of, step


def test_a_prompt_is_computed_once_for_all_its_answers() -> None:
    scheduler = scheduler_of()
    first = ask(scheduler, "a", prompt=6, n=3)
    plan = scheduler.plan(0.0)
    assert plan.tokens == 6
    assert [(sequence.request.id, sequence.index) for sequence in plan.samples] == [("a", 0), ("a", 1), ("a", 2)]
    assert plan.sampled_at == [5, 5, 5]
    assert len({sequence.row for sequence in plan.samples}) == 3
    assert [sequence.tables[0].blocks for sequence in plan.samples] == [first.tables[0].blocks] * 3
    assert scheduler.pool.owned == 2


def test_forks_share_full_blocks_and_copy_the_one_they_write() -> None:
    scheduler = scheduler_of(block_size=4)
    ask(scheduler, "a", prompt=6, n=3)
    step(scheduler)
    full, tail = scheduler.running[0].tables[0].blocks
    plan = step(scheduler)
    tables = [sequence.tables[0].blocks for sequence in scheduler.running]
    assert [table[0] for table in tables] == [full] * 3
    assert len({table[1] for table in tables}) == 3
    assert plan.copies == [(tail, tables[0][1]), (tail, tables[1][1])]
    assert tables[2][1] == tail  # the last that holds it may write it
    assert scheduler.pool.owned == 4
    assert step(scheduler).copies == []


def test_forks_of_a_prompt_that_fills_its_blocks_copy_nothing() -> None:
    scheduler = scheduler_of(block_size=4)
    ask(scheduler, "a", prompt=8, n=2)
    step(scheduler)
    plan = step(scheduler)
    assert plan.copies == []
    assert scheduler.pool.owned == 4  # two shared, and one of its own for each


def test_a_prompt_whose_last_chunk_is_one_token_forks_too() -> None:
    scheduler = scheduler_of(seats=2, step_tokens=2)
    ask(scheduler, "a", prompt=3, n=2)
    step(scheduler)
    plan = step(scheduler)
    assert shape_of(plan) == [("a", 2, 1)]
    assert [sequence.index for sequence in plan.samples] == [0, 1]
    assert len(scheduler.running) == 2


def test_answers_of_one_prompt_end_each_at_its_own_time() -> None:
    scheduler = scheduler_of()
    ask(scheduler, "a", n=2)
    step(scheduler)
    step(scheduler, 0, WORD)
    assert [sequence.index for sequence in scheduler.running] == [1]
    assert scheduler.counters.finished == 0
    step(scheduler, 0)
    assert scheduler.counters.finished == 1
