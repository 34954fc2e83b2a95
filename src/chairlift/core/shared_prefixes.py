"""The largest prefixes of the prefix cache's tree, found in a bounded look at it."""

from __future__ import annotations

from collections import deque
from heapq import nlargest
from itertools import islice
from typing import NamedTuple

from chairlift.core.prefix_cache import PrefixCache
from chairlift.core.prefix_node import Node

_VISITS = 2000  # nodes per look, nearest to the roots first: about a millisecond, whatever the size of the tree


class SharedPrefix(NamedTuple):
    """A path from a root to the first node with several children, or with none."""

    salt: str
    blocks: int
    branches: int  # different continuations that are cached
    node: Node  # its last block


def largest_prefixes(cache: PrefixCache, most: int) -> list[SharedPrefix]:
    """Return the prefixes with the most blocks times continuations, the largest first.

    Short paths are looked at first, and only so many: in a large tree, deep prefixes may be missing.
    """
    found: list[SharedPrefix] = []
    ahead = deque(
        (root.chunk.decode(errors="replace"), child, 1)
        for root in islice(cache.roots, _VISITS)
        for child in islice(root.children.values(), _VISITS)
    )
    visits = 0
    while ahead and visits < _VISITS:
        salt, node, blocks = ahead.popleft()
        visits += 1
        while len(node.children) == 1 and visits < _VISITS:
            [node] = node.children.values()
            blocks += 1
            visits += 1
        found.append(SharedPrefix(salt, blocks, len(node.children), node))
        ahead += ((salt, child, blocks + 1) for child in islice(node.children.values(), _VISITS))
    return nlargest(most, found, key=lambda each: (each.blocks * max(1, each.branches), each.blocks))
