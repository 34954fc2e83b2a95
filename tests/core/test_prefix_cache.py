"""The prefix cache, alone and in the scheduler: what is found, what is kept, what goes first, and what must not be."""

from __future__ import annotations

from random import Random
from weakref import WeakKeyDictionary

import pytest
from examples import engine_of, give, scheduler_of, shape_of, step
from fakes import VOCAB, answer_to
from hypothesis import given
from hypothesis import strategies as st

from chairlift.core.blocks import BlockPool, BlockTable
from chairlift.core.cache_groups import CacheGroups
from chairlift.core.cost import Cost
from chairlift.core.exchange import Arrived
from chairlift.core.params import SamplingParams
from chairlift.core.plan import StepPlan
from chairlift.core.policies import POLICIES
from chairlift.core.policy import Knowledge
from chairlift.core.predictor import PREDICTORS
from chairlift.core.prefix_cache import PrefixCache
from chairlift.core.prefix_node import Node, packed
from chairlift.core.prefixes import PrefixBinding
from chairlift.core.request import Request
from chairlift.core.scheduler import Scheduler
from chairlift.core.step import StepResult
from chairlift.engine.engine import Engine

SIZE = 4


class Alone:
    """A cache of its own: put token lists in and look them up."""

    def __init__(self, blocks: int = 100) -> None:
        self.pool = BlockPool(blocks, SIZE)
        self.cache = PrefixCache(self.pool)

    def put(self, tokens: list[int], salt: str = "") -> BlockTable:
        """What a sequence does that computes these tokens: it shares what is there and adds the rest."""
        table = BlockTable()
        path = self.find(tokens, salt)
        self.pool.share(table, [node.block for node in path])
        self.pool.grow(table, len(tokens))
        node: Node | None = path[-1] if path else self.cache.root(salt)
        for i in range(len(path), len(tokens) // SIZE):
            assert node is not None
            node = self.cache.insert(node, packed(tokens[i * SIZE : (i + 1) * SIZE]), table.blocks[i])
        return table

    def find(self, tokens: list[int], salt: str = "") -> list[Node]:
        path: list[Node] = []
        self.cache.match(path, salt, packed(tokens), len(tokens) // SIZE)
        return path

    def pass_by(self, tokens: list[int], salt: str = "") -> None:
        self.pool.release(self.put(tokens, salt))

    def check(self, *held: BlockTable) -> None:
        self.pool.check(held)
        self.cache.check()


def test_whole_blocks_are_found_as_far_as_the_tokens_agree() -> None:
    alone = Alone()
    alone.pass_by([1] * 12)
    assert len(alone.find([1] * 12)) == 3
    assert len(alone.find([1] * 7 + [2] * 5)) == 1
    assert len(alone.find([2] + [1] * 11)) == 0
    assert len(alone.find([1] * 3)) == 0


def test_what_was_found_before_is_only_extended_and_what_is_gone_is_given_up() -> None:
    alone = Alone(blocks=4)
    alone.pass_by([1] * 8)
    path = alone.find([1] * 16)
    assert len(path) == 2
    alone.pass_by([1] * 12)
    alone.cache.match(path, "", packed([1] * 16), 4)
    assert [node.block for node in path] == [node.block for node in alone.find([1] * 12)]
    alone.pass_by([2] * 12)  # takes the free one and the last two of the path
    alone.cache.match(path, "", packed([1] * 16), 4)
    assert len(path) == 1


def test_the_leaf_that_was_used_longest_ago_goes_first() -> None:
    alone = Alone(blocks=6)
    alone.pass_by([1] * 8)
    alone.pass_by([2] * 8)
    alone.pass_by([1] * 8)  # used again
    alone.pass_by([3] * 12)  # two are free, so one must go
    assert (len(alone.find([1] * 8)), len(alone.find([2] * 8)), len(alone.find([3] * 12))) == (2, 1, 3)
    assert alone.cache.evictions == 1


def test_what_somebody_holds_is_never_given_away() -> None:
    alone = Alone(blocks=4)
    held = alone.put([1] * 8)
    alone.pass_by([2] * 8)
    alone.pass_by([3] * 8)
    assert len(alone.find([1] * 8)) == 2
    alone.check(held)


def test_the_same_tokens_in_another_block_stay_private() -> None:
    alone = Alone()
    first = alone.put([1] * 4)
    other = BlockTable()
    alone.pool.grow(other, 4)
    assert alone.cache.insert(alone.cache.root(""), packed([1] * 4), other.blocks[0]) is None
    alone.pool.release(other)
    alone.check(first)


def test_to_clear_frees_what_nobody_holds_and_hides_the_rest() -> None:
    alone = Alone(blocks=10)
    held = alone.put([1] * 8)
    alone.pass_by([2] * 8)
    assert alone.cache.clear() == 4
    assert (alone.pool.free, alone.pool.cached, alone.pool.owned) == (8, 0, 2)
    assert not alone.find([1] * 8)
    alone.check(held)
    alone.pool.release(held)
    assert alone.pool.free == 10


@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 1), max_size=20)), max_size=30), st.data())
def test_what_is_found_was_put_there_under_the_same_salt(
    puts: list[tuple[str, list[int]]], data: st.DataObject
) -> None:
    alone = Alone(blocks=data.draw(st.integers(5, 30)))
    held: list[BlockTable] = []
    for salt, tokens in puts:
        if alone.pool.available >= 5:
            held.append(alone.put(tokens, salt))
        if held and data.draw(st.booleans()):
            alone.pool.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
        alone.check(*held)
    for salt, tokens in puts:
        known = [other for name, other in puts if name == salt]
        for depth, node in enumerate(alone.find(tokens, salt)):
            length = (depth + 1) * SIZE
            assert any(other[:length] == tokens[:length] for other in known), "found what was never put there"
            assert node.chunk == packed(tokens[depth * SIZE : length])


# ---- in the scheduler


def submit(
    scheduler: Scheduler, name: str, tokens: list[int], *, salt: str = "", seed: int = 0, **params: object
) -> Request:
    request = Request(name, tokens, SamplingParams(**params), salt=salt, seed=seed)  # type: ignore[arg-type]
    scheduler.submit(request)
    return request


def run(scheduler: Scheduler) -> int:
    """To the end, over a fake device that is always the same for a scheduler; the tokens that were computed."""
    if scheduler not in DEVICES:
        DEVICES[scheduler] = engine_of(scheduler, overlap=False)[0]
    engine = DEVICES[scheduler]
    computed = 0
    while engine.has_work:
        engine.step()
        computed += engine.last_tokens
        scheduler.check()
    return computed


DEVICES: WeakKeyDictionary[Scheduler, Engine] = WeakKeyDictionary()
PREFIX = [5] * 21


def test_requests_that_come_together_compute_their_prefix_once() -> None:
    scheduler = scheduler_of(seats=8, step_tokens=16, caches=True)
    for i in range(8):
        submit(scheduler, f"r{i}", [*PREFIX, i, i], max_tokens=1)
    # 21 tokens are in common: 20 in whole blocks, of which each of the others computes its last 3.
    assert run(scheduler) == 23 + 7 * 3
    assert scheduler.counters.cached_tokens == 7 * 20


def test_those_who_sit_down_in_one_plan_share_what_it_is_about_to_compute() -> None:
    scheduler = scheduler_of(seats=8, step_tokens=64, caches=True)
    for name in "abc":
        submit(scheduler, name, [*PREFIX, ord(name) - 90], max_tokens=1)
    plan = scheduler.plan(0.0)
    assert shape_of(plan) == [("a", 0, 22), ("b", 20, 2), ("c", 20, 2)]
    assert scheduler.pool.owned == 6 + 1 + 1
    engine_of(scheduler, overlap=False)[1].launch(plan)  # which complains of anything that is not there when it is read


def test_the_next_turn_of_a_chat_finds_the_answer_too() -> None:
    scheduler = scheduler_of(caches=True)
    first = submit(scheduler, "first", [1] * 10, max_tokens=12)
    run(scheduler)
    answer, _ = answer_to(first, 0, 22)
    submit(scheduler, "second", [1] * 10 + answer + [2] * 5, max_tokens=1)
    run(scheduler)
    # All but the answer's last token went through the model: 21, five whole blocks.
    assert scheduler.counters.cached_tokens == 20


def test_an_answer_can_be_found_while_it_grows() -> None:
    scheduler = scheduler_of(caches=True)
    submit(scheduler, "first", [1] * 10, max_tokens=60, ignore_eos=True)
    for _ in range(12):
        step(scheduler)
    (running,) = scheduler.running
    submit(scheduler, "second", running.tokens + [2] * 5, max_tokens=1)
    step(scheduler)
    assert len(running.output) == 13, "it has not ended"
    # All but the last token that the second saw went through the model: 21, five whole blocks.
    assert scheduler.counters.cached_tokens == 20


def test_the_first_tokens_of_a_block_are_copied() -> None:
    scheduler = scheduler_of(caches=True)
    submit(scheduler, "first", [1] * 7 + [2], max_tokens=1)
    run(scheduler)
    submit(scheduler, "second", [1] * 7 + [3] * 4, max_tokens=1)
    plan = scheduler.plan(0.0)
    assert shape_of(plan) == [("second", 7, 4)]
    assert len(plan.copies) == 1
    assert scheduler.memory.copied == 1


def test_of_a_prompt_that_is_known_as_a_whole_the_last_token_is_computed() -> None:
    scheduler = scheduler_of(caches=True)
    for name in ("first", "second"):
        submit(scheduler, name, [1] * 12, max_tokens=1)
        run(scheduler)
    assert scheduler.counters.cached_tokens == 11


def test_scores_of_a_prompt_need_all_of_it_computed() -> None:
    scheduler = scheduler_of(caches=True)
    submit(scheduler, "first", [1] * 12, max_tokens=1)
    run(scheduler)
    submit(scheduler, "second", [1] * 12, max_tokens=1, prompt_logprobs=1)
    assert shape_of(scheduler.plan(0.0)) == [("second", 0, 12)]


def test_salts_share_nothing() -> None:
    scheduler = scheduler_of(caches=True)
    for salt in ("", "a", "b"):
        submit(scheduler, f"of {salt}", [1] * 12, salt=salt, max_tokens=1)
        run(scheduler)
    assert scheduler.counters.cached_tokens == 0


def test_no_hit_ever_crosses_salts() -> None:
    """Three salts ask the same few things at random: whatever each finds, it has asked before itself."""
    draw = Random(3)
    scheduler = scheduler_of(seats=4, blocks=40, caches=True)
    asked: dict[str, list[list[int]]] = {"": [], "a": [], "b": []}
    hits = 0
    for number in range(400):
        salt = draw.choice(list(asked))
        tokens = [draw.randrange(2)] * draw.randint(1, 12) + [draw.randrange(2)] * draw.randint(1, 12)
        before = scheduler.counters.cached_tokens
        request = submit(scheduler, f"r{number}", tokens, salt=salt, seed=number, max_tokens=draw.randint(1, 6))
        run(scheduler)
        found = scheduler.counters.cached_tokens - before
        hits += found
        assert not found or any(other[:found] == tokens[:found] for other in asked[salt])
        asked[salt].append(tokens + answer_to(request, 0, len(tokens) + 6)[0])
    assert hits > 1000


def test_after_a_failed_pass_nobody_finds_what_it_should_have_written() -> None:
    scheduler = scheduler_of(step_tokens=64, caches=True)
    submit(scheduler, "old", [9] * 8, max_tokens=20)
    give(scheduler, scheduler.plan(0.0))
    submit(scheduler, "first", [1] * 12, max_tokens=5)
    broken = scheduler.plan(0.0)
    submit(scheduler, "second", [1] * 13, max_tokens=5)
    scheduler.plan(0.0)  # in flight with the one before, which it shares blocks with
    ended = {event.sequence.request.id for event in scheduler.fail(broken, "it broke")}
    assert ended == {"old", "first", "second"}
    scheduler.check()
    submit(scheduler, "third", [1] * 12, max_tokens=1)
    assert shape_of(scheduler.plan(0.0)) == [("third", 0, 12)]


def test_one_that_yielded_finds_what_it_had() -> None:
    scheduler = scheduler_of(seats=2, blocks=12, max_length=40, caches=True)
    submit(scheduler, "old", [1] * 9, max_tokens=30)
    submit(scheduler, "young", [2] * 17, max_tokens=20)
    computed = run(scheduler)
    assert scheduler.counters.preemptions > 0
    assert computed < 9 + 29 + 2 * (17 + 19)


@pytest.mark.parametrize("n", [2, 5])
def test_samples_of_one_prompt_hold_it_once(n: int) -> None:
    scheduler = scheduler_of(seats=8, step_tokens=64, caches=True)
    submit(scheduler, "several", [1] * 42, n=n, max_tokens=9, ignore_eos=True)
    most = 0
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        most = max(most, scheduler.pool.owned)
        draws = [(3 * each.index + each.computed) % VOCAB for each in plan.samples]
        scheduler.apply(plan, StepResult(draws))
    # The prompt's whole blocks once; each sample its own copy of the last, partly filled one, and what follows.
    assert most == 42 // SIZE + n * (-(-(42 + 8) // SIZE) - 42 // SIZE)


def test_the_longest_prefix_goes_first_and_waiting_counts() -> None:
    policy = POLICIES["longest-prefix"](Knowledge(PREDICTORS["max_tokens"](100), Cost(), 4))
    scheduler = scheduler_of(seats=1, step_tokens=32, caches=True, policy=policy)
    submit(scheduler, "first", [1] * 20, max_tokens=4)
    scheduler.plan(0.0)
    for name, prompt in (("stranger", [3] * 20), ("cousin", [1] * 8 + [2] * 12), ("brother", [1] * 20)):
        submit(scheduler, name, prompt, max_tokens=4)
    order = sorted(scheduler.waiting, key=lambda each: each.rank)
    assert [each.request.id for each in order] == ["brother", "cousin", "stranger"]
    late = Request("late", [1] * 20, SamplingParams(), arrival=1.0)
    scheduler.submit(late)
    assert max(scheduler.waiting, key=lambda each: each.rank).request is late, "a second is worth a thousand tokens"


def test_those_who_wait_are_looked_up_again_as_the_cache_fills() -> None:
    policy = POLICIES["longest-prefix"](Knowledge(PREDICTORS["max_tokens"](100), Cost(), 4))
    scheduler = scheduler_of(seats=1, step_tokens=32, caches=True, policy=policy)
    submit(scheduler, "first", [1] * 20, max_tokens=20)
    submit(scheduler, "stranger", [3] * 20, max_tokens=4)
    submit(scheduler, "brother", [1] * 20, max_tokens=4)  # not attached to any: the first has not begun
    for _ in range(9):
        give(scheduler, scheduler.plan(0.0))
    assert min(scheduler.waiting, key=lambda each: each.rank).request.id == "brother"


class Receiving:
    """A scheduler with a few blocks, and blocks that arrive for it."""

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks, SIZE)
        self.cache = PrefixCache(self.pool)
        self.binding = PrefixBinding(self.pool, self.cache, CacheGroups((0,), SIZE, 1))

    def arrive(self, tokens: list[int], first: int, slots: list[int]) -> None:
        self.cache.exchange.arrived.append(Arrived("", packed(tokens), first, slots))

    def step(self, most: int = 100) -> StepPlan:
        plan = StepPlan()
        self.binding.take_in(plan, most)
        self.binding.plan_moves(plan)
        self.binding.confirm(plan)
        self.pool.check([])
        self.cache.check()
        return plan

    def found(self, tokens: list[int]) -> int:
        path: list[Node] = []
        self.cache.match(path, "", packed(tokens), len(tokens) // SIZE)
        return len(path)


def test_blocks_that_arrive_are_copied_a_few_in_a_step_and_found_by_their_tokens() -> None:
    receiving, tokens = Receiving(10), list(range(5 * SIZE))
    receiving.arrive(tokens[: 3 * SIZE], 0, [7, 8, 9])
    receiving.arrive(tokens, 3, [3, 4])
    assert [slot for slot, _ in receiving.step(most=2).received] == [7, 8]
    assert receiving.found(tokens) == 2 and receiving.cache.exchange.read == [7, 8]
    assert [slot for slot, _ in receiving.step(most=2).received] == [9, 3]
    assert [slot for slot, _ in receiving.step(most=2).received] == [4]
    assert receiving.found(tokens) == 5 and receiving.pool.cached == 5


def test_blocks_behind_a_gap_and_blocks_that_are_there_are_given_back_at_once() -> None:
    receiving, tokens = Receiving(10), list(range(5 * SIZE))
    receiving.arrive(tokens, 3, [1, 2])  # nothing is there before them
    assert not receiving.step() and receiving.cache.exchange.read == [1, 2]
    receiving.arrive(tokens[: 3 * SIZE], 0, [3, 4, 5])
    receiving.step()
    receiving.arrive(tokens, 1, [6, 7, 8, 9])
    assert [slot for slot, _ in receiving.step().received] == [8, 9]
    assert sorted(receiving.cache.exchange.read) == list(range(1, 10))


def test_arrived_blocks_never_take_the_place_of_those_before_them() -> None:
    receiving, tokens = Receiving(3), list(range(5 * SIZE))
    receiving.arrive(tokens, 0, [1, 2, 3, 4, 5])
    assert [slot for slot, _ in receiving.step().received] == [1, 2, 3], "the others have no room"
    assert receiving.found(tokens) == 3
    other = list(range(100, 100 + SIZE))
    receiving.arrive(other, 0, [6])
    receiving.step()
    assert (receiving.found(tokens), receiving.found(other)) == (2, 1), "the last of a prompt goes first"


def test_with_few_slots_for_evicted_blocks_the_first_of_a_prompt_are_kept() -> None:
    receiving, tokens = Receiving(5), list(range(5 * SIZE))
    receiving.arrive(tokens, 0, [1, 2, 3, 4, 5])
    receiving.step()
    receiving.cache.exchange.free.extend([70, 71])
    receiving.arrive(list(range(100, 100 + 4 * SIZE)), 0, [6, 7, 8, 9])  # evicts the last four
    assert len(receiving.step().sent) == 2
    left = receiving.cache.exchange.written
    assert [(len(each.key) // 4 // SIZE, each.slot) for each in left] == [(3, 70), (2, 71)]
