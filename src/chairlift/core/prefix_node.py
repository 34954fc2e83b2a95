"""Node, Prefix and Move: one block of the prefix cache's tree, one sequence's place in it, and a move to a shelf."""

from __future__ import annotations

from collections.abc import Iterator
from struct import pack
from typing import NamedTuple

TOKEN_BYTES = 4  # of a packed token
LEAF: dict[bytes, Node] = {}  # the children of every node without any
NO_OTHERS: list[int] = []  # the other blocks of every node, if there is one group


class Node:
    """The tokens of one block, and the block of each group that holds their KV."""

    __slots__ = ("block", "children", "chunk", "others", "parent", "passes", "shelf", "slot")

    def __init__(self, parent: Node | None, chunk: bytes) -> None:
        self.parent = parent
        self.chunk = chunk  # the block's tokens, packed; a root's salt
        self.block = -1  # of the first group on the device, if it is there
        self.others = NO_OTHERS  # blocks of the other groups; -1 where a group with a window has none
        self.shelf = self.slot = -1  # its copy on a shelf, if there is one
        self.passes = 0  # steps in flight that fill or move it
        self.children = LEAF

    @property
    def is_ready(self) -> bool:
        """Whether no step in flight fills or moves it."""
        return not self.passes

    @property
    def is_gone(self) -> bool:
        """Whether it has been removed from the tree."""
        return self.block < 0 and self.shelf < 0


class Prefix:
    """One sequence's place in the cache."""

    __slots__ = ("cursor", "is_private", "kept", "key", "path")

    def __init__(self) -> None:
        self.path: list[Node] = []  # while it waits: the cached blocks found for it
        self.key = b""  # its packed tokens at the last lookup, until it is inserted beyond them
        self.cursor: Node | None = (
            None  # while it runs: the parent of its next full block; None: its blocks are not inserted
        )
        self.kept = 0  # its blocks up to the cursor
        self.is_private = False  # other sequences inserted the same tokens first: the path's blocks are not its own

    def copy(self) -> Prefix:
        """Return the place of a fork."""
        twin = Prefix()
        twin.cursor, twin.kept, twin.is_private = self.cursor, self.kept, self.is_private
        return twin


class Move(NamedTuple):
    """A block that moves to a shelf, from the device or from the shelf before."""

    source: int
    shelf: int
    slot: int
    node: Node


def packed(tokens: list[int]) -> bytes:
    """Return tokens as bytes, to compare and look up many at once."""
    return pack(f"{len(tokens)}i", *tokens)


def common_tokens(a: bytes, b: bytes) -> int:
    """Return the number of common first tokens of two packed lists."""
    if a[:TOKEN_BYTES] != b[:TOKEN_BYTES]:
        return 0  # as of nearly all pairs that are compared
    most = min(len(a), len(b)) // TOKEN_BYTES
    return next(
        (
            i
            for i in range(most)
            if a[i * TOKEN_BYTES : (i + 1) * TOKEN_BYTES] != b[i * TOKEN_BYTES : (i + 1) * TOKEN_BYTES]
        ),
        most,
    )


def below(node: Node) -> Iterator[Node]:
    """Iterate over a node and its descendants, children before parents."""
    if not node.children:
        return iter((node,))  # as nearly always: leaves are evicted first
    stack, order = [node], []
    while stack:
        order.append(stack.pop())
        stack += order[-1].children.values()
    return reversed(order)
