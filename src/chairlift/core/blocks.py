"""BlockPool and BlockTable: the KV cache's physical blocks, with reference counts and copy-on-write.

A block holds the keys and values of `block_size` consecutive tokens, in the layers of one group (cache_groups.py). A
table is one sequence's blocks in order. Forks of one prompt hold the same blocks, and a write to a block that several
tables hold first copies it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockTable:
    """The blocks of one sequence in one group of layers, in the order of its tokens."""

    __slots__ = ("blocks", "freed", "spare", "writable")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        # Positions below this may be written without a call of the pool: their block exists and, from the first
        # position not yet written on, is held by this table alone.
        self.writable = 0
        self.freed = 0  # entries at its front with freed blocks: these are outside the group's attention window
        self.spare: list[int] | None = None  # reserved blocks without a place; freed ones return here (see reserve)


class BlockPool:
    """All blocks of the cache: each is free, held by one table or more, or cached.

    A cached block is held by no table, but its content is kept for the prefix cache. It is evicted when no block is
    free, in the order in which they were released.
    """

    def __init__(self, total: int, block_size: int) -> None:
        self.total = total
        self.block_size = block_size
        self.on_evict: Callable[[int], None] = lambda block: None  # called with a cached block that is evicted
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total
        self._is_kept = bytearray(total)
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """The number of blocks without content."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """The number of blocks that no table holds and that keep their content."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """The number of blocks that can be allocated."""
        return len(self._free) + len(self._cached)

    @property
    def owned(self) -> int:
        """The number of blocks that tables hold."""
        return self.total - self.available

    def blocks_for(self, length: int) -> int:
        """Return the number of blocks for `length` tokens."""
        return -(-length // self.block_size)

    def missing(self, table: BlockTable, length: int) -> int:
        """Return the number of blocks to allocate so that `table` can be written up to `length` tokens."""
        if length <= table.writable:
            return 0
        count = self.blocks_for(length) - len(table.blocks) + self._tail_is_shared(table)
        return max(0, count - len(table.spare)) if table.spare else count

    def append(self, table: BlockTable) -> bool:
        """Append one block, as most decodes need. False if none is free, or the last one is shared and not full."""
        if not self._free or table.writable != len(table.blocks) * self.block_size:
            return False
        table.blocks.append(self._take())
        table.writable += self.block_size
        return True

    def grow(self, table: BlockTable, length: int) -> tuple[int, int] | None:
        """Let `table` be written up to `length` tokens; return the (source, target) of a shared block to copy first."""
        copy = None
        if self._tail_is_shared(table):
            source, target = table.blocks[-1], self._take()
            self._holders[source] -= 1
            table.blocks[-1] = target
            copy = source, target
        spare = table.spare
        for _ in range(self.blocks_for(length) - len(table.blocks)):
            table.blocks.append(spare.pop() if spare else self._take())
        table.writable = len(table.blocks) * self.block_size
        return copy

    def fork(self, table: BlockTable, length: int) -> BlockTable:
        """Return a second table over the same blocks, of which `length` tokens are written or will be by this step."""
        twin = BlockTable()
        self.share(twin, table.blocks[table.freed :])
        twin.blocks, twin.freed = list(table.blocks), table.freed
        # The last block is shared from now on: unless it is full, both must copy it before they write behind `length`.
        table.writable = twin.writable = length
        return twin

    def share(self, table: BlockTable, blocks: list[int]) -> None:
        """Add blocks that may be held already to `table`; they are full, or the caller sets `writable`."""
        holders = self._holders
        for block in blocks:
            if not holders[block]:
                del self._cached[block]
            holders[block] += 1
        table.blocks += blocks
        table.writable = len(table.blocks) * self.block_size

    def release(self, table: BlockTable) -> None:
        """Release every block of `table`; those that no other table holds are available at once."""
        holders, free, kept = self._holders, self._free, self._is_kept
        # The last block is evicted first: those before it are of use without it.
        for block in reversed(table.blocks[table.freed :]):
            holders[block] -= 1
            if holders[block] == 0:
                if kept[block]:
                    self._cached[block] = None
                else:
                    free.append(block)
        if table.spare is not None:
            self.drop_reserve(table)
        table.blocks = []
        table.writable = table.freed = 0

    # ---- for groups of layers with a window

    def skip(self, table: BlockTable, count: int) -> None:
        """Begin an empty table behind `count` entries that have no block, as if these had been freed."""
        table.blocks = [0] * count
        table.freed = count
        table.writable = count * self.block_size

    def free_front(self, table: BlockTable, count: int) -> None:
        """Release the first `count` blocks of `table`; the positions of the others stay as they are."""
        for block in table.blocks[table.freed : count]:
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if self._is_kept[block]:
                self._cached[block] = None
            elif table.spare is not None:
                self._holders[block] = 1
                table.spare.append(block)
            else:
                self._free.append(block)
        table.freed = max(table.freed, count)

    def reserve(self, table: BlockTable, count: int) -> None:
        """Give `table` blocks without a place: it grows into these, and gets back those it frees at its front.

        If none of its blocks is shared or cached, `table` needs no other block while it has up to `count` at one time.
        """
        table.spare = [self._take() for _ in range(count)]

    def drop_reserve(self, table: BlockTable) -> None:
        """Free the reserved blocks that have no place."""
        for block in table.spare or ():
            self._holders[block] = 0
            self._free.append(block)
        table.spare = None

    # ---- for display

    def states(self, most: int) -> tuple[bytes, int]:
        """Return a digit for each of up to `most` blocks, evenly spaced, and the distance between two of them.

        The digit is 0 for a free block, 2 for one that a table holds and 4 for one that several hold; 1 more if the
        prefix cache keeps its content.

        >>> BlockPool(3, 16).states(2)
        (b'00', 2)
        """
        every = max(1, -(-self.total // most))
        pairs = zip(self._holders[::every], self._is_kept[::every], strict=True)
        return bytes(48 + 2 * (holders if holders < 2 else 2) + kept for holders, kept in pairs), every

    def holders(self, block: int) -> int:
        """Return the number of tables that hold a block."""
        return self._holders[block]

    # ---- for the prefix cache

    def is_held(self, block: int) -> bool:
        """Whether any table holds it."""
        return self._holders[block] > 0

    def keep(self, block: int) -> None:
        """Cache a block instead of freeing it, once no table holds it."""
        self._is_kept[block] = True

    def allocate_cached(self) -> int:
        """Allocate a block that is cached and held by no table; it is the last to be evicted."""
        block = self._take()
        self._holders[block] = 0
        self._is_kept[block] = True
        self._cached[block] = None
        return block

    def mark_used(self, block: int) -> None:
        """If a block is cached, let it be the last to be evicted."""
        if block in self._cached:
            self._cached.move_to_end(block)

    def forget(self, block: int) -> None:
        """Drop the content of a block."""
        self._is_kept[block] = False
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Check that the tables hold exactly the blocks that are counted, and that free + cached + owned = total."""
        held = [0] * self.total
        for table in tables:
            for block in (*table.blocks[table.freed :], *(table.spare or ())):
                held[block] += 1
        for block in range(self.total) if held != self._holders else ():
            assert held[block] == self._holders[block], (
                f"block {block}: {held[block]} tables hold it, {self._holders[block]} are counted"
            )
        unheld = [block for block, count in enumerate(held) if not count]
        idle = sorted(self._free) + sorted(self._cached)
        assert sorted(idle) == unheld, f"no table holds {unheld[:20]}, but free or cached are {sorted(idle)[:20]}"
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
