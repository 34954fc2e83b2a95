"""Work that cannot go on neither spins nor hides: small schedules that must all end, and an engine that notices.

Beams are what once got stuck: preempted one by one, some came back and held the memory that the others needed. They are
preempted and resumed as a group, and the sweeps try every small schedule in which that could go wrong.
"""

from __future__ import annotations

import logging
from itertools import product
from typing import NamedTuple

import pytest
from device import FakeExecutor
from fakes import VOCAB, ManualClock
from world import Shape, World

from chairlift.core.batching import GATES, Gate, GateView
from chairlift.core.blocks import BlockPool
from chairlift.core.cost import Cost
from chairlift.core.limits import Limits
from chairlift.core.params import SamplingParams
from chairlift.core.plan import Event
from chairlift.core.policies import POLICIES
from chairlift.core.preemption import PREEMPTIONS
from chairlift.core.prefill import PREFILL_MODES, Chunked, PrefillMode
from chairlift.core.request import FinishReason, Request
from chairlift.core.scheduler import Scheduler
from chairlift.core.settings import SchedulingSettings
from chairlift.engine.engine import MAX_IDLE_PLANS, Engine

SIZE = 2  # tokens of a block
ANSWER = 6  # tokens
# What two or three requests are: a beam search, that many sampled answers, or one.
MIXES = (("beams", "beams"), ("beams", "beams", "beams"), ("beams", "one"), ("one", "beams", "many"))
MIXES += (("many", "many"), ("beams", "many", "beams"))


class Schedule(NamedTuple):
    """A few requests and a cache in which barely one of them fits."""

    spare: int  # blocks beyond what one search may take
    width: int
    prompt: int
    mix: tuple[str, ...]


class Choice(NamedTuple):
    """How they are scheduled."""

    policy: str
    gate: str
    prefill: str
    preemption: str
    overlap: bool
    caches: bool


SCHEDULES = [Schedule(*each) for each in product(range(5), range(1, 5), range(1, 12), MIXES)]
CHOICES = [Choice(*e) for e in product(POLICIES, GATES, PREFILL_MODES, PREEMPTIONS, (False, True), (False, True))]


def run(schedule: Schedule, choice: Choice) -> None:
    """Drive a schedule to its end; the world asserts that each plan makes progress, and that all answers are right."""
    spare, width, prompt, mix = schedule
    length, seats = prompt + ANSWER + 1, 3 * width  # memory is short, seats are not
    shape = Shape(
        seats=seats,
        step_tokens=seats + (length if choice.prefill == "whole" else 1),
        block_size=SIZE,
        blocks=width * -(-length // SIZE) + spare,
        max_length=length,
        overlap=choice.overlap,
        caches=choice.caches,
        host_blocks=8,
    )
    settings = SchedulingSettings(
        policy=choice.policy,
        batching=choice.gate,
        batch_window=0.02,
        prefill=choice.prefill,
        preemption=choice.preemption,
    )
    world = World(shape, settings, beams=True)
    for number, kind in enumerate(mix):
        beams = {"use_beam_search": True, "best_of": width} if kind == "beams" else {}
        n = width if kind == "many" else 1
        world.submit([number] * prompt, n, ANSWER, 0, number, beams, tenant=str(number), priority=number)
    world.drain()


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])
def test_the_1320_small_schedules_end_with_default_settings(stride: int) -> None:
    usual = SchedulingSettings()
    choice = Choice(usual.policy, usual.batching, usual.prefill, usual.preemption, True, True)
    assert len(SCHEDULES) == 1320
    for schedule in SCHEDULES[::stride]:
        run(schedule, choice)


@pytest.mark.long
@pytest.mark.parametrize("stride", [4001, pytest.param(67, marks=pytest.mark.long)], ids=["some", "many"])
def test_small_schedules_end_with_every_combination_of_settings(stride: int) -> None:
    """Every so many of all; the stride is prime to the numbers of both, so that every choice is tried."""
    for number in range(0, len(SCHEDULES) * len(CHOICES), stride):
        run(SCHEDULES[number // len(CHOICES)], CHOICES[number % len(CHOICES)])


# ---- and if it happened all the same


class Shut:
    """A gate that says it is about to open and never does."""

    closes = True

    def is_open(self, view: GateView, now: float) -> bool:
        return False

    def close(self) -> None:
        pass

    def pause(self, view: GateView, now: float) -> float:
        return 0.0


class Halting(Chunked):
    """Prompts of which nothing is computed after the first token."""

    def chunk(self, remaining: int, left: int) -> int:
        return min(1, left) if remaining == 4 else 0


def made(overlap: bool, gate: Gate | None = None, halts: bool = False) -> Engine:
    limits = Limits(4, 16, 32, VOCAB)
    prefill: PrefillMode | None = Halting(limits, Cost()) if halts else None
    scheduler = Scheduler(limits, BlockPool(16, 4), gate=gate, prefill=prefill)
    return Engine(scheduler, FakeExecutor(4, 16, 4, 32), ManualClock(), overlap=overlap)


def ends(engine: Engine) -> list[tuple[int, Event]]:
    """The events of a run, each with the number of the step that it came in."""
    found: list[tuple[int, Event]] = []
    for name in ("old", "young"):
        engine.submit(Request(name, [1, 2, 3, 4], SamplingParams(max_tokens=4)))
    for number in range(100):
        found += ((number, event) for event in engine.step())
        engine.scheduler.check()
        if not engine.has_work:
            return found
    raise AssertionError("the engine spins")


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlapped"])
def test_requests_that_never_start_are_ended_in_order(overlap: bool, caplog: pytest.LogCaptureFixture) -> None:
    engine = made(overlap, gate=Shut())
    with caplog.at_level(logging.ERROR, logger="chairlift"):
        found = ends(engine)
    assert [event.sequence.request.id for _, event in found] == ["old", "young"]
    assert [number for number, _ in found] == [MAX_IDLE_PLANS - 1, 2 * MAX_IDLE_PLANS - 1]
    assert engine.scheduler.counters.idle_plans == 2 * MAX_IDLE_PLANS
    assert caplog.text.count("8 plans in a row computed nothing: ending Sequence(") == 2


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlapped"])
def test_running_requests_that_never_go_on_are_ended_the_youngest_first(overlap: bool) -> None:
    engine = made(overlap, halts=True)
    found = [event for _, event in ends(engine)]
    assert [event.sequence.request.id for event in found] == ["young", "old"]
    assert {event.finish_reason for event in found} == {FinishReason.ERROR}
    assert all(event.error is not None and "8 steps in a row" in event.error for event in found)
    assert engine.scheduler.pool.available == engine.scheduler.pool.total


def test_a_batch_that_waits_to_be_full_is_not_stuck() -> None:
    engine = made(False, gate=GATES["static"](0.0))
    engine.submit(Request("r", [1, 2, 3, 4], SamplingParams(max_tokens=4)))
    for _ in range(3 * MAX_IDLE_PLANS):
        assert not engine.step()
    assert engine.scheduler.counters.idle_plans == 0
