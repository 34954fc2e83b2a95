"""Seats: who is in the batch, who gives up a seat and its memory, and to whom."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from chairlift.core.counters import Counters
from chairlift.core.memory import YIELDS, Memory
from chairlift.core.plan import StepPlan
from chairlift.core.policy import Policy
from chairlift.core.queue import WaitingQueue
from chairlift.core.request import Phase, Search, Sequence

_by_rank = attrgetter("rank")


class Seats:
    """The batch: a seat, a row and blocks for each who runs."""

    def __init__(self, count: int, memory: Memory, policy: Policy, waiting: WaitingQueue, counters: Counters) -> None:
        self.running: list[Sequence] = []  # in rank order
        self.free = count
        self._count = count
        self._rows = list(range(count - 1, -1, -1))
        self._memory = memory
        self._policy = policy
        self._waiting = waiting
        self._counters = counters
        self._roomy: tuple[StepPlan, Search] | None = None  # the plan, and the search in it that has room for all beams

    def obstacle(self, sequence: Sequence) -> str:
        """What keeps a waiting sequence from a seat."""
        if sequence.seats > self.free:
            return "seats"
        return "" if self._memory.has_room(sequence, not self.running) else "blocks"

    def take(self, step: StepPlan, sequence: Sequence, now: float) -> None:
        """Seat the first in line with its followers; it has seats for all its siblings to come."""
        self._waiting.take(sequence)
        self.free -= sequence.seats
        group, sequence.followers = sequence.group, []
        for each in group:
            self._memory.seat(step, each)
            if each.started is None:
                each.cached = each.computed
                self._counters.prompt_tokens += each.prompt_length
                self._counters.cached_tokens += each.cached
            self.place(step, each, now)

    def place(self, step: StepPlan, sequence: Sequence, now: float | None) -> None:
        """Give one a row that has its seat already."""
        sequence.phase = Phase.RUNNING
        if sequence.started is None:
            sequence.started = now
        sequence.row = self._rows.pop()
        insort(self.running, sequence, key=_by_rank)
        step.placed.append(sequence)
        self._policy.seated(sequence)

    def leave(self, sequence: Sequence) -> None:
        """It gets up, for good or to come back."""
        self.running.remove(sequence)
        self.free += sequence.seats
        self._rows.append(sequence.row)
        sequence.row = -1
        sequence.decode_until = 0
        self._policy.unseated(sequence)

    # ---- who yields

    def make_way(self, step: StepPlan, newcomer: Sequence) -> bool:
        """Where the policy wants it, those who run yield to one who waits; whether it can sit down now."""
        memory = self._memory
        # Beams are never settled, but newcomers preempt them only so often, too: else a stream of these starves beams.
        may_yield = [each for each in self.running if self._may_yield(step, each) and each.preemptions < YIELDS]
        victims: list[Sequence] = []
        # Those who go on must find their next block, or one of them would have to yield in this very plan.
        growth = sum(map(memory.growth, self.running))
        seats, blocks = self.free, memory.pool.available - memory.needs(newcomer) - growth
        while seats < newcomer.seats or blocks < 0:
            victim = self._policy.yields_to(newcomer, may_yield)
            if victim is None:
                return False  # all who would yield are too few: then nobody does
            victims.append(victim)
            for each in _together(victim):
                may_yield.remove(each)
                seats += each.seats
                blocks += len(each.table.blocks) + memory.growth(each)
        if not victims and self._policy.yields_to(newcomer, may_yield) is None:
            return False  # there is room but for the watermark, and nobody whom the newcomer may put at risk
        for victim in victims:
            self._preempt(step, victim)
        # They may have shared blocks with others, who keep them.
        return memory.needs(newcomer) + sum(map(memory.growth, self.running)) <= memory.pool.available

    def make_room(self, step: StepPlan, sequence: Sequence, length: int) -> bool:
        """Let a sequence write up to `length`, its next token, at the cost of those behind it; False if it yielded."""
        self._memory.shed(sequence)
        if self._memory.append(step, sequence):
            return True
        while not self._memory.can_grow(sequence, length):
            # Not those before it: they have slices in this step, and a plan should never have to be taken apart.
            behind = self.running[self.running.index(sequence) :]
            victim = self._policy.victim([each for each in behind if self._may_yield(step, each)])
            self._preempt(step, victim)
            if victim is sequence:
                return False
        self._memory.grow(step, sequence, length)
        return True

    def may_search(self, step: StepPlan, sequence: Sequence, beams: Search) -> bool:
        """Whether a beam goes on in this step: not while others have yet to offer, nor without room for all of them."""
        if sequence.in_flight:
            return False
        if self._roomy == (step, beams):
            return True  # found for the first of them: nothing is planned between one beam and the next
        # Those before it have their slice of this step already, and with it the room for its token.
        together = [each for each in beams.members if not each.in_flight]
        while sum(map(self._memory.growth, together)) > self._memory.pool.available:
            behind = self.running[self.running.index(together[-1]) + 1 :]
            others = [each for each in behind if self._may_yield(step, each)]
            self._preempt(step, self._policy.victim(others) if others else sequence)
            if not others:
                return False
        self._roomy = step, beams
        return True

    def _may_yield(self, step: StepPlan, sequence: Sequence) -> bool:
        """Not those that have their memory for good, nor one that this very plan brings back: it is not there yet."""
        return not self._memory.is_settled(sequence) and not (step.placed and sequence in step.placed)

    def _preempt(self, step: StepPlan, victim: Sequence) -> None:
        """Take a sequence's seat and blocks; those of all its beams, which are preempted and resumed as one."""
        if victim.beams is not None:
            victim.beams.withdraw()
        group = _together(victim)
        for each in group:
            self.leave(each)
            self._memory.yield_all(step, each)
            each.phase = Phase.WAITING
            each.preemptions += 1
            step.preempted.append(each)
            self._counters.preemptions += 1
        group[0].followers = group[1:]
        self._waiting.push(group[0], 0.0)  # with the rank it had: it keeps its place in the queue

    def check(self, running: list[Sequence]) -> None:
        """Prove that every seat and every row is taken once or free."""
        assert {id(sequence) for sequence in running} == {id(sequence) for sequence in self.running}
        assert self.running == sorted(self.running, key=_by_rank)
        assert self.free + sum(sequence.seats for sequence in running) == self._count
        rows = [sequence.row for sequence in running]
        assert sorted(rows + self._rows) == list(range(self._count))


def _together(sequence: Sequence) -> list[Sequence]:
    """The running sequences that are preempted as one: all beams of a search, or a sequence alone."""
    return [sequence] if sequence.beams is None else sorted(sequence.beams.members, key=_by_rank)
