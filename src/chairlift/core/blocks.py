"""BlockPool and BlockTable: the KV cache's physical blocks, who holds them, and when one must be copied.

A block holds the keys and values of `block_size` consecutive tokens. A table is one sequence's blocks in order. Blocks
are counted, not owned: forks of one prompt hold the same blocks, and a write to a block held twice first copies it.
"""

from __future__ import annotations

from collections.abc import Iterable


class BlockTable:
    """The blocks of one sequence, in the order of its tokens."""

    __slots__ = ("blocks", "writable")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        # Positions below this may be written without asking the pool: their block exists and, from the first position
        # not yet written on, is held by this table alone.
        self.writable = 0


class BlockPool:
    """All blocks of the cache: each is free, or held by one table or more."""

    def __init__(self, total: int, block_size: int) -> None:
        self.total = total
        self.block_size = block_size
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total

    @property
    def free(self) -> int:
        """How many blocks nobody holds."""
        return len(self._free)

    @property
    def owned(self) -> int:
        """How many blocks somebody holds."""
        return self.total - len(self._free)

    def blocks_for(self, length: int) -> int:
        """How many blocks `length` tokens fill."""
        return -(-length // self.block_size)

    def missing(self, table: BlockTable, length: int) -> int:
        """How many free blocks it takes to let `table` write up to `length` tokens."""
        if length <= table.writable:
            return 0
        return self.blocks_for(length) - len(table.blocks) + self._tail_is_shared(table)

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
        twin.blocks = list(table.blocks)
        for block in twin.blocks:
            self._holders[block] += 1
        # The tail is shared from now on: unless it is full, both must ask before they write behind `length`.
        table.writable = twin.writable = length
        return twin

    def release(self, table: BlockTable) -> None:
        """Give back every block of `table`; those that nobody else holds are free at once."""
        holders, free = self._holders, self._free
        for block in reversed(table.blocks):
            holders[block] -= 1
            if holders[block] == 0:
                free.append(block)
        table.blocks = []
        table.writable = 0

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Prove that `tables` hold exactly what the pool thinks is held, and that free + owned = total."""
        held = [0] * self.total
        for table in tables:
            for block in table.blocks:
                held[block] += 1
        for block in range(self.total) if held != self._holders else ():
            assert held[block] == self._holders[block], (
                f"block {block}: {held[block]} tables hold it, {self._holders[block]} are counted"
            )
        nobody = [block for block, count in enumerate(held) if not count]
        assert sorted(self._free) == nobody, f"nobody holds {nobody[:20]}, but free are {sorted(self._free)[:20]}"

    def _tail_is_shared(self, table: BlockTable) -> bool:
        # Writes only ever go behind the last token, so no block but the last can be both shared and written; a last
        # block that is full is never written again.
        blocks = table.blocks
        return table.writable < len(blocks) * self.block_size and self._holders[blocks[-1]] > 1

    def _take(self) -> int:
        block = self._free.pop()
        self._holders[block] = 1
        return block
