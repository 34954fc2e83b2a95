"""The waiting line: a heap in the policy's order, whose cost per step does not depend on its length."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from chairlift.core.request import Phase, Sequence


class WaitingQueue:
    """Sequences by rank. One that leaves from the middle stays in the heap as a dead entry until it surfaces."""

    def __init__(self) -> None:
        # Ranks are unique among those waiting, so that the sequence itself is never compared.
        self._heap: list[tuple[tuple[float, int, int], Sequence]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, in no order."""
        return (sequence for _, sequence in self._heap if sequence.phase is Phase.WAITING)

    def push(self, sequence: Sequence) -> None:
        """Join at the place that the rank gives."""
        heappush(self._heap, (sequence.rank, sequence))
        self._size += 1

    def peek(self) -> Sequence:
        """The first in line; the queue must not be empty."""
        heap = self._heap
        while heap[0][1].phase is not Phase.WAITING:
            heappop(heap)
        return heap[0][1]

    def pop(self) -> Sequence:
        """Take the first in line."""
        sequence = self.peek()
        heappop(self._heap)
        self._size -= 1
        return sequence

    def forget(self, count: int) -> None:
        """Count `count` sequences out that have left the waiting phase without being popped."""
        self._size -= count
        if len(self._heap) > 64 and self._size < len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[1].phase is Phase.WAITING]
            heapify(self._heap)
