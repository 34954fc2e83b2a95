"""BlockPool and BlockTable: the KV cache's physical blocks, who holds them, and when one must be copied.

A block holds the keys and values of `block_size` consecutive tokens. A table is one sequence's blocks in order. Blocks
are counted, not owned: forks of one prompt hold the same blocks, and a write to a block held twice first copies it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockTable:
    """The blocks of one sequence, in the order of its tokens."""

    __slots__ = ("blocks", "gone", "writable")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        # Positions below this may be written without asking the pool: their block exists and, from the first position
        # not yet written on, is held by this table alone.
        self.writable = 0
        self.gone = 0  # blocks at its front that it has given back: a model with a window sees them no more


class BlockPool:
    """All blocks of the cache: each is free, held by one table or more, or cached.

    A cached block is held by nobody, but what is in it may be of use again: somebody has asked to keep it. It is given
    away when no block is free, the one that was let go first before all others.
    """

    def __init__(self, total: int, block_size: int) -> None:
        self.total = total
        self.block_size = block_size
        self.on_evict: Callable[[int], None] = lambda block: None  # told of a cached block that is given away
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total
        self._is_kept = bytearray(total)
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """How many blocks hold nothing of use."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """How many blocks nobody holds, but may be of use again."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """How many blocks can be had."""
        return len(self._free) + len(self._cached)

    @property
    def owned(self) -> int:
        """How many blocks somebody holds."""
        return self.total - self.available

    def blocks_for(self, length: int) -> int:
        """How many blocks `length` tokens fill."""
        return -(-length // self.block_size)

    def missing(self, table: BlockTable, length: int) -> int:
        """How many blocks it takes to let `table` write up to `length` tokens."""
        if length <= table.writable:
            return 0
        return self.blocks_for(length) - len(table.blocks) + self._tail_is_shared(table)

    def append(self, table: BlockTable) -> bool:
        """One more block: what most decodes ask for. False if none is free, or the last one is shared and not full."""
        if not self._free or table.writable != len(table.blocks) * self.block_size:
            return False
        table.blocks.append(self._take())
        table.writable += self.block_size
        return True

    def grow(self, table: BlockTable, length: int) -> tuple[int, int] | None:
        """Let `table` write up to `length` tokens; the (source, target) blocks to copy first, if one was shared."""
        copy = None
        if self._tail_is_shared(table):
            source, target = table.blocks[-1], self._take()
            self._holders[source] -= 1
            table.blocks[-1] = target
            copy = source, target
        for _ in range(self.blocks_for(length) - len(table.blocks)):
            table.blocks.append(self._take())
        table.writable = len(table.blocks) * self.block_size
        return copy

    def fork(self, table: BlockTable, length: int) -> BlockTable:
        """A second table over the same blocks, of which `length` tokens are written or will be by this step."""
        twin = BlockTable()
        self.share(twin, table.blocks[table.gone :])
        twin.blocks, twin.gone = list(table.blocks), table.gone
        # The tail is shared from now on: unless it is full, both must ask before they write behind `length`.
        table.writable = twin.writable = length
        return twin

    def share(self, table: BlockTable, blocks: list[int]) -> None:
        """Let `table` hold these blocks, too, behind those it has; they are full, or the caller sees to `writable`."""
        holders = self._holders
        for block in blocks:
            if not holders[block]:
                del self._cached[block]
            holders[block] += 1
        table.blocks += blocks
        table.writable = len(table.blocks) * self.block_size

    def release(self, table: BlockTable) -> None:
        """Give back every block of `table`; those that nobody else holds can be had at once."""
        holders, free, kept = self._holders, self._free, self._is_kept
        # The last is the first to go: without it, those before it are still of use.
        for block in reversed(table.blocks[table.gone :]):
            holders[block] -= 1
            if holders[block] == 0:
                if kept[block]:
                    self._cached[block] = None
                else:
                    free.append(block)
        table.blocks = []
        table.writable = table.gone = 0

    def shed(self, table: BlockTable, count: int) -> None:
        """Give back the first `count` blocks of `table`, which keeps its place behind them."""
        for block in table.blocks[table.gone : count]:
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)
        table.gone = max(table.gone, count)

    # ---- what the prefix cache asks

    def is_held(self, block: int) -> bool:
        """Whether any table holds it."""
        return self._holders[block] > 0

    def keep(self, block: int) -> None:
        """When nobody holds it any more, let it be cached instead of free."""
        self._is_kept[block] = True

    def stow(self) -> int:
        """A block whose content is kept though nobody holds it: the last to go."""
        block = self._take()
        self._holders[block] = 0
        self._is_kept[block] = True
        self._cached[block] = None
        return block

    def touch(self, block: int) -> None:
        """If it is cached, it is the last to go from now on."""
        if block in self._cached:
            self._cached.move_to_end(block)

    def forget(self, block: int) -> None:
        """What is in it is of no use any more."""
        self._is_kept[block] = False
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Prove that `tables` hold exactly what the pool thinks is held, and that free + cached + owned = total."""
        held = [0] * self.total
        for table in tables:
            for block in table.blocks[table.gone :]:
                held[block] += 1
        for block in range(self.total) if held != self._holders else ():
            assert held[block] == self._holders[block], (
                f"block {block}: {held[block]} tables hold it, {self._holders[block]} are counted"
            )
        nobody = [block for block, count in enumerate(held) if not count]
        idle = sorted(self._free) + sorted(self._cached)
        assert sorted(idle) == nobody, f"nobody holds {nobody[:20]}, but free or cached are {sorted(idle)[:20]}"
        assert not any(self._is_kept[block] for block in self._free), "a free block should be cached"
        assert all(self._is_kept[block] for block in self._cached), "a cached block should be free"

    def _tail_is_shared(self, table: BlockTable) -> bool:
        # Writes only ever go behind the last token, so no block but the last can be both shared and written; a last
        # block that is full is never written again.
        blocks = table.blocks
        return table.writable < len(blocks) * self.block_size and self._holders[blocks[-1]] > 1

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._is_kept[block] = False
            self.on_evict(block)
        self._holders[block] = 1
        return block
