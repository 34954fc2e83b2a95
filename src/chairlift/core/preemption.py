"""How a sequence that must yield gives up its blocks, and what it costs to come back."""

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
        """Release the blocks and set `computed` to what survives; the blocks to save in host memory."""
        ...

    def come_back(self, sequence: Sequence) -> Moves:
        """It has blocks again: those to bring back from host memory."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Whatever was saved of it is of no use any more."""
        ...

    def check(self, away: Iterable[Sequence]) -> None:
        """Prove that those who are away hold exactly what is held for them."""
        ...


class Recompute:
    """Forget the keys and values; prompt and answer so far are computed again as one prompt."""

    def leave(self, sequence: Sequence, pool: BlockPool) -> Moves:
        """Nothing survives."""
        pool.release(sequence.table)
        sequence.computed = 0
        return []

    def come_back(self, sequence: Sequence) -> Moves:
        """There is nothing to bring."""
        return []

    def forget(self, sequence: Sequence) -> None:
        """There is nothing to forget."""

    def check(self, away: Iterable[Sequence]) -> None:
        """Nobody has anything saved."""
        assert not any(sequence.saved.blocks for sequence in away)


class Swap(Recompute):
    """Copy the blocks to host memory and back; what does not fit there is computed again."""

    def __init__(self, host: BlockPool) -> None:
        self.host = host

    def leave(self, sequence: Sequence, pool: BlockPool) -> Moves:
        """As many of its first blocks survive as the host has room for."""
        used = pool.blocks_for(sequence.computed)
        count = min(used, self.host.available)
        if count:
            self.host.grow(sequence.saved, count * pool.block_size)
        moves = list(zip(sequence.table.blocks[:count], sequence.saved.blocks, strict=True))
        computed = min(sequence.computed, count * pool.block_size)
        super().leave(sequence, pool)
        sequence.computed = computed
        return moves

    def come_back(self, sequence: Sequence) -> Moves:
        """All that was saved, into its first blocks."""
        saved = sequence.saved.blocks
        # Fewer than were saved, if drafts were rejected since.
        moves = list(zip(saved, sequence.table.blocks, strict=False))
        self.host.release(sequence.saved)
        return moves

    def forget(self, sequence: Sequence) -> None:
        """Its host blocks are free."""
        self.host.release(sequence.saved)
        sequence.computed = 0

    def check(self, away: Iterable[Sequence]) -> None:
        """The host's blocks are accounted for, and `computed` is no more than what they hold."""
        away = list(away)
        self.host.check(sequence.saved for sequence in away)
        for sequence in away:
            assert sequence.computed <= len(sequence.saved.blocks) * self.host.block_size


class Cheapest(Swap):
    """Swap or recompute, by what the cost model expects each to take."""

    def __init__(self, host: BlockPool, cost: Cost) -> None:
        super().__init__(host)
        self._cost = cost

    def leave(self, sequence: Sequence, pool: BlockPool) -> Moves:
        """There and back, or once more through the model."""
        moving = 2 * self._cost.block_copy * min(pool.blocks_for(sequence.computed), self.host.available)
        # What is computed again shares a step with others: its fixed part is not its own.
        again = self._cost.prompt_seconds(sequence.computed) - self._cost.fixed
        return super().leave(sequence, pool) if moving < again else Recompute.leave(self, sequence, pool)


PREEMPTIONS: dict[str, Callable[[BlockPool, Cost], Preemption]] = {
    "recompute": lambda host, cost: Recompute(),
    "swap": lambda host, cost: Swap(host),
    "auto": Cheapest,
}
