"""Every way to batch, to order, to cut prompts and to yield, in any combination: no promise is broken by any.

The worlds are those of test_properties, with settings drawn at random; what holds for first come, first served alone is
not asked of others, but what each promises itself is.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_properties import QUIET, SIZES, TROUBLE, cause_trouble, constraint, quiet_engine, sampling, shapes, words
from world import Shape, World

from chairlift.core.batching import GATES
from chairlift.core.cache_groups import CacheGroups
from chairlift.core.policies import POLICIES
from chairlift.core.predictor import PREDICTORS
from chairlift.core.preemption import PREEMPTIONS
from chairlift.core.prefill import PREFILL_MODES
from chairlift.core.request import Phase
from chairlift.core.settings import SchedulingSettings

WALKS = 7  # of each size and policy: 7 x 17 x 7 x 600 is about 500,000
EVENTS_A_WALK = 600
TENANTS = ("", "a", "b", "c")


__all__ = ["quiet_engine"]  # a fixture that all tests here use


@st.composite
def worlds(draw: st.DrawFn, policy: str) -> tuple[Shape, SchedulingSettings]:
    shape = draw(shapes())
    prefill = draw(st.sampled_from(tuple(PREFILL_MODES)))
    if prefill == "whole":
        step_tokens = shape.max_length + shape.seats
        blocks = CacheGroups(shape.windows, shape.block_size, step_tokens).blocks_of(shape.max_length)
        shape = replace(shape, step_tokens=step_tokens, blocks=max(shape.blocks, blocks))
    host = draw(st.integers(0, shape.blocks))
    shape = replace(shape, host_blocks=host, disk_blocks=draw(st.sampled_from((0, 9))) if host else 0)
    return shape, SchedulingSettings(
        policy=policy,
        batching=draw(st.sampled_from(("continuous", *GATES))),
        batch_window=draw(st.sampled_from((0.0, 0.05))),
        prefill=prefill,
        preemption=draw(st.sampled_from(tuple(PREEMPTIONS))),
        predictor=draw(st.sampled_from(tuple(PREDICTORS))),
        aging=draw(st.sampled_from((None, 0.0, 0.5))),
        target_tpot=draw(st.sampled_from((None, 0.002))) if prefill == "chunked" else None,
    )


def walk(shape: Shape, chosen: SchedulingSettings, seed: int) -> World:
    """Let things happen at random until enough have, then let everything end."""
    random = Random(seed)
    drafts = Random(seed) if random.random() < 0.3 else None
    world = World(shape, chosen, beams=random.random() < 0.3, drafts=drafts)
    crowd = random.randint(1, 3 * shape.seats)
    haste, trouble = random.random(), random.choice(TROUBLE)
    eos = random.choice((0, 1, 4))
    while world.events < EVENTS_A_WALK:
        world.clock.time += random.choice((0.0, 0.01))
        if random.random() < trouble:
            cause_trouble(world, random)
        elif not world.engine.has_work or (len(world.live) < crowd and random.random() < haste):
            submit_anything(world, random, eos)
        else:
            world.step()
            watch_order(world, chosen)
            if world.engine.pause:  # only a new request, or time, can help
                submit_anything(world, random, eos)
    world.drain()
    return world


def submit_anything(world: World, random: Random, eos: int) -> None:
    longest = world.shape.max_length
    now = world.clock.now()
    n = random.randint(1, world.shape.seats) if random.random() < 0.2 else 1
    world.submit(
        words(world, random, 1 + int((longest - 2) * random.random() ** 2)),
        n=n,
        sampling=(chosen := sampling(world, random, n)),
        max_tokens=None if random.random() < 0.1 else random.randint(1, longest),
        eos=eos,
        seed=random.getrandbits(32),
        tenant=random.choice(TENANTS),
        salt=random.choice(("", "", "a")),
        weight=random.choice((1.0, 3.0)),
        priority=random.choice((0, 0, 0, 1, 5)),
        deadline=random.choice((None, now + 0.02, now + 0.5)),
        known_length=random.randint(1, longest),
        constraint=constraint(random) if "use_beam_search" not in chosen else None,
    )


def watch_order(world: World, chosen: SchedulingSettings) -> None:
    """Where there is one lane, an admitted request ranks before all that wait: ages and lengths are in the rank."""
    scheduler = world.scheduler
    if chosen.policy not in ("fcfs", "priority", "sjf") or not len(scheduler.waiting):
        return
    if world.beams:  # how many blocks they need is known late: they may be preempted for one that was just seated
        return
    first = min(sequence.rank for sequence in scheduler.waiting)
    for sequence in scheduler.newcomers:
        assert sequence.rank < first or sequence.phase is Phase.DONE, f"{sequence} has overtaken one that waits"


@SIZES
@pytest.mark.parametrize("policy", POLICIES)
def test_no_combination_breaks_a_promise(policy: str, size: int, record_property: pytest.RecordProperty) -> None:
    seen = dict.fromkeys(("events", "preemptions", "resumed", "swapped", "copied", "cached"), 0)

    @settings(QUIET, max_examples=size * WALKS)
    @given(made=worlds(policy), seed=st.integers(0, 2**64 - 1))
    def go(made: tuple[Shape, SchedulingSettings], seed: int) -> None:
        world = walk(*made, seed)
        seen["events"] += world.events
        seen["preemptions"] += world.scheduler.counters.preemptions
        seen["resumed"] += world.scheduler.resumed
        seen["swapped"] += world.executor.swapped
        seen["copied"] += world.executor.copied
        seen["cached"] += world.scheduler.counters.cached_tokens

    go()
    record_property("core events", seen["events"])
    assert seen["events"] >= size * WALKS * EVENTS_A_WALK
    assert size == 1 or min(seen.values()) > 100, seen
