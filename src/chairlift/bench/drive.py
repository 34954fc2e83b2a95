"""Run one mix on one engine: submit every request at its time, stop it at its true length, and record its times."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from chairlift.core.errors import ChairliftError
from chairlift.core.limits import Limits
from chairlift.core.params import SamplingParams
from chairlift.core.plan import Event, StepPlan
from chairlift.core.predictor import spearman
from chairlift.core.request import Phase, Request, Sequence
from chairlift.engine.engine import Engine
from chairlift.traffic.mixes import Mix
from chairlift.traffic.query import Query

STOP = "the end"


@dataclass(slots=True)
class SlotStay:
    """The time that a request spent in one slot of the batch; a preempted request has several stays."""

    slot: int
    began: float
    ended: float


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The result of one request; times are seconds from the start of the run."""

    query: Query
    at: float  # when it was due to be submitted
    tokens: int = 0
    first: float = 0.0
    last: float = 0.0
    gap: float = 0.0  # longest time between two tokens
    stays: list[SlotStay] = field(default_factory=list)
    expected: int = 0  # predicted tokens at its first admission

    @property
    def ttft(self) -> float:
        """Seconds until the first token."""
        return self.first - self.at

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def seconds(self) -> float:
        """Seconds from submission to the last token."""
        return self.last - self.at

    @property
    def is_in_time(self) -> bool:
        """Whether the first token met its deadline; always true without one."""
        return self.query.deadline is None or self.ttft <= self.query.deadline


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One forward pass."""

    at: float
    seconds: float
    sequences: int
    tokens: int
    served: dict[str, int]  # tokens computed per tenant


@dataclass(slots=True)
class MixResult:
    """The result of running a mix."""

    max_sequences: int
    records: list[RequestRecord]
    steps: list[StepRecord] = field(default_factory=list)
    preemptions: int = 0
    rank_correlation: float | None = None  # of predicted and true lengths, if the policy predicts

    @property
    def seconds(self) -> float:
        """Seconds from the start to the last token."""
        return max(record.last for record in self.records)


class Driver:
    """Runs a mix on an engine: submits requests, reads tokens, and stops each answer at its true length."""

    def __init__(self, engine: Engine, mix: Mix, notice: Callable[[int], None] = lambda _tokens: None) -> None:
        self._engine = engine
        self._mix = mix
        self._notice = notice  # called with each step's number of output tokens
        self._start = 0.0
        self._tokens = 0
        self._run = MixResult(
            engine.scheduler.limits.max_sequences, [RequestRecord(query, query.at) for query in mix.queries]
        )
        self._stays: dict[Sequence, SlotStay] = {}

    def run(self) -> MixResult:
        """Run all requests to their end."""
        engine, run = self._engine, self._run
        check(self._mix, engine.scheduler.limits)
        before = engine.scheduler.counters.preemptions
        engine.on_step = self._step
        engine.expect_input()
        self._start = engine.clock.now()
        pending = deque(enumerate(self._mix.queries))
        while pending or engine.has_work:
            while pending and self._is_due(pending[0][1]):
                self._submit(*pending.popleft())
            # Static batching must not wait for a request that itself waits for others' tokens.
            if not pending or pending[0][1].after_tokens:
                engine.end_input()
            outcome = engine.step()
            self._read(outcome)
            if not outcome and (pending or engine.has_work):
                self._rest(pending[0][1] if pending else None)
        engine.on_step = None
        run.preemptions = engine.scheduler.counters.preemptions - before
        if engine.scheduler.policy.needs_lengths:
            run.rank_correlation = spearman([record.expected for record in run.records], self._mix.outputs)
        return run

    def _now(self) -> float:
        return self._engine.clock.now() - self._start

    def _is_due(self, query: Query) -> bool:
        # A request that waits for others' tokens is also due when no others are left.
        return query.at <= self._now() and (self._tokens >= query.after_tokens or not self._engine.has_work)

    def _submit(self, number: int, query: Query) -> None:
        if query.after_tokens:
            self._run.records[number].at = self._now()
        self._engine.submit(request_of(self._mix, number, self._start + self._run.records[number].at))

    def _rest(self, pending: Query | None) -> None:
        """Sleep until the engine or the next request is due."""
        until = math.inf if pending is None or pending.after_tokens else pending.at - self._now()
        wait = min(self._engine.pause if self._engine.has_work else math.inf, until)
        assert wait < math.inf, "the engine waits for requests, and none is left"
        if wait > 0:
            time.sleep(wait)

    def _read(self, events: Iterable[Event]) -> None:
        now = self._now()
        count = 0
        for sequence, token, reason, _logprobs, _prompt, error, _ in events:
            record = self._run.records[int(sequence.request.id)]
            if error is not None:
                raise ChairliftError(f"request {sequence.request.id} failed, so the comparison cannot go on: {error}")
            if token is None:
                continue
            count += 1
            record.tokens += 1
            if record.tokens == 1:
                record.first = now
            else:
                record.gap = max(record.gap, now - record.last)
            record.last = now
            # Like a stop string, which the scheduler cannot foresee. One more token may be in flight; it is discarded.
            if record.tokens == record.query.output_tokens and reason is None:
                self._engine.stop(sequence)
        self._tokens += count
        if count:
            self._notice(count)

    def _step(self, plan: StepPlan, began: float, seconds: float) -> None:
        """Record a pass: its size, the tokens per tenant, and the slot of each sequence."""
        at = began - self._start
        served: dict[str, int] = {}
        present = set(plan.sequences)
        for sequence, count in zip(plan.sequences, plan.counts, strict=True):
            tenant = sequence.request.tenant
            served[tenant] = served.get(tenant, 0) + count
        self._run.steps.append(StepRecord(at, seconds, len(present), plan.tokens, served))
        # A sequence keeps its slot through steps without a slice of it, until it finishes or is preempted.
        ended = [each for each in self._stays if each not in present and each.phase is Phase.DONE]
        for sequence in (*ended, *plan.preempted):
            self._stays.pop(sequence, None)
        taken = {stay.slot for stay in self._stays.values()}
        free = (slot for slot in range(self._run.max_sequences) if slot not in taken)
        for sequence in plan.sequences:
            stay = self._stays.get(sequence)
            if stay is None:
                stay = self._stays[sequence] = SlotStay(next(free), at, at)
                record = self._run.records[int(sequence.request.id)]
                record.expected = record.expected or sequence.expected
                record.stays.append(stay)
            stay.ended = at + seconds


def request_of(mix: Mix, number: int, arrival: float) -> Request:
    """Return a request for the engine; its true length is in `known_length`, which only the oracle reads."""
    query = mix.queries[number]
    # The stop string tells a predictor that the answer may end before max_tokens; Driver does the stopping.
    stop = () if mix.lengths_are_known else (STOP,)
    return Request(
        str(number),
        query.ids,
        SamplingParams(temperature=0, max_tokens=mix.max_tokens(query), ignore_eos=True, stop=stop),
        arrival=arrival,
        tenant=query.tenant,
        priority=query.priority,
        deadline=None if query.deadline is None else arrival + query.deadline,
        endpoint=query.endpoint,
        known_length=query.output_tokens,
    )


def check(mix: Mix, limits: Limits) -> None:
    """Raise for a mix that does not fit the model's context."""
    for number, query in enumerate(mix.queries):
        if query.prompt_tokens + query.output_tokens > limits.max_length:
            raise ChairliftError(
                f"request {number} of {mix.name} has {query.prompt_tokens} prompt and {query.output_tokens} output "
                f"tokens, and the context holds {limits.max_length}: use another workload, or a model with a longer "
                "context"
            )
