"""The core under random load, with every promise checked after each event and every block after each step (world.py).

Two drivers share one world. The walk is fast: Hypothesis picks the world and a seed, and a plain loop does the rest.
The state machine is slow, but Hypothesis picks each of its moves, so what it finds it also makes small.

A usual run goes through some ten thousand events, with those of test_policies; `pytest -m long tests/core` through two
million.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from fakes import VOCAB, Flawed, Picky
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from world import GIVEN_UP, Shape, World

from chairlift.core.cache_groups import CacheGroups
from chairlift.core.constraint import Constraint, Reasoning, Thinking

EVENTS_A_WALK = 600
SIZES = pytest.mark.parametrize("size", [1, pytest.param(16, marks=pytest.mark.long)], ids=["some", "many"])
WALKS = 27  # of each size and mode: 2 x 17 x 27 x 600 > 500,000
TROUBLE = (0.0, 0.02, 0.1, 0.25)  # how often a client leaves or something breaks
QUIET = settings(deadline=None, report_multiple_bugs=False, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def quiet_engine() -> Iterator[None]:
    """The failures here are ours: they need no log lines."""
    log = logging.getLogger("chairlift")
    log.disabled = True
    yield
    log.disabled = False


def windows(draw: st.DrawFn) -> tuple[int, ...]:
    """Groups of layers: mostly one without a window, or such groups and some with a window, or one with a window."""
    window = st.integers(1, 12)
    match draw(st.integers(0, 5)):
        case 0:
            return (0, draw(window))
        case 1:
            return (0, draw(window), draw(window))
        case 2:
            return draw(st.sampled_from(((0, 0, draw(window)), (draw(window),))))
    return (0,)


@st.composite
def shapes(draw: st.DrawFn, overlap: bool | None = None) -> Shape:
    """Worlds so small that memory, seats and budget are always short."""
    seats = draw(st.integers(1, 7))
    block_size = draw(st.integers(1, 5))
    max_length = draw(st.integers(2, 28))
    step_tokens = seats + draw(st.integers(0, 9))
    groups = CacheGroups(windows(draw), block_size, step_tokens)
    return Shape(
        seats=seats,
        step_tokens=step_tokens,
        block_size=block_size,
        blocks=groups.blocks_of(max_length) + draw(st.integers(0, 2 * seats)),
        max_length=max_length,
        overlap=draw(st.booleans()) if overlap is None else overlap,
        caches=draw(st.booleans()) and not groups.windows[0],
        host_blocks=(host := draw(st.sampled_from((0, 3, 30)))),
        disk_blocks=draw(st.sampled_from((0, 3, 30))) if host else 0,
        sent_blocks=draw(st.sampled_from((0, 0, 2, 8))),
        windows=groups.windows,
    )


def walk(shape: Shape, seed: int, events: int) -> World:
    """Let things happen at random until `events` have, then let everything end."""
    random = Random(seed)
    drafts = Random(seed) if random.random() < 0.3 else None
    world = World(shape, beams=random.random() < 0.3, drafts=drafts)
    crowd = random.randint(1, 3 * shape.seats)  # how many requests may be in the world
    haste = random.random()  # how fast newcomers come
    trouble = random.choice(TROUBLE)  # how often a client leaves or something breaks
    eos = random.choice((0, 1, 4))
    arrives = random.random() < 0.5  # whether blocks come from other processes
    while world.events < events:
        chance = random.random()
        if chance < trouble:
            cause_trouble(world, random)
        elif chance < trouble + 0.1 and arrives:
            size = shape.block_size
            count = random.randint(size, max(size, shape.max_length))
            first = random.choice((0, random.randint(0, count // size)))
            world.arrive(words(world, random, count), "a" if random.random() < 0.1 else "", first)
        elif not world.engine.has_work or (len(world.live) < crowd and random.random() < haste):
            submit_anything(world, random, eos)
        else:
            world.step()
    world.drain()
    return world


def submit_anything(world: World, random: Random, eos: int) -> None:
    longest = world.shape.max_length
    wants_too_much = random.random() < 0.02
    # Answers are mostly longer than prompts: they outgrow what was free when they were let in.
    prompt = random.randint(0, longest + 1) if wants_too_much else 1 + int((longest - 1) * random.random() ** 2)
    n = random.randint(1, world.shape.seats + wants_too_much)
    world.submit(
        words(world, random, prompt),
        n=n if random.random() < 0.4 else 1,
        max_tokens=None if random.random() < 0.1 else random.randint(1, longest),
        eos=eos,
        seed=random.getrandbits(32),
        salt="a" if random.random() < 0.1 else "",
        sampling=(chosen := sampling(world, random, n)),
        constraint=constraint(random) if "use_beam_search" not in chosen else None,
        prefilled=random.choice((0, 0, prompt // 2)),
    )


def constraint(random: Random) -> Constraint | None:
    """A constraint for one request in five; one in four of these leaves no token at times, or fails."""
    kind = random.random()
    found = Flawed() if kind < 0.05 else Picky() if kind < 0.15 else None
    if kind >= 0.2 or random.random() < 0.5:
        return found
    tokens = (random.choice(range(4)), random.randrange(VOCAB))
    is_open, budget = random.random() < 0.5, random.choice((None, 0, 1, 5))
    return Reasoning(Thinking(tokens, tokens[: random.randint(1, 2)], is_open, budget), found)


def sampling(world: World, random: Random, n: int) -> dict[str, Any]:
    """What else a request may ask for."""
    if world.beams and random.random() < 0.4:
        return {
            "use_beam_search": True,
            "best_of": max(n, random.randint(1, 4)),
            "length_penalty": random.choice((0.0, 1.0, -1.0)),
            "early_stopping": random.choice((True, False, "never")),
        }
    chosen: dict[str, Any] = {}
    if random.random() < 0.1:
        chosen["logprobs"] = random.randint(0, 2)
    if random.random() < 0.1:
        chosen["prompt_logprobs"] = 0
    if random.random() < 0.1:
        chosen |= {"stop_token_ids": [random.randrange(VOCAB)], "ignore_eos": random.random() < 0.5}
    if random.random() < 0.1:
        chosen["best_of"] = min(n + 1, max(n, world.shape.seats))
    return chosen


def words(world: World, random: Random, count: int) -> list[int]:
    """So many tokens, which often begin as others did."""
    fresh = random.choices(range(VOCAB), k=count)
    if not world.heard or random.random() < 0.2:
        return fresh
    known = random.choice(world.heard)
    return (known[: random.randint(0, len(known))] + fresh)[:count]


def cause_trouble(world: World, random: Random) -> None:
    kind = random.randrange(6)
    if kind == 0 and world.speaking:
        world.stop(random.choice(list(world.speaking)))
    elif kind == 5 and random.random() < 0.3:
        world.engine.clear_prefix_cache()
        world.scheduler.check()
    elif kind == 5:
        world.damage_disk(random)
    elif kind in (1, 2):
        world.break_next(at_submit=random.random() < 0.3, at_choose=random.random() < 0.2)
    else:
        # Any request that ever came: most have ended, which must be no error.
        known = [*world.live, f"r{random.randint(0, world.submitted)}"]
        world.abort(random.choice(known), GIVEN_UP if random.random() < 0.3 else None)


@SIZES
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlapped"])
def test_random_events_break_no_promise(overlap: bool, size: int, record_property: pytest.RecordProperty) -> None:
    seen = dict.fromkeys(
        (
            "events",
            "preemptions",
            "resumed",
            "copied",
            "failed",
            "aborted",
            "cached",
            "evicted",
            "returned",
            "searches",
            "accepted",
            "rejected",
            "received",
            "departed",
        ),
        0,
    )

    @settings(QUIET, max_examples=size * WALKS)
    @given(shape=shapes(overlap), seed=st.integers(0, 2**64 - 1))
    def go(shape: Shape, seed: int) -> None:
        world = walk(shape, seed, EVENTS_A_WALK)
        counters = world.scheduler.counters
        seen["events"] += world.events
        seen["preemptions"] += counters.preemptions
        seen["resumed"] += world.scheduler.resumed
        seen["copied"] += world.executor.copied
        seen["failed"] += counters.failed
        seen["aborted"] += counters.aborted
        seen["searches"] += world.searches
        seen["accepted"] += world.executor.accepted
        seen["rejected"] += world.executor.rejected
        seen["received"] += world.executor.received
        seen["departed"] += world.departures
        seen["cached"] += counters.cached_tokens
        cache = world.scheduler.memory.prefix_cache
        seen["evicted"] += 0 if cache is None else cache.evictions
        seen["returned"] += 0 if cache is None else sum(cache.returns)

    go()
    record_property("core events", seen["events"])
    assert seen["events"] >= size * WALKS * EVENTS_A_WALK
    # All that is meant to be tested did happen; a few walks may miss what is rare.
    assert size == 1 or all(seen.values()), str(seen)


class Life(RuleBasedStateMachine):
    """The same world with each move chosen by Hypothesis."""

    events = 0  # of all lives together
    world: World

    @initialize(shape=shapes())
    def begin(self, shape: Shape) -> None:
        self.world = World(shape)

    @rule(
        prompt=st.integers(0, 30),
        n=st.integers(1, 4),
        max_tokens=st.one_of(st.none(), st.integers(1, 30)),
        eos=st.sampled_from((0, 1, 8)),
        seed=st.integers(0, 2**16),
    )
    def submit(self, prompt: int, n: int, max_tokens: int | None, eos: int, seed: int) -> None:
        self.world.submit([seed % VOCAB] * prompt, n, max_tokens, eos, seed)

    @rule(number=st.integers(0, 20))
    def abort(self, number: int) -> None:
        self.world.abort(f"r{number}")

    @precondition(lambda self: self.world.speaking)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        self.world.stop(data.draw(st.sampled_from(sorted(self.world.speaking))))

    @rule(at_submit=st.booleans())
    def break_next(self, at_submit: bool) -> None:
        self.world.break_next(at_submit)

    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.world.step()

    def teardown(self) -> None:
        self.world.drain()
        Life.events += self.world.events


@SIZES
def test_no_life_of_moves_chosen_one_by_one_breaks_a_promise(size: int, record_property: pytest.RecordProperty) -> None:
    Life.events = 0
    run_state_machine_as_test(
        Life,
        settings=settings(QUIET, max_examples=30 * size, stateful_step_count=40),
    )
    record_property("core events", Life.events)
    assert Life.events > 100 * size


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlapped"])
def test_the_bound_on_waiting_is_exact_with_one_seat_and_one_token_a_step(overlap: bool) -> None:
    world = World(Shape(seats=1, step_tokens=1, block_size=2, blocks=6, max_length=12, overlap=overlap))
    for _ in range(3):
        world.submit([1, 2, 3, 4], n=1, max_tokens=5, eos=0, seed=7)
    bounds = {name: (record.seated_by, record.ended_by) for name, record in world.live.items()}
    seated, ended = {}, {}
    while world.engine.has_work:
        before = set(world.live)
        world.step()
        plans = world.scheduler.plans
        seated.update({sequence.request.id: plans for sequence in world.scheduler.newcomers})
        ended.update(dict.fromkeys(before - set(world.live), plans))
    assert {name: (seated[name], ended[name]) for name in bounds} == bounds
