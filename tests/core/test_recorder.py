"""What the recorder says of a run is true: a reader that believes it finds every lane, slice and token in its place."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from test_properties import QUIET, cause_trouble, quiet_engine, shapes, submit_anything
from world import Shape, World

from chairlift.core.blocks import BlockPool, BlockTable
from chairlift.core.cost import Cost
from chairlift.core.explain import explain, explain_head
from chairlift.core.limits import Limits
from chairlift.core.params import SamplingParams
from chairlift.core.policies import POLICIES
from chairlift.core.policy import Knowledge
from chairlift.core.predictor import PREDICTORS
from chairlift.core.prefix_cache import PrefixCache
from chairlift.core.request import Phase, Request
from chairlift.core.scheduler import Scheduler
from chairlift.core.shared_prefixes import largest_prefixes
from chairlift.core.step import Step, StepResult
from chairlift.engine.engine import Engine
from chairlift.engine.recorder import MOST_EVENTS, MOST_STEPS, Recorder

assert quiet_engine is not None  # a fixture that every test here uses
ROW, ID, INDEX, PROMPT, LIMIT, IS_FORK, KNOWN = 0, 1, 2, 4, 8, 11, 12


class Reader:
    """Reads records as the page does, and believes nothing."""

    def __init__(self) -> None:
        self.lanes: dict[int, list[Any]] = {}
        self.next: dict[int, int] = {}  # position of the next chunk of a row, once it has had one
        self.rows: list[int] = []
        self.steps = self.admitted = self.ended = self.preempted = self.chunks = self.drafts = 0

    def take(self, record: dict[str, Any] | None) -> None:
        if record is None:
            return
        record = json.loads(json.dumps(record))
        if "start" in record:
            self.lanes = {lane[ROW]: lane for lane in record["start"]["lanes"]}
            self.next = {}
        events = record.get("events", [])
        assert events == sorted(events, key=lambda event: event[1])
        assert len(events) <= MOST_EVENTS and len(record.get("steps", ())) <= MOST_STEPS
        for step in record.get("steps", ()):
            while events and (events[0][1] < step[0] or (events[0][1] == step[0] and events[0][0] != "end")):
                self.event(events.pop(0))
            self.step(*step)
        for event in events:
            self.event(event)

    def event(self, event: list[Any]) -> None:
        kind, _, row, *rest = event
        if kind == "admit":
            assert row not in self.lanes, "a row has one sequence at a time"
            self.lanes[row] = event[2:]
            self.next.pop(row, None)
            self.admitted += 1
            return
        lane = self.lanes.pop(row)
        if kind == "end":
            assert 0 <= rest[1] <= lane[LIMIT] - lane[PROMPT]
            assert rest[2] is None or 0 <= rest[2] <= rest[3]
            self.ended += 1
        else:
            self.preempted += 1

    def step(
        self, number: int, start: int, took: int, tokens: int, sampled: int, rows: Any, chunks: Any, drafts: Any
    ) -> None:
        self.steps += 1
        self.rows = rows or self.rows
        assert len(set(self.rows)) == len(self.rows) and self.rows
        decodes = set(self.rows)
        count = 0
        for row, first, many in chunks or ():
            decodes.remove(row)
            lane = self.lanes[row]
            assert self.next.get(row, first) == first, "chunks follow one another"
            assert first + many <= lane[KNOWN] and not lane[IS_FORK]
            self.next[row] = first + many
            count += many
            self.chunks += 1
        for row, drafted, accepted in drafts or ():
            decodes.remove(row)
            assert 0 <= accepted <= drafted
            self.next.pop(row, None)  # the first may stand behind a prompt's last token
            count += 1 + drafted
            self.drafts += drafted
        discarded = decodes - self.lanes.keys()  # slices of sequences that have ended meanwhile, of any length
        wrong = "every token of the step is in a chunk, a check of drafts or a decode"
        assert count + len(decodes) == tokens or (discarded and count + len(decodes) < tokens), wrong
        for row in decodes & self.lanes.keys() & self.next.keys():
            assert self.next[row] == self.lanes[row][KNOWN], "a decode comes behind the whole prompt"


def watched(shape: Shape, seed: int, events: int = 250) -> tuple[World, Reader, Recorder]:
    """Let things happen at random, with a recorder from some moment on, and a second reader now and then."""
    random = Random(seed)
    world = World(shape, beams=random.random() < 0.3, drafts=Random(seed) if random.random() < 0.4 else None)
    begin, trouble = random.randint(0, events // 3), random.choice((0.0, 0.05, 0.2))
    recorder: Recorder | None = None
    reader = Reader()
    while world.events < events:
        world.clock.time += 0.01
        if recorder is None and world.events >= begin:
            recorder = Recorder(world.engine)
        if random.random() < trouble:
            cause_trouble(world, random)
        elif not world.engine.has_work or (len(world.live) < 2 * shape.seats and random.random() < 0.4):
            submit_anything(world, random, random.choice((0, 1)))
        else:
            world.step()
        if recorder is not None and random.random() < 0.3:
            reader.take(recorder.take())
            if random.random() < 0.1:
                recorder.begin()
    world.drain()
    assert recorder is not None
    reader.take(recorder.take())
    return world, reader, recorder


def test_a_reader_of_the_records_follows_every_lane_through_random_trouble() -> None:
    seen = dict.fromkeys(("steps", "admitted", "ended", "preempted", "chunks", "drafts"), 0)

    @settings(QUIET, max_examples=25)
    @given(shape=shapes(), seed=st.integers(0, 2**64 - 1))
    def go(shape: Shape, seed: int) -> None:
        _, reader, recorder = watched(shape, seed)
        assert all(recorder._lanes[row].phase is not Phase.RUNNING for row in reader.lanes)
        for name in seen:
            seen[name] += getattr(reader, name)

    go()
    assert min(seen.values()) > 5, seen


# ---- what it costs, and bounds


class Instant:
    """An executor that answers at once."""

    def launch(self, step: Step) -> StepResult:
        return StepResult([1] * len(step.sample_rows))

    def choose(self, launched: StepResult, masks: list[bytes | None]) -> None:
        raise AssertionError("no step here has masks")

    def collect(self, launched: StepResult) -> StepResult:
        return launched


class Stopped:
    """A clock that stands still."""

    def now(self) -> float:
        return 0.0


def engine_of(running: int, waiting: int = 0, policy: str = "fcfs") -> Engine:
    limits, pool = Limits(running, 64 * running, 400, 1 << 20), BlockPool(25 * running, 16)
    known = Knowledge(PREDICTORS["max_tokens"](400), Cost(), running)
    scheduler = Scheduler(limits, pool, prefix_cache=PrefixCache(pool), policy=POLICIES[policy](known))
    engine = Engine(scheduler, Instant(), Stopped())
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    for number in range(running + waiting):
        tenant = f"tenant-{number % 3}"
        prompt = [*range(32), *([number + 40] * 16)]
        engine.submit(Request(str(number), prompt, params, tenant=tenant, salt=f"{tenant}/"))
    return engine


def test_nothing_is_recorded_before_the_recorder_is_made_and_after_it_is_closed() -> None:
    engine = engine_of(4)
    assert engine.on_applied is None
    recorder = Recorder(engine)
    engine.step()
    recorder.close()
    engine.step()
    assert engine.on_applied is None
    record = recorder.take()
    assert record is not None and len(record["steps"]) == 1


def test_a_step_of_decodes_alone_is_a_few_numbers_however_many_sequences_run() -> None:
    engine = engine_of(256)
    recorder = Recorder(engine)
    for _ in range(20):
        engine.step()
    recorder.take()
    for _ in range(20):
        engine.step()
    record = recorder.take()
    assert record is not None and set(record) == {"steps"}
    assert len(json.dumps(record)) < 20 * 60, "the rows are those of the step before, so they are not repeated"


def test_records_are_bounded_and_say_how_many_steps_they_skip() -> None:
    engine = engine_of(2)
    recorder = Recorder(engine)
    recorder.take()
    for _ in range(MOST_STEPS + 30):
        engine.step()
    record = recorder.take()
    assert record is not None and len(record["steps"]) == MOST_STEPS and record["skipped"] == 30


def test_a_preempted_request_keeps_the_time_of_its_first_token() -> None:
    class Clock:
        time = 0.0

        def now(self) -> float:
            return self.time

    clock, pool = Clock(), BlockPool(8, 16)
    engine = Engine(Scheduler(Limits(2, 128, 128, 8), pool), Instant(), clock)
    for name in ("old", "young"):
        engine.submit(Request(name, [1] * 32, SamplingParams(max_tokens=64, ignore_eos=True)))
    recorder = Recorder(engine)
    events = []
    while engine.has_work:
        clock.time += 1
        engine.step()
        events += (recorder.take() or {}).get("events", [])
    assert [event[0] for event in events].count("preempt") > 0
    firsts = [event[5] for event in events if event[0] == "end"]
    assert len(firsts) == 2 and all(0 < first <= 2e6 for first in firsts), (
        "preempted or not, it came in the first steps"
    )
    assert not recorder._preempted_firsts


def test_the_look_has_the_head_of_the_queue_in_the_words_of_explain() -> None:
    engine = engine_of(4, waiting=30)
    recorder = Recorder(engine)
    engine.step()
    record = recorder.take()
    assert record is not None
    look = record["look"]
    assert (look["running"], look["waiting"]) == (4, 30)
    assert [entry[0] for entry in look["queue"]] == [str(number) for number in range(4, 16)]
    assert "All 4 rows of the batch are in use." in look["queue"][0][-1]
    assert sum(waiting for _, _, waiting in look["tenants"]) == 30
    blocks = look["blocks"]
    assert sum(blocks) == engine.scheduler.pool.total


def test_explaining_the_head_says_what_explaining_each_request_does() -> None:
    for policy in POLICIES:
        engine = engine_of(4, waiting=9, policy=policy)
        engine.step()
        for sequence, standing in explain_head(engine.scheduler, 12, 1.0):
            wanted = sequence.request
            [alone], _ = explain(engine.scheduler, lambda request, wanted=wanted: request is wanted, 1.0)  # type: ignore[misc]
            assert standing == alone, policy


def test_the_map_of_blocks_says_which_are_free_cached_held_and_shared() -> None:
    pool = BlockPool(10, 4)
    first, second = BlockTable(), BlockTable()
    pool.grow(first, 12)
    pool.keep(first.blocks[0])
    pool.share(second, first.blocks[:1])
    pool.keep(first.blocks[2])
    assert pool.states(10) == (b"5230000000", 1)
    assert pool.states(5) == (b"53000", 2)
    pool.release(second)
    pool.release(first)
    assert pool.states(10) == (b"1010000000", 1)


def test_the_largest_prefixes_are_those_that_many_prompts_share() -> None:
    engine = engine_of(6)
    engine.step()
    cache = engine.scheduler.memory.prefix_cache
    assert cache is not None
    found = largest_prefixes(cache, 3)
    assert [(each.salt, each.blocks, each.branches) for each in found] == [
        ("tenant-0/", 2, 2),
        ("tenant-1/", 2, 2),
        ("tenant-2/", 2, 2),
    ]
