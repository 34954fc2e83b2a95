"""The prefix cache: a tree over whole blocks, found by the exact tokens that lead to them.

A node is one block; the way to it from its root spells the tokens whose keys and values it and its ancestors hold. Each
salt has a root of its own, so that nobody can find, or feel by a faster answer, what another has asked.

Who holds a block also holds all before it, and lets the last go first. So among the blocks that nobody holds, in the
order in which they were let go, children stand before their parents: the one that was let go longest ago is always a
leaf, and to evict never takes a search.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from struct import Struct, pack

from chairlift.core.blocks import BlockPool

_INT = 4  # bytes of a packed token
_LOOKED_AT = 32  # children, of those that came last, that are compared for their first tokens
_LEAF: dict[bytes, Node] = {}  # the children of all who have none


class Node:
    """One block of the cache and the tokens in it."""

    __slots__ = ("block", "children", "chunk", "is_ready", "parent")

    def __init__(self, parent: Node | None, chunk: bytes, block: int, is_ready: bool) -> None:
        self.parent = parent
        self.chunk = chunk  # the block's tokens, packed; a root's salt
        self.block = block  # -1: gone, or a root
        self.is_ready = is_ready  # whether the pass that fills it has come back
        self.children = _LEAF


class Prefix:
    """What the cache has to do with one sequence."""

    __slots__ = ("cursor", "kept", "key", "path")

    def __init__(self) -> None:
        self.path: list[Node] = []  # while it waits: what was found for it
        self.key = b""  # its tokens, as they are looked up
        self.cursor: Node | None = None  # while it runs: where its next full block goes; None: nowhere
        self.kept = 0  # blocks up to there


class PrefixCache:
    """Finds, keeps and gives up blocks of one pool."""

    def __init__(self, pool: BlockPool) -> None:
        pool.on_evict = self._evicted
        self.evictions = 0
        self._pool = pool
        self._width = pool.block_size * _INT
        self._chunks = Struct(f"{self._width}s")
        self._roots: dict[bytes, Node] = {}
        self._nodes: list[Node | None] = [None] * pool.total  # of each block

    def __len__(self) -> int:
        """Blocks that can be found."""
        return sum(node is not None for node in self._nodes)

    def match(self, path: list[Node], salt: str, key: bytes, most: int) -> None:
        """Extend `path`, found before, to the most blocks, up to `most`, that hold the tokens `key` begins with."""
        while path and path[-1].block < 0:
            path.pop()  # evicted since
        node = path[-1] if path else self._roots.get(salt.encode())
        if node is None or most <= len(path):
            return
        rest = memoryview(key)[len(path) * self._width : most * self._width]
        with suppress(KeyError):
            for (chunk,) in self._chunks.iter_unpack(rest):
                node = node.children[chunk]
                path.append(node)

    def match_part(self, path: list[Node], salt: str, tokens: list[int]) -> tuple[int, int]:
        """A block behind the path that begins as `tokens` do, and with how many of them."""
        node = path[-1] if path else self._roots.get(salt.encode())
        best, block = 0, -1
        wanted = packed(tokens)
        for child in islice(reversed(node.children.values()), _LOOKED_AT) if node is not None else ():
            common = _common(child.chunk, wanted)
            if common > best and child.is_ready:
                best, block = common, child.block
        return block, best

    def root(self, salt: str) -> Node:
        """Where the blocks of a salt begin."""
        return Node(None, salt.encode(), -1, True)

    def insert(self, parent: Node, chunk: bytes, block: int, is_ready: bool) -> Node | None:
        """Let a held block be found behind `parent`; None if another block with the same content can be."""
        if parent.parent is None:
            parent = self._roots.setdefault(parent.chunk, parent)
        elif parent.block < 0:
            return None  # all was forgotten in the meantime
        found = parent.children.get(chunk)
        if found is not None:
            return found if found.block == block else None
        node = Node(parent, chunk, block, is_ready)
        if parent.children is _LEAF:
            parent.children = {}
        parent.children[chunk] = node
        self._nodes[block] = node
        self._pool.keep(block)
        return node

    def remove(self, node: Node) -> list[int]:
        """Forget a node and all behind it; the blocks they had."""
        if node.block < 0:
            return []
        blocks = []
        for each in list(_below(node)):
            blocks.append(each.block)
            self._cut(each)
        for block in blocks:
            self._pool.forget(block)
        return blocks

    def clear(self) -> int:
        """Forget everything; how many blocks it was."""
        nodes = [child for root in self._roots.values() for child in root.children.values()]
        return sum(len(self.remove(node)) for node in nodes)

    def check(self) -> None:
        """Prove that the tree holds together."""
        found = [node for root in self._roots.values() for child in root.children.values() for node in _below(child)]
        assert all(self._nodes[node.block] is node for node in found)
        assert len(found) == len(self), "blocks are kept that cannot be found"
        for node in found:
            assert node.parent is not None and node.parent.children[node.chunk] is node
            assert len(node.chunk) == self._width
            is_held = self._pool.is_held(node.block)
            assert not is_held or node.parent.block < 0 or self._pool.is_held(node.parent.block), (
                "held without those before"
            )
        assert all(root.children for root in self._roots.values()), "a root without anything behind it"

    def _evicted(self, block: int) -> None:
        node = self._nodes[block]
        assert node is not None and not node.children, "only a leaf may go"
        self.evictions += 1
        self._cut(node)

    def _cut(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.chunk]
        self._nodes[node.block] = None
        node.block = -1
        if parent.parent is None and not parent.children:
            del self._roots[parent.chunk]


def packed(tokens: list[int]) -> bytes:
    """Tokens as bytes: to compare and to look up many at once."""
    return pack(f"{len(tokens)}i", *tokens)


def _common(a: bytes, b: bytes) -> int:
    """How many tokens two packed lists begin with alike."""
    most = min(len(a), len(b)) // _INT
    return next((i for i in range(most) if a[i * _INT : (i + 1) * _INT] != b[i * _INT : (i + 1) * _INT]), most)


def _below(node: Node) -> Iterator[Node]:
    """A node and all behind it, those behind first."""
    stack, order = [node], []
    while stack:
        order.append(stack.pop())
        stack += order[-1].children.values()
    return reversed(order)
