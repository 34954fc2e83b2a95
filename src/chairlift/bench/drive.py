"""One mix through one engine: every request at its moment, ended at its own length, and what became of it."""

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
class Stay:
    """A seat that a request held, and from when to when; whoever is preempted stays more than once."""

    seat: int
    began: float
    ended: float


@dataclass(slots=True, eq=False)
class Answer:
    """What became of one request; times are seconds from the start of the run."""

    query: Query
    at: float  # when it was due to be asked
    tokens: int = 0
    first: float = 0.0
    last: float = 0.0
    gap: float = 0.0  # the longest wait between two tokens
    stays: list[Stay] = field(default_factory=list)
    expected: int = 0  # tokens, when it took its first seat

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.at

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def seconds(self) -> float:
        """From the question to the end of the answer."""
        return self.last - self.at

    @property
    def is_in_time(self) -> bool:
        """Whether the first token met its deadline; without one, any moment is good."""
        return self.query.deadline is None or self.ttft <= self.query.deadline


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass."""

    at: float
    seconds: float
    sequences: int
    tokens: int
    served: dict[str, int]  # tokens computed for each tenant


@dataclass(slots=True)
class Run:
    """One cell's run of the mix."""

    seats: int
    answers: list[Answer]
    steps: list[Step] = field(default_factory=list)
    preemptions: int = 0
    rank_correlation: float | None = None  # of predicted and true lengths, where lengths are predicted

    @property
    def seconds(self) -> float:
        """From the start to the last token that was wanted."""
        return max(answer.last for answer in self.answers)


class Driver:
    """Plays a mix's users on an engine: asks, reads, and hangs up when the answer is as long as it was to be."""

    def __init__(self, engine: Engine, mix: Mix, notice: Callable[[int], None] = lambda _tokens: None) -> None:
        self._engine = engine
        self._mix = mix
        self._notice = notice  # told of every step's tokens
        self._start = 0.0
        self._tokens = 0
        self._run = Run(engine.scheduler.limits.max_sequences, [Answer(query, query.at) for query in mix.queries])
        self._seated: dict[Sequence, Stay] = {}

    def run(self) -> Run:
        """Everything, to the end."""
        engine, run = self._engine, self._run
        check(self._mix, engine.scheduler.limits)
        before = engine.scheduler.counters.preemptions
        engine.on_step = self._step
        engine.expect_input()
        self._start = engine.clock.now()
        coming = deque(enumerate(self._mix.queries))
        while coming or engine.has_work:
            while coming and self._is_due(coming[0][1]):
                self._submit(*coming.popleft())
            if not coming or coming[0][1].after_tokens:  # one that waits for others' tokens is nobody to wait for
                engine.end_input()
            outcome = engine.step()
            self._read(outcome)
            if not outcome and (coming or engine.has_work):
                self._rest(coming[0][1] if coming else None)
        engine.on_step = None
        run.preemptions = engine.scheduler.counters.preemptions - before
        if engine.scheduler.policy.needs_lengths:
            run.rank_correlation = spearman([answer.expected for answer in run.answers], self._mix.outputs)
        return run

    def _now(self) -> float:
        return self._engine.clock.now() - self._start

    def _is_due(self, query: Query) -> bool:
        # One that waits for others' tokens also comes when there are none to wait for.
        return query.at <= self._now() and (self._tokens >= query.after_tokens or not self._engine.has_work)

    def _submit(self, number: int, query: Query) -> None:
        if query.after_tokens:
            self._run.answers[number].at = self._now()
        self._engine.submit(request_of(self._mix, number, self._start + self._run.answers[number].at))

    def _rest(self, coming: Query | None) -> None:
        """Sleep while nothing can happen by itself."""
        until = math.inf if coming is None or coming.after_tokens else coming.at - self._now()
        wait = min(self._engine.pause if self._engine.has_work else math.inf, until)
        assert wait < math.inf, "the engine waits for requests, and none will come"
        if wait > 0:
            time.sleep(wait)

    def _read(self, events: Iterable[Event]) -> None:
        now = self._now()
        count = 0
        for sequence, token, reason, _logprobs, _prompt, error in events:
            answer = self._run.answers[int(sequence.request.id)]
            if error is not None:
                raise ChairliftError(f"request {sequence.request.id} failed, and with it the comparison: {error}")
            if token is None:
                continue
            count += 1
            answer.tokens += 1
            if answer.tokens == 1:
                answer.first = now
            else:
                answer.gap = max(answer.gap, now - answer.last)
            answer.last = now
            # As a stop string does: the scheduler could not know. One more token may be in flight; nobody reads it.
            if answer.tokens == answer.query.output_tokens and reason is None:
                self._engine.stop(sequence)
        self._tokens += count
        if count:
            self._notice(count)

    def _step(self, plan: StepPlan, began: float, seconds: float) -> None:
        """Take down a pass: how full it was, whom it served, and who sat where."""
        at = began - self._start
        served: dict[str, int] = {}
        present = set(plan.sequences)
        for sequence, count in zip(plan.sequences, plan.counts, strict=True):
            tenant = sequence.request.tenant
            served[tenant] = served.get(tenant, 0) + count
        self._run.steps.append(Step(at, seconds, len(present), plan.tokens, served))
        # A seat is kept through steps that had no room for its prompt, and is free when its sequence ended or yielded.
        gone = [each for each in self._seated if each not in present and each.phase is Phase.DONE]
        for sequence in (*gone, *plan.preempted):
            self._seated.pop(sequence, None)
        taken = {stay.seat for stay in self._seated.values()}
        free = (seat for seat in range(self._run.seats) if seat not in taken)
        for sequence in plan.sequences:
            stay = self._seated.get(sequence)
            if stay is None:
                stay = self._seated[sequence] = Stay(next(free), at, at)
                answer = self._run.answers[int(sequence.request.id)]
                answer.expected = answer.expected or sequence.expected
                answer.stays.append(stay)
            stay.ended = at + seconds


def request_of(mix: Mix, number: int, arrival: float) -> Request:
    """A request as the engine sees it: its true length is in `known_length` alone, which only an oracle reads."""
    query = mix.queries[number]
    # The stop string tells a predictor that the answer may end before max_tokens; it is we who find it.
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
    """Refuse a mix that the model's context cannot hold."""
    for number, query in enumerate(mix.queries):
        if query.prompt_tokens + query.output_tokens > limits.max_length:
            raise ChairliftError(
                f"request {number} of {mix.name} has {query.prompt_tokens} prompt and {query.output_tokens} output "
                f"tokens, and the context holds {limits.max_length}: use another workload, or a model with a longer "
                "context"
            )
