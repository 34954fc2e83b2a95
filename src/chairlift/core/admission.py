"""What a waiting sequence must find to get a seat: blocks for what it holds, and some to spare for those who run."""

from __future__ import annotations

from chairlift.core.blocks import BlockPool
from chairlift.core.request import Sequence
from chairlift.core.watermark import Watermark

# One that has yielded so often gets all the memory it can ever need when it next runs, and yields no more.
_YIELDS = 3


class Admission:
    """Counts in blocks, over the pool and the watermark that is left free in it."""

    def __init__(self, pool: BlockPool) -> None:
        self.watermark = Watermark(pool.total)
        self._pool = pool

    def needs(self, sequence: Sequence) -> int:
        """Blocks that it takes with its seat."""
        return self._pool.blocks_for(self.claim(sequence))

    def claim(self, sequence: Sequence) -> int:
        """Tokens it must have room for: what is known, or all it can become if it has yielded too often.

        Not before it forks: siblings share its blocks, and none may share one that another is yet to write.
        """
        return sequence.limit if self.is_settled(sequence) and sequence.is_forked else len(sequence.tokens)

    def growth(self, sequence: Sequence) -> int:
        """Blocks that a running sequence takes for its next token."""
        return self._pool.missing(sequence.table, min(sequence.length, sequence.limit))

    def is_settled(self, sequence: Sequence) -> bool:
        """Whether it has yielded often enough."""
        return sequence.preemptions >= _YIELDS

    def has_room(self, sequence: Sequence, is_alone: bool) -> bool:
        """Whether it fits, with the watermark to spare unless nobody runs."""
        spare = 0 if is_alone else self.watermark.blocks
        return self.needs(sequence) + spare <= self._pool.free
