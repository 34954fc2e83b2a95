"""Memory: which sequence gets which blocks, and what it must find free to get a seat."""

from __future__ import annotations

from collections.abc import Iterable

from chairlift.core.blocks import BlockPool
from chairlift.core.plan import StepPlan
from chairlift.core.preemption import Preemption, Recompute
from chairlift.core.request import Phase, Sequence
from chairlift.core.watermark import Watermark

# One that has yielded so often gets all the memory it can ever need when it next runs, and yields no more.
_YIELDS = 3


class Memory:
    """The blocks on the device, those that wait in host memory, and what admission leaves free for those who run."""

    def __init__(self, pool: BlockPool, preemption: Preemption | None = None) -> None:
        self.pool = pool
        self.watermark = Watermark(pool.total)
        self.preemption = preemption or Recompute()

    # ---- questions

    def needs(self, sequence: Sequence) -> int:
        """Blocks that a waiting sequence takes with its seat."""
        return self.pool.blocks_for(self._claim(sequence))

    def growth(self, sequence: Sequence) -> int:
        """Blocks that a running sequence takes for its next token."""
        return self.pool.missing(sequence.table, min(sequence.length, sequence.limit))

    def is_settled(self, sequence: Sequence) -> bool:
        """Whether it has yielded often enough."""
        return sequence.preemptions >= _YIELDS

    def has_room(self, sequence: Sequence, is_alone: bool) -> bool:
        """Whether it fits, with the watermark to spare unless nobody runs."""
        spare = 0 if is_alone else self.watermark.blocks
        return self.needs(sequence) + spare <= self.pool.free

    def can_grow(self, sequence: Sequence, length: int) -> bool:
        """Whether it can write up to `length` tokens without anybody having to yield."""
        return self.pool.missing(sequence.table, length) <= self.pool.free

    # ---- in and out

    def seat(self, step: StepPlan, sequence: Sequence) -> None:
        """All blocks of what is known at once: a prompt under way never has to wait for memory."""
        self.pool.grow(sequence.table, self._claim(sequence))
        step.restored += self.preemption.come_back(sequence)

    def grow(self, step: StepPlan, sequence: Sequence, length: int) -> None:
        """Let it write up to `length` tokens."""
        copy = self.pool.grow(sequence.table, length)
        if copy:
            step.copies.append(copy)
        step.grown.append(sequence)

    def fork(self, sequence: Sequence, sibling: Sequence) -> None:
        """Give a sibling the same blocks."""
        sibling.computed = sequence.computed
        sibling.table = self.pool.fork(sequence.table, sequence.computed)

    def yield_all(self, step: StepPlan, victim: Sequence) -> None:
        """It gives up its blocks and will come back."""
        step.saved += self.preemption.leave(victim, self.pool)

    def end(self, sequence: Sequence) -> None:
        """It gives up all it has, here and in host memory."""
        if sequence.phase is Phase.RUNNING:
            self.pool.release(sequence.table)
        else:
            self.preemption.forget(sequence)

    def drop_saved(self, step: StepPlan) -> None:
        """What the plan wanted to save was not, or may not have been."""
        for sequence in step.preempted:
            if sequence.phase is Phase.WAITING:
                self.preemption.forget(sequence)
        step.saved.clear()

    def check(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Prove that every block is accounted for."""
        assert all(not sequence.table.blocks for sequence in waiting)
        assert all(not sequence.saved.blocks for sequence in running)
        self.pool.check(sequence.table for sequence in running)
        self.preemption.check(waiting)

    def _claim(self, sequence: Sequence) -> int:
        """Tokens it must have room for: what is known, or all it can become if it has yielded too often.

        Not before it forks: siblings share its blocks, and none may share one that another is yet to write.
        """
        return sequence.limit if self.is_settled(sequence) and sequence.is_forked else len(sequence.tokens)
