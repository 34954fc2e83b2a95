"""Groups of layers with a window: blocks behind it are freed, and a prefix hit is as long as its windows allow."""

from __future__ import annotations

import pytest
from device import FakeExecutor
from examples import WORD, ask, give, step
from fakes import VOCAB, ManualClock, drafts_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_policies import walk, worlds
from test_properties import QUIET, quiet_engine
from world import Shape

import chairlift.core.batch as batch_module
import chairlift.core.request as request_module
from chairlift.core.blocks import BlockPool, BlockTable
from chairlift.core.cache_groups import CacheGroups
from chairlift.core.cost import Cost
from chairlift.core.errors import RequestError, SettingsError
from chairlift.core.limits import Limits
from chairlift.core.params import SamplingParams
from chairlift.core.preemption import Swap
from chairlift.core.prefill import PrefillFirst
from chairlift.core.prefix_cache import PrefixCache
from chairlift.core.request import Request, Sequence
from chairlift.core.scheduler import Scheduler
from chairlift.core.settings import SchedulingSettings
from chairlift.core.step import StepResult
from chairlift.engine.engine import Engine

__all__ = ["quiet_engine"]  # a fixture that all tests here use

SIZE = 4


def scheduler_of(
    *windows: int, blocks: int = 100, step_tokens: int = 16, caches: bool = False, max_length: int = 200
) -> Scheduler:
    """A scheduler for a model with these groups of layers."""
    pool = BlockPool(blocks, SIZE)
    cache = PrefixCache(pool, groups=CacheGroups(windows, SIZE, step_tokens)) if caches else None
    limits = Limits(4, step_tokens, max_length, VOCAB)
    return Scheduler(limits, pool, prefix_cache=cache, windows=windows)


def held(sequence: Sequence) -> list[int]:
    """How many blocks it has in each group."""
    return [len(table.blocks) - table.freed for table in sequence.tables]


def device_of(scheduler: Scheduler) -> FakeExecutor:
    """A fake device of the scheduler's size and groups."""
    limits, pool, windows = scheduler.limits, scheduler.pool, scheduler.memory.groups.windows
    return FakeExecutor(limits.max_sequences, pool.total, pool.block_size, limits.max_length, windows=windows)


def engine_of(scheduler: Scheduler) -> Engine:
    """An engine over a fake device."""
    return Engine(scheduler, device_of(scheduler), ManualClock(), overlap=False)


def serve(engine: Engine, prompt: list[int], name: str) -> Sequence:
    """Run a request to its end; the sequence, as it ended."""
    engine.submit(Request(name, prompt, SamplingParams(max_tokens=1)))
    found = next(iter(engine.scheduler.waiting))
    while engine.scheduler.is_live(name):
        engine.step()
        engine.scheduler.check()
    return found


# ---- what a sequence holds


def test_beams_in_prefill_are_preempted_together_where_prompts_come_first() -> None:
    limits, pool = Limits(2, 4, 24, VOCAB), BlockPool(60, 2)
    scheduler = Scheduler(limits, pool, prefill=PrefillFirst(limits, Cost()), windows=(0, 4))
    engine = engine_of(scheduler)
    engine.submit(Request("beams", list(range(9)), SamplingParams(use_beam_search=True, best_of=2, max_tokens=12)))
    while len(scheduler.running) < 2:
        engine.step()
    others = BlockTable()  # the memory of other sequences
    while not len(scheduler.waiting):
        pool.grow(others, 2 * (len(others.blocks) + pool.available))
        engine.step()
    pool.release(others)
    engine.step()
    assert [each.computed for each in scheduler.running] == [4, 0], "the beams compute their tokens again, in chunks"
    pool.grow(others, 2 * pool.available)
    plan = scheduler.plan(0.0)
    assert not plan.slices and len(scheduler.waiting) == 2
    pool.release(others)
    scheduler.check()


@given(window=st.integers(1, 20), chunk=st.integers(1, 20), size=st.integers(1, 6), length=st.integers(1, 100))
def test_no_slice_needs_more_blocks_than_are_counted(window: int, chunk: int, size: int, length: int) -> None:
    groups = CacheGroups((window,), size, chunk)
    for start in range(length):
        end = min(length, start + chunk)
        needed = -(-end // size) - groups.first_block(window, start)
        assert needed <= groups.blocks_within(window, length)


def test_a_group_with_a_window_holds_a_bounded_number_of_blocks_while_the_other_grows() -> None:
    scheduler = scheduler_of(0, 8)
    sequence = ask(scheduler, "long", prompt=3, max_tokens=150, eos=None)
    most = 0
    for _ in range(100):
        step(scheduler)
        most = max(most, held(sequence)[1])
    assert held(sequence)[0] == 26
    assert most == 3  # in which any 8 tokens lie


def test_a_long_prompt_takes_blocks_of_its_window_and_one_chunk() -> None:
    scheduler = scheduler_of(0, 8, step_tokens=16)
    sequence = ask(scheduler, "long", prompt=160, max_tokens=1)
    free = []
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        assert held(sequence)[1] <= CacheGroups((8,), SIZE, 16).blocks_within(8, 160) == 7
        free.append(scheduler.pool.free)
        give(scheduler, plan)
        scheduler.check()
    assert min(free) >= 100 - 40 - 7, "the other group has the blocks of the whole prompt from the start"


def test_one_sequence_of_full_length_must_fit_and_its_window_counts_once() -> None:
    needed = CacheGroups((0, 8, 8), SIZE, 16).blocks_of(200)
    assert needed == 50 + 2 * 7
    scheduler_of(0, 8, 8, blocks=needed)
    with pytest.raises(SettingsError, match=f"has {needed - 1} blocks, and one sequence .* needs {needed}"):
        scheduler_of(0, 8, 8, blocks=needed - 1)


def test_beams_that_fit_only_because_of_the_window_are_accepted() -> None:
    scheduler = scheduler_of(0, 8, blocks=2 * 57)
    ask(scheduler, "two", prompt=100, max_tokens=100, use_beam_search=True, n=2)
    with pytest.raises(RequestError, match="3 beams"):
        ask(scheduler, "three", prompt=100, max_tokens=100, use_beam_search=True, n=3)


def test_a_swapped_sequence_saves_its_window_and_nothing_behind_it() -> None:
    host = BlockPool(100, SIZE)
    pool = BlockPool(60, SIZE)
    scheduler = Scheduler(Limits(4, 16, 200, VOCAB), pool, preemption=Swap(host), windows=(0, 8))
    sequence = ask(scheduler, "long", prompt=3, max_tokens=150, eos=None)
    for _ in range(60):
        step(scheduler)
    plan = scheduler.plan(0.0)
    give(scheduler, plan)
    computed = sequence.computed
    scheduler.batch._preempt(scheduler.plan(0.0), sequence)
    assert host.owned == -(-computed // SIZE) + -(-computed // SIZE) - (computed - 8 + 1) // SIZE
    assert sequence.computed >= computed


def test_a_swap_without_room_for_the_whole_window_recomputes() -> None:
    scheduler = Scheduler(
        Limits(4, 16, 200, VOCAB), BlockPool(60, SIZE), preemption=Swap(BlockPool(5, SIZE)), windows=(8,)
    )
    sequence = ask(scheduler, "long", prompt=3, max_tokens=150, eos=None)
    for _ in range(60):
        step(scheduler)
    assert sequence.tables[0].freed
    scheduler.memory.preemption.host = BlockPool(1, SIZE)  # type: ignore[attr-defined]
    scheduler.batch._preempt(scheduler.plan(0.0), sequence)
    assert (sequence.computed, sequence.saved) == (0, []), "the first blocks are gone: a part is of no use"


def test_drafts_in_flight_free_nothing_that_is_needed_if_they_are_rejected() -> None:
    scheduler = scheduler_of(0, 4)
    scheduler.planner.speculation = drafts_of([WORD + 1] * 4)
    sequence = ask(scheduler, "drafted", prompt=7, max_tokens=50, eos=None)
    step(scheduler)
    plan = scheduler.plan(0.0)
    assert (plan.counts, sequence.computed) == ([5], 12)
    scheduler.memory.growth([sequence])  # as a policy that preempts for a waiting request counts it
    scheduler.apply(plan, StepResult([WORD], counts=[1]))
    assert sequence.computed == 8, "all drafts are rejected"
    assert sequence.tables[1].freed == 1, "position 8 attends to positions 5 to 8, in blocks 1 and 2"


# ---- reserved blocks


def test_a_reserved_table_gets_back_what_it_frees_and_needs_no_other_block() -> None:
    pool, table = BlockPool(3, SIZE), BlockTable()
    pool.reserve(table, 3)
    for length in range(1, 50):
        pool.free_front(table, max(0, length - 8) // SIZE)
        assert pool.missing(table, length) == 0
        pool.grow(table, length)
        pool.check([table])
    assert (pool.free, len(set(table.blocks[table.freed :]))) == (0, 3)
    pool.release(table)
    assert pool.free == 3


@pytest.mark.parametrize("policy", [pytest.param("fcfs", marks=pytest.mark.long), "priority"])
def test_sequences_that_reserve_their_windows_break_no_promise(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the worlds of test_policies, with sequences settled after one preemption: three of one sequence are rare."""
    monkeypatch.setattr(request_module, "MAX_PREEMPTIONS", 1)
    monkeypatch.setattr(batch_module, "MAX_PREEMPTIONS", 1)
    reserved = 0
    reserve = BlockPool.reserve

    def count(pool: BlockPool, table: BlockTable, blocks: int) -> None:
        nonlocal reserved
        reserved += 1
        reserve(pool, table, blocks)

    monkeypatch.setattr(BlockPool, "reserve", count)

    @settings(QUIET, max_examples=20)
    @given(made=worlds(policy).filter(lambda made: any(made[0].windows)), seed=st.integers(0, 2**64 - 1))
    def go(made: tuple[Shape, SchedulingSettings], seed: int) -> None:
        walk(*made, seed)

    go()
    assert reserved


def test_dropping_a_reserve_keeps_the_blocks_that_have_a_place() -> None:
    pool, table = BlockPool(6, SIZE), BlockTable()
    pool.reserve(table, 5)
    pool.grow(table, 2 * SIZE)
    pool.drop_reserve(table)
    assert (len(table.blocks), pool.free) == (2, 4)
    pool.check([table])


# ---- the prefix cache


PROMPT = [WORD + i % 7 for i in range(41)]  # ten whole blocks and a token


def test_a_hit_needs_only_the_window_before_its_end() -> None:
    scheduler = scheduler_of(0, 8, caches=True)
    engine = engine_of(scheduler)
    serve(engine, PROMPT, "first")
    cache = scheduler.memory.prefix_cache
    assert cache is not None
    for block, node in enumerate(cache._nodes):  # all that a hit of ten blocks does not attend to
        if node is not None and node.others[0] == block and depth_of(node) < 8:
            cache._evicted(block)
            scheduler.pool.forget(block)
    assert serve(engine, PROMPT, "second").cached == 40


def test_a_hit_ends_before_a_block_that_its_window_lacks_and_is_whole_again_once_that_is_computed() -> None:
    scheduler = scheduler_of(0, 8, caches=True)
    engine = engine_of(scheduler)
    serve(engine, PROMPT, "first")
    evict_windows(scheduler, 9)
    assert serve(engine, PROMPT, "shortened").cached == 36, "the ninth block is the last with its window there"
    assert serve(engine, PROMPT, "whole").cached == 40, "the sequence before lent what the node lacked"


def test_without_any_window_there_is_no_hit_and_its_blocks_come_back() -> None:
    scheduler = scheduler_of(0, 8, 6, caches=True)
    engine = engine_of(scheduler)
    serve(engine, PROMPT, "first")
    evict_windows(scheduler, *range(10))
    assert serve(engine, PROMPT, "again").cached == 0
    assert serve(engine, PROMPT, "whole").cached == 40


def test_under_pressure_windows_are_evicted_before_equally_old_blocks_of_other_groups() -> None:
    scheduler = scheduler_of(0, 8, caches=True, blocks=57)
    engine = engine_of(scheduler)
    serve(engine, PROMPT, "first")
    pool, cache = scheduler.pool, scheduler.memory.prefix_cache
    assert cache is not None
    nodes = {id(node): node for node in cache._nodes if node is not None}.values()
    table = BlockTable()
    pool.grow(table, (pool.free + 10) * SIZE)
    assert all(node.block >= 0 for node in nodes) and cache.evictions == 10
    pool.release(table)
    scheduler.check()


def test_a_prompt_shared_by_requests_of_one_plan_is_computed_once() -> None:
    scheduler = scheduler_of(0, 8, caches=True, step_tokens=64)
    for name in ("a", "b", "c"):
        scheduler.submit(Request(name, PROMPT, SamplingParams(max_tokens=4)))
    plan = scheduler.plan(0.0)
    assert plan.counts == [41, 1, 1]
    device_of(scheduler).launch(plan)  # finds every token in place


def depth_of(node: object) -> int:
    """How many nodes are before it on its path."""
    depth = -2
    while node is not None:
        node, depth = node.parent, depth + 1  # type: ignore[attr-defined]
    return depth


def evict_windows(scheduler: Scheduler, *depths: int) -> None:
    """Evict the blocks of groups with a window at these nodes of the one path."""
    cache = scheduler.memory.prefix_cache
    assert cache is not None
    for block, node in enumerate(cache._nodes):
        if node is not None and block in node.others and depth_of(node) in depths:
            cache._evicted(block)
            scheduler.pool.forget(block)
    scheduler.check()
