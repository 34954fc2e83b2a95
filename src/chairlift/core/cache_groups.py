"""CacheGroups: the groups of layers that have block tables of their own, and the blocks that a sequence needs in them.

A block holds the KV of `block_size` tokens in the layers of one group. All layers of a group have the same window, so a
group with a window can free the blocks that its layers have passed, while other groups keep theirs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The groups of a model, the largest slice and the block size, from which block counts follow."""

    windows: tuple[int, ...]  # of each group, in tokens; 0: its layers attend to all tokens
    block_size: int
    chunk: int  # most tokens of one slice

    @property
    def is_plain(self) -> bool:
        """Whether there is one group and it never frees blocks of a running sequence, as in most models."""
        return self.windows == (0,)

    def first_block(self, window: int, computed: int) -> int:
        """Return the number of the first block that tokens from position `computed` on attend to.

        >>> CacheGroups((0, 8), block_size=4, chunk=1).first_block(8, computed=15)  # attends to positions 8 to 15
        2
        """
        return max(0, computed - window + 1) // self.block_size if window else 0

    def blocks_within(self, window: int, length: int, start: int = 0) -> int:
        """Return the most blocks that a sequence has in a group at one time, from position `start` to `length` tokens.

        >>> CacheGroups((0, 8), block_size=4, chunk=4).blocks_within(8, length=100)  # of 11 tokens, at any offset
        4
        """
        blocks = -(-length // self.block_size) - self.first_block(window, start)
        # The first token of a slice attends to window - 1 tokens before it; n tokens are in up to (n - 2) // size + 2
        # blocks, if n is 2 or more.
        return min(blocks, max(0, window + self.chunk - 3) // self.block_size + 2) if window else blocks

    def blocks_of(self, length: int) -> int:
        """Return the most blocks of a sequence of up to `length` tokens in all groups."""
        return sum(self.blocks_within(window, length) for window in self.windows)
