"""Which cached block goes first: the engine's rule and its rivals, behind the calls that a block pool would make.

All of them must evict leaves: a block is of no use without those before it. Each does so without a search, because a
block's prefix is used whenever the block is. Whatever only rises with each use, such as the time of the last one or the
number of them, is never lower for a parent than for its child; among equals, the one let go first, which is the deeper,
goes first. Queues in the order of arrival (FIFO, CLOCK, S3-FIFO) cannot be used like this: parents arrive first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import exp, inf, log2
from typing import Protocol

_REMEMBERED = 8  # evicted blocks whose uses are remembered, for each block of the cache
_PULL = 8.0  # by how much the usual gap can grow, as a power of e, while as many blocks are used as the cache has
_STALE = 1000  # entries of a heap that may be out of date beside as many as are not


class Eviction(Protocol):
    """What a block pool says to the rule that chooses, and the one thing it asks."""

    def keep(self, block: int, content: int) -> None:
        """A block was filled; `content` stands for its tokens and all before them. (`BlockPool.keep`)"""

    def use(self, blocks: Sequence[int]) -> None:
        """A table lets these go, a path from the root; others may hold them still. (`BlockPool.release`)"""

    def add(self, block: int) -> None:
        """Nobody holds it any more; children come before their parents. (`BlockPool.release`)"""

    def remove(self, block: int) -> None:
        """Somebody holds it again, or it is forgotten. (`BlockPool.share`, `BlockPool.forget`)"""

    def pop(self) -> int:
        """Choose one that nobody holds, a leaf, and give it up. (`BlockPool.grow`)"""


class LRU:
    """The one let go longest ago: what the engine does."""

    def __init__(self, size: int) -> None:
        self._queue: OrderedDict[int, None] = OrderedDict()

    def keep(self, block: int, content: int) -> None:
        """Nothing to note."""

    def use(self, blocks: Sequence[int]) -> None:
        """Nothing to note."""

    def add(self, block: int) -> None:
        self._queue[block] = None

    def remove(self, block: int) -> None:
        del self._queue[block]

    def pop(self) -> int:
        return self._queue.popitem(last=False)[0]


class Segmented(LRU):
    """Two such queues (SLRU): a hit moves a block to the second, up to a quarter of all; its oldest fall back."""

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
    """The one of the lowest rank, in O(log n); a rank never falls, nor is it lower than that of a block behind it."""

    def __init__(self, size: int) -> None:
        self._time = 0  # requests so far
        self._rank: dict[int, float] = {}
        self._idle: dict[int, tuple[float, int, int]] = {}  # by block: its rank, when it was let go, itself
        self._heap: list[tuple[float, int, int]] = []  # all of those, and some that are out of date
        self._moves = 0

    @abstractmethod
    def use(self, blocks: Sequence[int]) -> None:
        """Give them their ranks."""

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
    """A rank that depends on how often a block was used, and when before.

    Uses from before an eviction count, too: of blocks that went, it remembers eight for each block of the cache.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._past: dict[int, tuple[int, int]] = {}  # by block: how often it was used, when last
        self._content: dict[int, int] = {}
        self._gone: OrderedDict[int, tuple[int, int]] = OrderedDict()  # the past of evicted ones, by content
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
        """The rank of a block used so often, and before this use then, at least."""


class LRU2(Counted):
    """The one whose last use but one is longest ago; those used once go before all others."""

    def worth(self, uses: int, before: int) -> float:
        return before if uses > 1 else self._time - 1e9


class AgedLFU(Counted):
    """The one used least, counted from the last evicted's rank on, so that old fame fades (LFU, dynamic aging)."""

    _level = 0.0

    def worth(self, uses: int, before: int) -> float:
        return self._level + uses

    def pop(self) -> int:
        block = super().pop()
        self._level = max(self._level, self._rank[block])
        return block


class SmallFirst(AgedLFU):
    """The same, where a use counts less the more blocks its request had to add (GDSF): long texts seldom return."""

    _weight = 1.0

    def use(self, blocks: Sequence[int]) -> None:
        added = sum(not self._past[block][0] for block in blocks)
        self._weight = max(1, added) ** -0.5
        super().use(blocks)

    def worth(self, uses: int, before: int) -> float:
        return self._level + uses * self._weight


class UsualGap(Counted):
    """LRU, but each time its uses double, a block stays as much longer as usually passes between two uses.

    What is usual is the median, followed as requests come; time is counted in requests.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._gap = 1.0
        self._pull = _PULL / size

    def use(self, blocks: Sequence[int]) -> None:
        edge = self._time + 1 - self._gap
        past = [self._past[block] for block in blocks]
        pull = sum(1 if last < edge else -1 for uses, last in past if uses)  # a median has as many above as below
        self._gap = max(1.0, self._gap * exp(self._pull * pull))
        super().use(blocks)

    def worth(self, uses: int, before: int) -> float:
        return self._time + self._gap * log2(uses)


class Clairvoyant(Ranked):
    """The one whose next use is farthest ahead: it is told all of them."""

    def __init__(self, next_uses: Iterable[Sequence[float]]) -> None:
        super().__init__(0)
        self._next_uses = iter(next_uses)

    def use(self, blocks: Sequence[int]) -> None:
        for block, when in zip(blocks, next(self._next_uses), strict=True):
            self._rank[block] = -when


RIVALS: dict[str, Callable[[int], Eviction]] = {
    "SLRU": Segmented,
    "LRU-2": LRU2,
    "LFU, aged": AgedLFU,
    "GDSF": SmallFirst,
    "usual gap": UsualGap,
}
