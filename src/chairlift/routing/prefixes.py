"""Prefixes: the prompts that each replica was sent, as chained hashes of blocks, in bounded memory.

A hash covers all blocks before it, so one number stands for a whole prefix. Two prefixes with the same hash only
cost a request its best replica: the replicas compare exact tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

TOKENS_A_BLOCK = 64
CHARACTERS_A_BLOCK = 256  # about as many tokens
MOST_BLOCKS = 4096  # hashed of one prompt: bounds the time of a choice


def chain_of_tokens(tokens: Sequence[int], salt: str = "", size: int = TOKENS_A_BLOCK) -> list[int]:
    """Return the chained hash of each whole block of a prompt; prompts with different salts have no common hash.

    >>> one, two = chain_of_tokens(list(range(128))), chain_of_tokens([*range(64), *range(70)])
    >>> len(one), len(two), one[0] == two[0], one[1] == two[1]
    (2, 2, True, False)
    """
    chain, before = [], hash(salt)
    for start in range(0, min(len(tokens) // size, MOST_BLOCKS) * size, size):
        before = hash((before, *tokens[start : start + size]))
        chain.append(before)
    return chain


def chain_of_text(text: str, salt: str = "", size: int = CHARACTERS_A_BLOCK) -> list[int]:
    """Return the chained hash of each whole block of characters."""
    chain, before = [], hash(salt)
    for start in range(0, min(len(text) // size, MOST_BLOCKS) * size, size):
        before = hash((before, text[start : start + size]))
        chain.append(before)
    return chain


class PrefixTree:
    """The prefixes that one replica was sent, up to `capacity` blocks; the least recently sent leaves go first.

    A path is touched from its last block to its first, so a block is never older than one that follows it. The oldest
    block is therefore a leaf, and evicting it leaves whole prefixes: the replica's own cache evicts in the same order.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, chain: Sequence[int]) -> int:
        """Return the number of leading blocks that the replica was sent."""
        blocks = self._blocks
        for count, block in enumerate(chain):
            if block not in blocks:
                return count
        return len(chain)

    def add(self, chain: Sequence[int]) -> None:
        """Record a prompt; of one longer than the tree, only the first blocks are kept."""
        blocks = self._blocks
        for block in reversed(chain[: self._capacity]):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self._capacity:
            blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget all: the replica has lost its cache."""
        self._blocks.clear()
