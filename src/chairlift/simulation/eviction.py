"""Eviction rules: the engine's (LRU) and others, behind the calls that a block pool would make.

All rules must evict leaves, since a block is useless without its prefix. They need no search for leaves, because every
use of a block is a use of its prefix: a rank that only rises with each use, such as the time of the last use or the
number of uses, is never lower for a parent than for its child; of equal ranks the block released first, which is the
deeper one, is evicted first. Queues in order of arrival (FIFO, CLOCK, S3-FIFO) do not work: parents arrive first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import exp, inf, log2
from typing import Protocol

_REMEMBERED = 8  # evicted blocks with a remembered history, per block of the cache
_PULL = 8.0  # largest growth of the usual gap, as a power of e, while as many blocks are used as the cache has
_STALE = 1000  # outdated heap entries allowed, beyond as many as there are valid ones


class Eviction(Protocol):
    """An eviction rule, as a block pool would call it."""

    def keep(self, block: int, content: int) -> None:
        """Note a filled block; `content` identifies its tokens and all earlier ones. (`BlockPool.keep`)"""

    def use(self, blocks: Sequence[int]) -> None:
        """Note a use of a path from the root, when its table is released. (`BlockPool.release`)"""

    def add(self, block: int) -> None:
        """Make a block evictable, now unreferenced; children are added before their parents. (`BlockPool.release`)"""

    def remove(self, block: int) -> None:
        """Make a block not evictable: referenced again, or dropped. (`BlockPool.share`, `BlockPool.forget`)"""

    def pop(self) -> int:
        """Evict and return an unreferenced leaf. (`BlockPool.grow`)"""


class LRU:
    """Evicts the least recently released block, as the engine does."""

    def __init__(self, size: int) -> None:
        self._queue: OrderedDict[int, None] = OrderedDict()

    def keep(self, block: int, content: int) -> None:
        """Do nothing."""

    def use(self, blocks: Sequence[int]) -> None:
        """Do nothing."""

    def add(self, block: int) -> None:
        self._queue[block] = None

    def remove(self, block: int) -> None:
        del self._queue[block]

    def pop(self) -> int:
        return self._queue.popitem(last=False)[0]


class Segmented(LRU):
    """Two LRU queues (SLRU): a hit moves a block to the protected one, a quarter of the cache; its oldest move back."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._most = size // 4
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._hit: set[int] = set()

    def keep(self, block: int, content: int) -> None:
        self._hit.discard(block)

    def add(self, block: int) -> None:
        if block not in self._hit:
            return super().add(block)
        self._protected[block] = None
        if len(self._protected) > self._most:
            super().add(self._protected.popitem(last=False)[0])
        return None

    def remove(self, block: int) -> None:
        del (self._protected if block in self._protected else self._queue)[block]
        self._hit.add(block)

    def pop(self) -> int:
        return super().pop() if self._queue else self._protected.popitem(last=False)[0]


class Ranked(ABC):
    """Evicts the block with the lowest rank, in O(log n); ranks never fall, and no child's is above its parent's."""

    def __init__(self, size: int) -> None:
        self._time = 0  # requests so far
        self._rank: dict[int, float] = {}
        self._idle: dict[int, tuple[float, int, int]] = {}  # by block: rank, release order, block
        self._heap: list[tuple[float, int, int]] = []  # all of _idle, and outdated entries
        self._moves = 0

    @abstractmethod
    def use(self, blocks: Sequence[int]) -> None:
        """Update the ranks of a path."""

    def keep(self, block: int, content: int) -> None:
        self._rank[block] = -inf

    def add(self, block: int) -> None:
        self._moves += 1
        entry = self._idle[block] = (self._rank[block], self._moves, block)
        heappush(self._heap, entry)

    def remove(self, block: int) -> None:
        del self._idle[block]
        if len(self._heap) > 2 * len(self._idle) + _STALE:
            self._heap = list(self._idle.values())
            heapify(self._heap)

    def pop(self) -> int:
        while True:
            entry = heappop(self._heap)
            if self._idle.get(entry[2]) is entry:
                del self._idle[entry[2]]
                return entry[2]


class Counted(Ranked):
    """Ranks by the number of uses and the time of the previous use.

    Uses before an eviction count too: for each block of the cache, the history of eight evicted ones is remembered.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._past: dict[int, tuple[int, int]] = {}  # by block: number of uses, time of the last
        self._content: dict[int, int] = {}
        self._gone: OrderedDict[int, tuple[int, int]] = OrderedDict()  # history of evicted blocks, by content
        self._most_gone = _REMEMBERED * size

    def keep(self, block: int, content: int) -> None:
        super().keep(block, content)
        self._content[block] = content
        self._past[block] = self._gone.pop(content, (0, 0))

    def pop(self) -> int:
        block = super().pop()
        self._gone[self._content[block]] = self._past[block]
        if len(self._gone) > self._most_gone:
            self._gone.popitem(last=False)
        return block

    def use(self, blocks: Sequence[int]) -> None:
        self._time += 1
        highest, rank = -inf, self._rank
        for block in reversed(blocks):
            uses, last = self._past[block]
            self._past[block] = uses + 1, self._time
            highest = rank[block] = max(highest, rank[block], self.worth(uses + 1, last))

    @abstractmethod
    def worth(self, uses: int, before: int) -> float:
        """Return the least rank of a block with this many uses, the one before last at time `before`."""


class LRU2(Counted):
    """Evicts the block with the oldest last use but one; blocks used once go first."""

    def worth(self, uses: int, before: int) -> float:
        return before if uses > 1 else self._time - 1e9


class AgedLFU(Counted):
    """Evicts the least used block, counting from the last eviction's rank, so that old uses fade (dynamic aging)."""

    _level = 0.0

    def worth(self, uses: int, before: int) -> float:
        return self._level + uses

    def pop(self) -> int:
        block = super().pop()
        self._level = max(self._level, self._rank[block])
        return block


class SmallFirst(AgedLFU):
    """Aged LFU with less weight per use the more blocks its request inserted (GDSF): long texts seldom repeat."""

    _weight = 1.0

    def use(self, blocks: Sequence[int]) -> None:
        added = sum(not self._past[block][0] for block in blocks)
        self._weight = max(1, added) ** -0.5
        super().use(blocks)

    def worth(self, uses: int, before: int) -> float:
        return self._level + uses * self._weight


class UsualGap(Counted):
    """LRU, but each doubling of its uses keeps a block longer by the usual time between two uses.

    The usual time is a running median; time is counted in requests.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._gap = 1.0
        self._pull = _PULL / size

    def use(self, blocks: Sequence[int]) -> None:
        edge = self._time + 1 - self._gap
        past = [self._past[block] for block in blocks]
        # Positive if more gaps are above the median estimate than below.
        pull = sum(1 if last < edge else -1 for uses, last in past if uses)
        self._gap = max(1.0, self._gap * exp(self._pull * pull))
        super().use(blocks)

    def worth(self, uses: int, before: int) -> float:
        return self._time + self._gap * log2(uses)


class Clairvoyant(Ranked):
    """Evicts the block with the farthest next use, from a list of all uses."""

    def __init__(self, next_uses: Iterable[Sequence[float]]) -> None:
        super().__init__(0)
        self._next_uses = iter(next_uses)

    def use(self, blocks: Sequence[int]) -> None:
        for block, when in zip(blocks, next(self._next_uses), strict=True):
            self._rank[block] = -when


RULES: dict[str, Callable[[int], Eviction]] = {
    "SLRU": Segmented,
    "LRU-2": LRU2,
    "LFU, aged": AgedLFU,
    "GDSF": SmallFirst,
    "usual gap": UsualGap,
}
