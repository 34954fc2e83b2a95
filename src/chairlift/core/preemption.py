"""How a preempted sequence gets its KV back: recompute it, or swap it to host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from chairlift.core.blocks import BlockPool, BlockTable
from chairlift.core.cost import Cost
from chairlift.core.request import Sequence
from chairlift.core.step import Moves


class Preemption(Protocol):
    """Frees a running sequence's blocks so that it can run again later."""

    def leave(self, sequence: Sequence, pool: BlockPool) -> Moves:
        """Free its blocks and set `computed` to the tokens with KV that is kept; return the blocks to swap out."""
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
        release_all(pool, sequence)
        sequence.computed = 0
        return []

    def resume(self, sequence: Sequence) -> Moves:
        """Return no blocks."""
        return []

    def forget(self, sequence: Sequence) -> None:
        """Do nothing: there are no host blocks."""

    def check(self, waiting: Iterable[Sequence]) -> None:
        """Check that no sequence has host blocks."""
        assert not any(sequence.saved for sequence in waiting)


class Swap(Recompute):
    """Swap blocks to host memory and back; KV that does not fit there is recomputed."""

    def __init__(self, host: BlockPool) -> None:
        self.host = host

    def leave(self, sequence: Sequence, pool: BlockPool) -> Moves:
        """Swap out its blocks; if host memory has room for fewer, its first blocks, or none if it has a window."""
        tables, used = sequence.tables, pool.blocks_for(sequence.computed)
        if _live(tables, used) > self.host.available:
            # The first blocks are of use without the others only if none of the first is freed.
            used = self.host.available if len(tables) == 1 and not tables[0].freed else 0
        if not used:
            return Recompute.leave(self, sequence, pool)
        moves: Moves = []
        for table in tables:
            saved = BlockTable()
            self.host.skip(saved, table.freed)
            self.host.grow(saved, used * pool.block_size)
            moves += zip(table.blocks[table.freed : used], saved.blocks[table.freed :], strict=True)
            sequence.saved.append(saved)
        computed = min(sequence.computed, used * pool.block_size)
        super().leave(sequence, pool)
        sequence.computed = computed
        return moves

    def resume(self, sequence: Sequence) -> Moves:
        """Swap its host blocks into its first blocks."""
        moves: Moves = []
        for saved, table in zip(sequence.saved, sequence.tables, strict=True):
            # Fewer than were saved, if drafts were rejected since.
            moves += list(zip(saved.blocks, table.blocks, strict=False))[max(saved.freed, table.freed) :]
        self._release(sequence)
        return moves

    def forget(self, sequence: Sequence) -> None:
        """Free its host blocks."""
        self._release(sequence)
        sequence.computed = 0

    def _release(self, sequence: Sequence) -> None:
        for saved in sequence.saved:
            self.host.release(saved)
        sequence.saved = []

    def check(self, waiting: Iterable[Sequence]) -> None:
        """Check that host blocks match the swapped-out sequences and hold the tokens that count as computed."""
        waiting = list(waiting)
        self.host.check(saved for sequence in waiting for saved in sequence.saved)
        for sequence in waiting:
            assert sequence.computed <= min((len(saved.blocks) for saved in sequence.saved), default=0) * (
                self.host.block_size
            )


class Cheapest(Swap):
    """Swap or recompute, whichever the cost model expects to be faster."""

    def __init__(self, host: BlockPool, cost: Cost) -> None:
        super().__init__(host)
        self._cost = cost

    def leave(self, sequence: Sequence, pool: BlockPool) -> Moves:
        """Swap out if two copies take less time than another prefill."""
        blocks = _live(sequence.tables, pool.blocks_for(sequence.computed))
        moving = 2 * self._cost.block_copy * min(blocks, self.host.available)
        # A recomputed prompt shares its steps with other sequences, so their fixed time is not its own.
        again = self._cost.prompt_seconds(sequence.computed) - self._cost.fixed
        return super().leave(sequence, pool) if moving < again else Recompute.leave(self, sequence, pool)


def release_all(pool: BlockPool, sequence: Sequence) -> None:
    """Release the blocks of a sequence, those of the first group last: they are evicted last, and others need them."""
    for table in reversed(sequence.tables):
        pool.release(table)


def _live(tables: list[BlockTable], used: int) -> int:
    """Return the number of blocks, of the first `used` of each table, that are not freed."""
    return sum(used - table.freed for table in tables)


PREEMPTIONS: dict[str, Callable[[BlockPool, Cost], Preemption]] = {
    "recompute": lambda host, cost: Recompute(),
    "swap": lambda host, cost: Swap(host),
    "auto": Cheapest,
}
