"""The scheduler of a random world, with its promises asserted after each call."""

from __future__ import annotations

from typing import Any

from chairlift.core.blocks import BlockPool
from chairlift.core.limits import Limits
from chairlift.core.plan import Event, Outcome, StepPlan
from chairlift.core.request import Phase, Request, Sequence
from chairlift.core.scheduler import Scheduler
from chairlift.core.step import StepResult


class WatchedScheduler(Scheduler):
    """The scheduler, with its promises asserted after each call."""

    events = 0
    plans = 0
    resumed = 0
    is_fcfs = True  # with continuous batches and chunked prompts: what is promised of its order holds

    def __init__(self, limits: Limits, pool: BlockPool, **choices: Any) -> None:
        super().__init__(limits, pool, **choices)
        self.yielded: set[Sequence] = set()  # preempted and not yet back
        self.newcomers: list[Sequence] = []  # seated for the first time by the last plan
        self._last_seated = -1

    def submit(self, request: Request) -> None:
        self.events += 1
        try:
            super().submit(request)
        finally:
            self.check()

    def plan(self, now: float) -> StepPlan:
        step = super().plan(now)
        self.check()
        self.plans += 1
        self.events += len(step.slices)
        limits, running = self.limits, self.running
        assert step.tokens <= limits.step_tokens, f"{step.tokens} tokens in a step of {limits.step_tokens}"
        assert len(running) <= limits.max_sequences, f"{len(running)} sequences in {limits.max_sequences} seats"
        for sequence in (*running, *self.waiting):
            assert sequence.preemptions <= 3 or sequence.is_search, (
                f"{sequence} was preempted {sequence.preemptions} times"
            )
        if self.is_fcfs and running and len(self.waiting):
            first = min(sequence.rank for sequence in self.waiting)
            assert running[-1].rank < first, f"{running[-1]} has overtaken one that waits"
        self._watch_seats(step)
        return step

    def _watch_seats(self, step: StepPlan) -> None:
        for sequence in step.preempted:
            assert sequence.phase is Phase.WAITING
            self.yielded.add(sequence)
        self.newcomers = []
        for sequence in step.placed:
            if sequence in self.yielded:
                self.yielded.discard(sequence)
                self.resumed += 1
            elif sequence.index == 0:
                assert 0 <= sequence.cached < sequence.prompt_length
                if self.is_fcfs:
                    assert sequence.order > self._last_seated, f"{sequence} was overtaken in admission"
                self._last_seated = sequence.order
                self.newcomers.append(sequence)

    def apply(self, step: StepPlan, result: StepResult) -> Outcome:
        outcome = super().apply(step, result)
        self.check()
        self.events += len(outcome)
        return outcome

    def fail(self, step: StepPlan, error: str) -> list[Event]:
        failing = live_requests_of(step)
        lost = {block for node in step.fresh for block in (node.block, *node.others)}
        plans, unsaved = self.memory.prefixes.in_flight, {slot for _, slot in step.saved}
        lost |= {at for later in plans[plans.index(step) + 1 :] for slot, at in later.restored if slot in unsaved}
        failing |= {each.request.id for each in self.running if not lost.isdisjoint(blocks_of(each))}
        running = [sequence for sequence in self.running if sequence.request.id not in failing]
        events = super().fail(step, error)
        self.check()
        self.events += 1
        assert self.running == running, "a failure ended sequences of requests that were not in the plan"
        return events

    def abort(self, request_id: str, error: str | None = None) -> list[Event]:
        events = super().abort(request_id, error)
        self.check()
        self.events += 1
        return events

    def stop(self, sequence: Sequence) -> list[Event]:
        events = super().stop(sequence)
        self.check()
        self.events += 1
        return events


def blocks_of(sequence: Sequence) -> set[int]:
    """The blocks that a sequence holds in all groups."""
    return {block for table in sequence.tables for block in table.blocks[table.freed :]}


def live_requests_of(step: StepPlan) -> set[str]:
    """The requests that have a sequence in the plan which has not ended since."""
    sequences = [piece.sequence for piece in step.slices] + step.samples + step.placed
    return {sequence.request.id for sequence in sequences if sequence.phase is not Phase.DONE}
