"""How a sequence that must yield gives up its blocks, and what it costs to come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from chairlift.core.blocks import BlockPool
from chairlift.core.request import Sequence


class Preemption(Protocol):
    """Frees a running sequence's blocks so that it can run again later."""

    def preempt(self, sequence: Sequence, pool: BlockPool) -> None:
        """Release the blocks and set `computed` to what survives."""
        ...


class Recompute:
    """Forget the keys and values; prompt and answer so far are computed again as one prompt."""

    def preempt(self, sequence: Sequence, pool: BlockPool) -> None:
        """Nothing survives."""
        pool.release(sequence.table)
        sequence.computed = 0


PREEMPTIONS: dict[str, Callable[[], Preemption]] = {"recompute": Recompute}
