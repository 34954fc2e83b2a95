"""How a preempted sequence gets its KV back: recompute it, or swap it to host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from chairlift.core.blocks import BlockPool
from chairlift.core.cost import Cost
from chairlift.core.request import Sequence
from chairlift.core.step import Moves


class Preemption(Protocol):
    """Frees a running sequence's blocks so that it can run again later."""

    def leave(self, sequence: Sequence, pool: BlockPool) -> Moves:
        """Free its blocks and set `computed` to the tokens whose KV is kept; return the blocks to swap out."""
        ...

    def resume(self, sequence: Sequence) -> Moves:
        """Return the blocks to swap in, for a sequence that has been allocated blocks again."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Free the host blocks of a sequence that will not use them."""
        ...

    def check(self, waiting: Iterable[Sequence]) -> None:
        """Check that host blocks match the swapped-out sequences."""
        ...


class Recompute:
    """Drop the KV; the prompt and the answer so far are computed again as one prompt."""

    def leave(self, sequence: Sequence, pool: BlockPool) -> Moves:
        """Free all blocks; nothing is kept."""
        pool.release(sequence.table)
        sequence.computed = 0
        return []

    def resume(self, sequence: Sequence) -> Moves:
        """Return no blocks."""
        return []

    def forget(self, sequence: Sequence) -> None:
        """Do nothing: there are no host blocks."""

    def check(self, waiting: Iterable[Sequence]) -> None:
        """Check that no sequence has host blocks."""
        assert not any(sequence.saved.blocks for sequence in waiting)


class Swap(Recompute):
    """Swap blocks to host memory and back; KV that does not fit there is recomputed."""

    def __init__(self, host: BlockPool) -> None:
        self.host = host

    def leave(self, sequence: Sequence, pool: BlockPool) -> Moves:
        """Swap out as many of its first blocks as host memory has room for."""
        used = pool.blocks_for(sequence.computed)
        count = min(used, self.host.available)
        if count:
            self.host.grow(sequence.saved, count * pool.block_size)
        moves = list(zip(sequence.table.blocks[:count], sequence.saved.blocks, strict=True))
        computed = min(sequence.computed, count * pool.block_size)
        super().leave(sequence, pool)
        sequence.computed = computed
        return moves

    def resume(self, sequence: Sequence) -> Moves:
        """Swap all its host blocks into its first blocks."""
        saved = sequence.saved.blocks
        # Fewer than were saved, if drafts were rejected since.
        moves = list(zip(saved, sequence.table.blocks, strict=False))
        self.host.release(sequence.saved)
        return moves

    def forget(self, sequence: Sequence) -> None:
        """Free its host blocks."""
        self.host.release(sequence.saved)
        sequence.computed = 0

    def check(self, waiting: Iterable[Sequence]) -> None:
        """Check that host blocks match the swapped-out sequences and hold the tokens that count as computed."""
        waiting = list(waiting)
        self.host.check(sequence.saved for sequence in waiting)
        for sequence in waiting:
            assert sequence.computed <= len(sequence.saved.blocks) * self.host.block_size


class Cheapest(Swap):
    """Swap or recompute, whichever the cost model expects to be faster."""

    def __init__(self, host: BlockPool, cost: Cost) -> None:
        super().__init__(host)
        self._cost = cost

    def leave(self, sequence: Sequence, pool: BlockPool) -> Moves:
        """Swap out if two copies take less time than another prefill."""
        moving = 2 * self._cost.block_copy * min(pool.blocks_for(sequence.computed), self.host.available)
        # A recomputed prompt shares its steps with other sequences, so their fixed time is not its own.
        again = self._cost.prompt_seconds(sequence.computed) - self._cost.fixed
        return super().leave(sequence, pool) if moving < again else Recompute.leave(self, sequence, pool)


PREEMPTIONS: dict[str, Callable[[BlockPool, Cost], Preemption]] = {
    "recompute": lambda host, cost: Recompute(),
    "swap": lambda host, cost: Swap(host),
    "auto": Cheapest,
}
