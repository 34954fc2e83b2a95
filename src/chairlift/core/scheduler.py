"""The iteration-level scheduler: at every forward pass it chooses again which tokens of which sequences to compute."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter

from chairlift.core.batching import Continuous, Gate
from chairlift.core.blocks import BlockPool
from chairlift.core.errors import RequestError, SettingsError
from chairlift.core.limits import Limits
from chairlift.core.plan import Event, Slice, StepPlan, StepResult
from chairlift.core.policy import Fcfs, Policy
from chairlift.core.preemption import Preemption, Recompute
from chairlift.core.prefill import Chunked, PrefillMode
from chairlift.core.queue import WaitingQueue
from chairlift.core.request import FinishReason, Phase, Request, Sequence

_by_rank = attrgetter("rank")
# The loops over the whole batch build their records past a named tuple's own constructor: a third of their time.
_record = tuple.__new__


@dataclass(slots=True)
class Counters:
    """How requests have fared: submitted = live + finished + aborted + rejected + failed, at every moment."""

    submitted: int = 0
    finished: int = 0
    aborted: int = 0
    rejected: int = 0
    failed: int = 0
    preemptions: int = 0


class Scheduler:
    """Owns every request from `submit` to its last event, and every block that its sequences hold."""

    def __init__(
        self,
        limits: Limits,
        pool: BlockPool,
        *,
        policy: Policy | None = None,
        gate: Gate | None = None,
        prefill: PrefillMode | None = None,
        preemption: Preemption | None = None,
    ) -> None:
        if pool.total * pool.block_size < limits.max_length:
            # One sequence alone must always be able to finish: that is what makes preemption end.
            raise SettingsError(
                f"the KV cache holds {pool.total * pool.block_size} tokens, less than one sequence of max_length "
                f"{limits.max_length}: lower max_length or give the cache more memory"
            )
        self.limits = limits
        self.pool = pool
        self.policy: Policy = policy or Fcfs()
        self.gate: Gate = gate or Continuous()
        self.prefill: PrefillMode = prefill or Chunked()
        self.preemption: Preemption = preemption or Recompute()
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in rank order
        self.counters = Counters()
        self._live: dict[str, list[Sequence]] = {}  # each request's sequences that have not ended
        self._rows = list(range(limits.max_sequences - 1, -1, -1))
        self._seats = limits.max_sequences
        # Blocks that admission leaves free, so that a newcomer's prompt does not force a preemption one step later.
        self._headroom = max(1, pool.total // 100)

    # ---- requests in and out

    def submit(self, request: Request) -> None:
        """Queue a request, or refuse it with a RequestError."""
        order = self.counters.submitted
        self.counters.submitted += 1
        try:
            if request.id in self._live:
                raise RequestError(f"request id {request.id!r} is in use: choose another or wait until it has ended")
            self.limits.check(request)
        except RequestError:
            self.counters.rejected += 1
            raise
        wanted = request.params.max_tokens
        limit = self.limits.max_length
        if wanted is not None:
            limit = min(limit, len(request.prompt) + wanted)
        sequence = Sequence(request, order, limit)
        self._live[request.id] = [sequence]
        self._enqueue(sequence)

    def abort(self, request_id: str) -> list[Event]:
        """End a request now, wherever it is; its blocks are free when this returns. Unknown ids are no error."""
        return self._end(self._live.get(request_id, ()), FinishReason.ABORT)

    def stop(self, sequence: Sequence) -> list[Event]:
        """End one sequence as stopped: its text has met a stop string, which only the text side can see."""
        return self._end([sequence], FinishReason.STOP)

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._live)

    def is_live(self, request_id: str) -> bool:
        """Whether a request has not ended."""
        return request_id in self._live

    def find(self, request_id: str, index: int) -> Sequence | None:
        """One of a request's sequences that have not ended."""
        return next((each for each in self._live.get(request_id, ()) if each.index == index), None)

    # ---- one step

    def plan(self, now: float) -> StepPlan:
        """Choose the slices of one forward pass."""
        step = StepPlan()
        self._extend(step)  # decodes and unfinished prompts first: nobody stalls for a newcomer
        if len(self.waiting) and not step.preempted:  # under memory pressure, admitting would only thrash
            self._admit(step, now)
        return step

    def apply(self, step: StepPlan, result: StepResult) -> list[Event]:
        """Take in what a pass computed: append tokens, end what is complete and free its blocks at once."""
        assert len(result.tokens) == len(step.samples), "an executor owes one token for each sample"
        events: list[Event] = []
        done: list[Event] = []
        for sequence, scores in result.prompt_logprobs or ():
            if sequence.phase is not Phase.DONE:
                events.append(Event(sequence, prompt_logprobs=scores))
        ended = Phase.DONE
        logprobs = result.logprobs or repeat(None)
        for sequence, token, scored in zip(step.samples, result.tokens, logprobs, strict=False):
            sequence.pending -= 1
            if sequence.phase is ended:
                continue  # ended while this step was in flight: the token is one too many
            tokens = sequence.tokens
            tokens.append(token)
            if token in sequence.stop_ids or len(tokens) >= sequence.limit:
                reason = FinishReason.STOP if token in sequence.stop_ids else FinishReason.LENGTH
                done.append(Event(sequence, token, reason, scored))
                events.append(done[-1])
            else:
                events.append(_record(Event, (sequence, token, None, scored, None, None)))
        for event in done:
            self._retire([event.sequence], event.finish_reason)
        return events

    def fail(self, step: StepPlan, error: str) -> list[Event]:
        """The pass broke: end every request that was in it; all others go on."""
        sequences = [piece.sequence for piece in step.slices] + step.samples
        requests = (sequence.request.id for sequence in sequences if sequence.phase is not Phase.DONE)
        events: list[Event] = []
        for request_id in list(dict.fromkeys(requests)):  # in the plan's order, so that a simulation repeats itself
            events += self._end(self._live[request_id], FinishReason.ERROR, error)
        return events

    def check(self) -> None:
        """Prove the invariants: blocks, seats and requests are all accounted for."""
        live = [sequence for sequences in self._live.values() for sequence in sequences]
        waiting = [sequence for sequence in live if sequence.phase is Phase.WAITING]
        running = [sequence for sequence in live if sequence.phase is Phase.RUNNING]
        assert len(waiting) == len(self.waiting) == sum(1 for _ in self.waiting)
        assert {id(sequence) for sequence in running} == {id(sequence) for sequence in self.running}
        assert self.running == sorted(self.running, key=_by_rank)
        assert all(not sequence.table.blocks for sequence in waiting)
        self.pool.check(sequence.table for sequence in running)
        assert self._seats + sum(sequence.seats for sequence in running) == self.limits.max_sequences
        rows = [sequence.row for sequence in running]
        assert sorted(rows + self._rows) == list(range(self.limits.max_sequences))
        c = self.counters
        assert c.submitted == len(self._live) + c.finished + c.aborted + c.rejected + c.failed

    # ---- choosing

    def _extend(self, step: StepPlan) -> None:
        """Give every running sequence its next slice, the oldest first; those in mid-prompt share what is left."""
        # Decodes always fit: a step has at least as many tokens as the batch has seats (Limits).
        slices, samples, preempted = step.slices, step.samples, step.preempted
        prompts: list[Sequence] = []
        for sequence in self.running.copy():
            if preempted and sequence.phase is not Phase.RUNNING:
                continue  # it has just yielded to one before it
            start = sequence.computed
            length = len(sequence.tokens) + sequence.pending
            if length >= sequence.limit:
                continue  # its last token is in flight
            if length - start > 1 or not sequence.is_forked:  # the last token of a prompt may yet have to fork
                prompts.append(sequence)
                continue
            if length > sequence.table.writable and not self._make_room(step, sequence, length):
                continue
            slices.append(_record(Slice, (sequence, start, 1)))
            samples.append(sequence)
            sequence.computed = length
            sequence.pending += 1
        step.tokens = len(slices)
        step.sampled_at += range(len(slices))
        for sequence in prompts:
            self._take_chunk(step, sequence)

    def _admit(self, step: StepPlan, now: float) -> None:
        """Seat waiting sequences in order while budget, seats and blocks last; the first that does not fit ends it."""
        pool = self.pool
        while len(self.waiting) and step.tokens < self.limits.step_tokens:
            if not self.gate.opens(len(self.running), len(self.waiting), now):
                return
            sequence = self.waiting.peek()
            if sequence.seats > self._seats:
                return
            blocks = pool.blocks_for(len(sequence.tokens))
            if blocks + (self._headroom if self.running else 0) > pool.free:
                return
            if not self.prefill.chunk(len(sequence.tokens), self.limits.step_tokens - step.tokens):
                return
            self.waiting.pop()
            # All blocks of what is known at once: a prompt under way never has to wait for memory.
            pool.grow(sequence.table, len(sequence.tokens))
            self._seats -= sequence.seats
            self._place(step, sequence, now)
            self._take_chunk(step, sequence)

    def _take_chunk(self, step: StepPlan, sequence: Sequence) -> None:
        """Add as much of a prompt as fits; its end samples, for every sibling that forks off there."""
        remaining = sequence.length - sequence.computed
        count = self.prefill.chunk(remaining, self.limits.step_tokens - step.tokens)
        if not count:
            return
        step.slices.append(Slice(sequence, sequence.computed, count))
        step.tokens += count
        sequence.computed += count
        if count == remaining:
            for sampler in (sequence, *self._fork(step, sequence)):
                step.samples.append(sampler)
                step.sampled_at.append(step.tokens - 1)
                sampler.pending += 1

    def _fork(self, step: StepPlan, sequence: Sequence) -> list[Sequence]:
        """Give the prompt's siblings their own sequence over the same blocks."""
        if sequence.is_forked:
            return []
        sequence.is_forked = True  # from here on, each has its own seat of those admitted with the prompt
        siblings = []
        for index in range(1, sequence.request.params.n):
            sibling = Sequence(sequence.request, sequence.order, sequence.limit, index)
            sibling.rank = (sequence.rank[0], sequence.order, index)
            sibling.computed = sequence.computed
            sibling.table = self.pool.fork(sequence.table, sequence.computed)
            self._live[sequence.request.id].append(sibling)
            self._place(step, sibling, sequence.started)
            siblings.append(sibling)
        return siblings

    def _place(self, step: StepPlan, sequence: Sequence, now: float | None) -> None:
        sequence.phase = Phase.RUNNING
        if sequence.started is None:
            sequence.started = now
        sequence.row = self._rows.pop()
        insort(self.running, sequence, key=_by_rank)
        step.placed.append(sequence)

    def _make_room(self, step: StepPlan, sequence: Sequence, length: int) -> bool:
        """Let a sequence write up to `length`, at the cost of those behind it; False if it yielded itself."""
        pool = self.pool
        while pool.missing(sequence.table, length) > pool.free:
            # Not those before it: they have slices in this step, and a plan should never have to be taken apart.
            victim = self.policy.victim(self.running[self.running.index(sequence) :])
            self._preempt(step, victim)
            if victim is sequence:
                return False
        copy = pool.grow(sequence.table, length)
        if copy:
            step.copies.append(copy)
        step.grown.append(sequence)
        return True

    def _preempt(self, step: StepPlan, victim: Sequence) -> None:
        self.running.remove(victim)
        self._free_seat(victim)
        self.preemption.preempt(victim, self.pool)
        victim.phase = Phase.WAITING
        self.waiting.push(victim)  # with the rank it had: it keeps its place in the queue
        step.preempted.append(victim)
        self.counters.preemptions += 1

    # ---- ending

    def _end(self, sequences: Iterable[Sequence], reason: FinishReason, error: str | None = None) -> list[Event]:
        ending = [sequence for sequence in sequences if sequence.phase is not Phase.DONE]
        self._retire(ending, reason)
        return [Event(sequence, finish_reason=reason, error=error) for sequence in ending]

    def _retire(self, sequences: list[Sequence], reason: FinishReason | None) -> None:
        """Free all that the sequences hold, and count their requests out with the last of them."""
        counters = self.counters
        for sequence in sequences:
            if sequence.phase is Phase.RUNNING:
                self.running.remove(sequence)
                self._free_seat(sequence)
                self.pool.release(sequence.table)
                sequence.phase = Phase.DONE
            else:
                sequence.phase = Phase.DONE
                self.waiting.forget(1)
            live = self._live[sequence.request.id]
            live.remove(sequence)
            if live:
                continue
            del self._live[sequence.request.id]
            if reason is FinishReason.ABORT:
                counters.aborted += 1
            elif reason is FinishReason.ERROR:
                counters.failed += 1
            else:
                counters.finished += 1

    def _free_seat(self, sequence: Sequence) -> None:
        self._seats += sequence.seats
        self._rows.append(sequence.row)
        sequence.row = -1

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.rank = (self.policy.key(sequence), sequence.order, sequence.index)
        self.waiting.push(sequence)
