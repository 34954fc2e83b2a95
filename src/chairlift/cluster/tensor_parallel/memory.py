"""Memory that several processes share: a file without a name, which ends with the last process that has it open."""

from __future__ import annotations

import mmap
import os


def make_memory(size: int) -> int:
    """Return the descriptor of new shared memory, filled with zeros."""
    descriptor = os.memfd_create("chairlift-ranks")
    os.ftruncate(descriptor, size)
    return descriptor


def map_memory(descriptor: int) -> mmap.mmap:
    """Map all of the shared memory."""
    return mmap.mmap(descriptor, os.fstat(descriptor).st_size)


class Board:
    """A counter for each rank, in shared memory: rank 0 sees how far the others have come."""

    def __init__(self, descriptor: int, rank: int) -> None:
        self._counters = memoryview(map_memory(descriptor)).cast("Q")
        self._rank = rank

    @staticmethod
    def size(ranks: int) -> int:
        """Return the bytes of a board."""
        return 8 * ranks

    def advance(self) -> None:
        """Count one operation of this rank."""
        self._counters[self._rank] += 1

    def put(self, rank: int, count: int) -> None:
        """Set the counter of a rank on another host, as it was reported."""
        self._counters[rank] = count

    def read(self) -> list[int]:
        """Return the counters of all ranks."""
        return self._counters.tolist()
