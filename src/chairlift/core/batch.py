"""RunningBatch: the sequences that run, their rows, and which of them are preempted."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from chairlift.core.counters import Counters
from chairlift.core.memory import Memory
from chairlift.core.plan import StepPlan
from chairlift.core.policy import Policy
from chairlift.core.queue import WaitingQueue
from chairlift.core.request import MAX_PREEMPTIONS, Group, Phase, Sequence

_by_rank = attrgetter("rank")


class RunningBatch:
    """Every running sequence has a row. Until its prompt has forked, a group reserves rows for all its siblings."""

    def __init__(self, rows: int, memory: Memory, policy: Policy, waiting: WaitingQueue, counters: Counters) -> None:
        self.running: list[Sequence] = []  # in rank order
        self.free_rows = rows
        self._total = rows
        self._rows = list(range(rows - 1, -1, -1))
        self._memory = memory
        self._admission = memory.admission
        self._policy = policy
        self._waiting = waiting
        self._counters = counters
        self._fitting: tuple[StepPlan, Group] | None = None  # the plan, and the search with all its beams in it

    def blocked_by(self, sequence: Sequence) -> str:
        """Return the resource that keeps a waiting group from being admitted: rows, blocks, or neither."""
        if sequence.group.rows > self.free_rows:
            return "rows"
        return "" if self._admission.has_room(sequence, not self.running) else "blocks"

    def admit(self, step: StepPlan, sequence: Sequence, now: float) -> None:
        """Admit the waiting group of a sequence, with rows for its siblings to come."""
        self._waiting.take(sequence)
        self.free_rows -= sequence.group.rows
        for each in list(sequence.group.members):
            self._memory.admit(step, each)
            if each.started is None:
                each.cached = max(0, each.computed - each.request.prefilled)
                self._counters.prompt_tokens += each.prompt_length
                self._counters.cached_tokens += each.cached
            self.place(step, each, now)

    def place(self, step: StepPlan, sequence: Sequence, now: float | None) -> None:
        """Give a sequence one of the rows that were counted when its group was admitted."""
        sequence.phase = Phase.RUNNING
        if sequence.started is None:
            sequence.started = now
        sequence.row = self._rows.pop()
        insort(self.running, sequence, key=_by_rank)
        step.placed.append(sequence)
        self._policy.started(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Free the row of a sequence that has ended or is preempted."""
        self.running.remove(sequence)
        self.free_rows += sequence.group.reserved or 1
        self._rows.append(sequence.row)
        sequence.row = -1
        sequence.decode_until = 0
        self._policy.stopped(sequence)

    # ---- preemption

    def preempt_for(self, step: StepPlan, newcomer: Sequence) -> bool:
        """Preempt the sequences that the policy gives up for a waiting one; whether it can be admitted now."""
        memory = self._memory
        # Beams are never settled, but newcomers preempt them only so often, too: else a stream of these starves beams.
        candidates = [
            each for each in self.running if self._may_preempt(step, each) and each.preemptions < MAX_PREEMPTIONS
        ]
        victims: list[Sequence] = []
        # The other sequences need their next block, or one of them would be preempted in this very plan.
        growth = memory.growth(self.running)
        rows, blocks = self.free_rows, memory.pool.available - self._admission.needs(newcomer) - growth
        while rows < newcomer.group.rows or blocks < 0:
            victim = self._policy.victim_for(newcomer, candidates)
            if victim is None:
                return False  # the sequences that the policy gives up are too few: then none is preempted
            victims.append(victim)
            for each in _members(victim):
                candidates.remove(each)
                rows += each.group.reserved or 1
                blocks += memory.held(each) + memory.growth([each])
        if not victims and self._policy.victim_for(newcomer, candidates) is None:
            return False  # it fits but for the watermark, and no running sequence may be put at risk for it
        for victim in victims:
            self._preempt(step, victim)
        # Blocks that a victim shared are still held.
        return self._admission.needs(newcomer) + memory.growth(self.running) <= memory.pool.available

    def grow(self, step: StepPlan, sequence: Sequence, length: int) -> bool:
        """Let a sequence write up to `length`, the end of its next slice; this may preempt it or those behind it.

        False if the sequence itself was preempted.
        """
        if self._memory.append(step, sequence):
            return True
        self._memory.free_outside_windows(sequence)
        while not self._memory.can_grow(sequence, length):
            # Sequences before it already have a slice in this step, which is never taken back.
            behind = self.running[self.running.index(sequence) :]
            victim = self._policy.victim([each for each in behind if self._may_preempt(step, each)])
            self._preempt(step, victim)
            if victim is sequence:
                return False
        self._memory.grow(step, sequence, length)
        return True

    def may_search(self, step: StepPlan, sequence: Sequence) -> bool:
        """Whether a beam decodes in this step: all beams must be known, and there must be blocks for all of them."""
        group = sequence.group
        if sequence.in_flight:
            return False
        if self._fitting == (step, group):
            return True  # found for its first beam: nothing is planned between one beam and the next
        # Beams before it have their slice of this step already, and with it the block for their token.
        together = [each for each in group.members if not each.in_flight]
        while self._memory.growth(together) > self._memory.pool.available:
            behind = self.running[self.running.index(together[-1]) + 1 :]
            others = [each for each in behind if self._may_preempt(step, each)]
            self._preempt(step, self._policy.victim(others) if others else sequence)
            if not others:
                return False
        self._fitting = step, group
        return True

    def _may_preempt(self, step: StepPlan, sequence: Sequence) -> bool:
        """Excludes sequences with reserved memory and sequences that this plan admits or resumes."""
        return not sequence.is_settled and not (step.placed and sequence in step.placed)

    def _preempt(self, step: StepPlan, victim: Sequence) -> None:
        """Preempt the whole group of a sequence; it waits again with the rank it had."""
        group = victim.group
        group.drop_candidates()
        members = _members(victim)
        for each in members:
            self.remove(each)
            self._memory.preempt(step, each)
            each.phase = Phase.WAITING
            each.preemptions += 1
            step.preempted.append(each)
            self._counters.preemptions += 1
        self._waiting.push(members[0], 0.0)

    def check(self, running: list[Sequence]) -> None:
        """Check that every row belongs to one sequence or is free."""
        assert {id(sequence) for sequence in running} == {id(sequence) for sequence in self.running}
        assert self.running == sorted(self.running, key=_by_rank)
        assert self.free_rows + sum(sequence.group.reserved or 1 for sequence in running) == self._total
        rows = [sequence.row for sequence in running]
        assert sorted(rows + self._rows) == list(range(self._total))


def _members(sequence: Sequence) -> list[Sequence]:
    """Return the members of a sequence's group in rank order."""
    members = sequence.group.members
    return sorted(members, key=_by_rank) if len(members) > 1 else list(members)
