"""The controller with a draft model in an overlapped engine, on a virtual clock with a GPU's and its host's times.

A step without drafts is planned while the device runs the one before; a check is planned, and its drafts are launched
pass by pass, while the device waits. How long that takes, the controller has to learn. In a sequence's first check the
draft model also reads its prompt, and in the very first one its kernels are compiled.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from fakes import ManualClock

from chairlift.core.blocks import BlockPool
from chairlift.core.drafting import DeviceDrafter
from chairlift.core.limits import Limits
from chairlift.core.params import SamplingParams
from chairlift.core.request import Request
from chairlift.core.scheduler import Scheduler
from chairlift.core.speculation import Speculation
from chairlift.core.step import Step, StepResult
from chairlift.core.step_times import StepTimes
from chairlift.engine.engine import Engine
from mostly_long import mostly_long

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512)
STEP = [(1, 4.15), (8, 4.6), (32, 5.0), (64, 5.6), (128, 6.9), (256, 9.5), (384, 13.0), (512, 16.0)]  # ms, by tokens
PASS = [(1, 0.69), (32, 0.85), (128, 1.3), (256, 2.2)]  # ms of the draft model, by rows
PLAN, LAUNCH, CHECK, ROW, DRAFT, APPLY = 0.4e-3, 0.3e-3, 0.8e-3, 6e-6, 0.35e-3, 0.1e-3  # seconds of the host
CHECK_ROW = 25e-6  # seconds of the host for each sequence with drafts
READ, COMPILE = 1e-3, 0.3  # seconds: a prompt that the draft model reads; its first reading


def padded(points: list[tuple[int, float]], size: int) -> float:
    """The seconds of a captured step, which is padded to the next larger size."""
    size = SIZES[bisect_left(SIZES, size)]
    for (low, first), (high, last) in pairwise(points):
        if size <= high:
            return (first + (last - first) * (size - low) / (high - low)) / 1000
    raise AssertionError(f"no step has {size} tokens")


class OverlappedDevice:
    """The device works while the host does, except where it waits for launches; a slow host takes a multiple."""

    def __init__(self, clock: ManualClock, acceptance: float, host: float) -> None:
        self._clock, self._acceptance, self._host, self._random = clock, acceptance, host, Random(0)
        self._free = 0.0  # when the device has finished what was launched
        self._unread: set[int] = set()  # rows
        self._has_read = False
        self.tokens = 0

    def launch(self, step: Step) -> tuple[float, StepResult]:
        clock, drafts = self._clock, dict(step.drafts)
        clock.time += self._host * self._about(PLAN + ROW * len(step.rows))
        start = max(self._free, clock.time)
        self._unread.update(newcomer.row for newcomer in step.newcomers)
        if drafts:
            read = self._unread.intersection(step.sample_rows[number] for number in drafts)
            start += READ * len(read) + COMPILE * (bool(read) and not self._has_read)
            self._has_read |= bool(read)
            self._unread -= read
            clock.time += self._host * self._about(CHECK + CHECK_ROW * len(drafts))
            for depth in range(max(map(len, drafts.values()))):
                rows = sum(len(tokens) > depth for tokens in drafts.values())
                clock.time += self._host * self._about(DRAFT)
                start = max(start, clock.time) + self._about(padded(PASS, rows))
        clock.time += self._host * self._about(LAUNCH)
        self._free = max(start, clock.time) + self._about(padded(STEP, step.tokens))
        counts = []
        for number in range(len(step.sample_rows)):
            count = 1
            while count <= len(drafts.get(number, [])) and self._random.random() < self._acceptance:
                count += 1
            counts.append(count)
        self.tokens += sum(counts)
        return self._free, StepResult([7] * sum(counts), counts=counts if drafts else None)

    def choose(self, launched: Any, masks: Any) -> None:
        raise AssertionError("there are no grammars")

    def collect(self, launched: tuple[float, StepResult]) -> StepResult:
        self._clock.time = max(self._clock.time, launched[0]) + self._host * self._about(APPLY)
        return launched[1]

    def _about(self, seconds: float) -> float:
        return seconds * self._random.uniform(0.97, 1.03)


def engine_of(size: int, way: str, device: OverlappedDevice, clock: ManualClock) -> Engine:
    """An engine for so many sequences: it drafts nothing, a fixed number, or what it chooses."""
    drafts = min(256, 8 * size)
    scheduler = Scheduler(Limits(size, 8192, 1 << 20, 100, drafts), BlockPool(1 << 14, 512))
    if way != "off":
        times = StepTimes([(each, padded(STEP, each)) for each in SIZES if each <= size + drafts], is_padded=True)
        passes = StepTimes([(each, padded(PASS, each)) for each in SIZES if each <= size], is_padded=True)
        scheduler.planner.speculation = Speculation(DeviceDrafter(), times, most=drafts, draft_times=passes)
        scheduler.planner.speculation.fixed = None if way == "chosen" else int(way)
    return Engine(scheduler, device, clock, overlap=True)


def speed(size: int, way: str, acceptance: float, seconds: float, host: float) -> float:
    """Tokens a second of so many sequences that never end, after a second for learning."""
    clock = ManualClock()
    device = OverlappedDevice(clock, acceptance, host)
    engine = engine_of(size, way, device, clock)
    for number in range(size):
        engine.submit(Request(f"r{number}", [1, 2], SamplingParams(max_tokens=1 << 19, ignore_eos=True)))
    while clock.time < 1.0:
        engine.step()
    begun, before = clock.time, device.tokens
    while clock.time < begun + seconds:
        engine.step()
    return (device.tokens - before) / (clock.time - begun)


@pytest.mark.parametrize("acceptance", mostly_long([0.4, 0.1, 0.75]))
@pytest.mark.parametrize("size", mostly_long([8, 1, 32, 128]))
def test_it_is_near_the_best_of_off_and_fixed_numbers(size: int, acceptance: float) -> None:
    seconds = 3.0 if size > 8 else 5.0
    off, chosen = (speed(size, way, acceptance, seconds, 1.0) for way in ("off", "chosen"))
    fixed = [speed(size, way, acceptance, seconds, 1.0) for way in ("1", "3", "5")] if acceptance > 0.1 else []
    assert chosen >= 0.97 * off
    assert chosen >= 0.95 * max([off, *fixed])
    assert chosen > 1.3 * off or acceptance < 0.5 or size > 8


@pytest.mark.parametrize("size", mostly_long([1, 32]))
def test_drafts_that_would_pay_are_found_though_the_first_predictions_say_that_none_does(size: int) -> None:
    """With a slow host, the drafts of an acceptance of 0.6, which is assumed at first, cost more than they bring."""
    best = max(speed(size, way, 0.75, 8.0, 2.0) for way in ("off", "3", "5"))
    assert speed(size, "chosen", 0.75, 8.0, 2.0) >= 0.95 * best


def wave_speed(size: int, way: str) -> float:
    """Tokens a second of requests that begin together, until the first of them ends; several times, the first apart."""
    clock = ManualClock()
    device = OverlappedDevice(clock, 0.75, 1.0)
    engine = engine_of(size, way, device, clock)
    tokens, seconds = 0, 0.0
    for wave in range(5):
        begun, before = clock.time, device.tokens
        for number in range(size):
            engine.submit(Request(f"{wave} {number}", [1, 2], SamplingParams(max_tokens=192, ignore_eos=True)))
        is_whole = True
        while engine.has_work:
            engine.step()
            if is_whole and len(engine.scheduler.running) < size and device.tokens > before + size:
                is_whole = False
                tokens += (device.tokens - before) * (wave > 0)
                seconds += (clock.time - begun) * (wave > 0)
    return tokens / seconds


@pytest.mark.parametrize("size", mostly_long([32, 1, 8, 128, 256]))
def test_requests_that_begin_together_are_as_fast_as_with_the_best_fixed_number(size: int) -> None:
    """In each wave, the draft model has all prompts to read."""
    best = max(wave_speed(size, way) for way in ("off", "1", "3", "5"))
    assert wave_speed(size, "chosen") >= 0.95 * best


PHASES = (1, 1, 8, 64, 8, 1, 32, 1)  # sequences side by side; the first phase is for learning


def goodput(way: str, acceptance: float, host: float, seconds: float = 4.0) -> list[int]:
    """Tokens in each phase of a load that rises and falls."""
    clock = ManualClock()
    device = OverlappedDevice(clock, acceptance, host)
    engine, found = engine_of(max(PHASES), way, device, clock), []
    for phase, (before, size) in enumerate(zip((0, *PHASES), PHASES, strict=False)):
        for number in range(before, size):
            engine.submit(Request(f"r{number}", [1, 2], SamplingParams(max_tokens=1 << 19, ignore_eos=True)))
        for number in range(size, before):
            engine.abort(f"r{number}")
        tokens = device.tokens
        while clock.time < seconds * (phase + 1):
            engine.step()
        found.append(device.tokens - tokens)
    return found[1:]


@pytest.mark.long
@pytest.mark.parametrize("host", [1.0, 2.0])
@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.75])
def test_a_load_that_rises_and_falls_is_served_as_by_the_better_of_on_and_off(acceptance: float, host: float) -> None:
    off, chosen = (goodput(way, acceptance, host) for way in ("off", "chosen"))
    fixed = [goodput(way, acceptance, host) for way in ("3", "5")]
    assert sum(chosen) >= 0.97 * max(map(sum, [off, *fixed]))
    for size, own, *others in zip(PHASES[1:], chosen, off, *fixed, strict=True):
        assert own >= 0.93 * max(others), (size, own, others)
