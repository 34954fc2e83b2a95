"""The prefix cache: a tree over whole blocks, found by the exact tokens that lead to them.

A node is one block; the way to it from its root spells the tokens whose keys and values it and its ancestors hold. Each
salt has a root of its own, so that nobody can find, or feel by a faster answer, what another has asked.

Who holds a block also holds all before it, and lets the last go first. So among the blocks that nobody holds, in the
order in which they were let go, children stand before their parents: the one that was let go longest ago is always a
leaf, and to evict never takes a search.

Where there are shelves (host memory, a file), an evicted block moves to the first, from there to the next, and stays in
the tree. On each shelf, too, what came or was used longest ago goes first, and for the same reason nothing that is
still on it is behind that. A node on the device has all its ancestors there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from struct import Struct, pack
from typing import NamedTuple

from chairlift.core.blocks import BlockPool, BlockTable
from chairlift.core.cost import Cost

HOST, DISK = 0, 1  # shelves
_INT = 4  # bytes of a packed token
_LOOKED_AT = 32  # children, of those that came last, that are compared for their first tokens
_LEAF: dict[bytes, Node] = {}  # the children of all who have none


class Node:
    """One block of the cache and the tokens in it."""

    __slots__ = ("block", "children", "chunk", "parent", "passes", "shelf", "slot")

    def __init__(self, parent: Node | None, chunk: bytes) -> None:
        self.parent = parent
        self.chunk = chunk  # the block's tokens, packed; a root's salt
        self.block = -1  # on the device, if it is there
        self.shelf = self.slot = -1  # where else it is
        self.passes = 0  # that fill or move it and have not come back
        self.children = _LEAF

    @property
    def is_ready(self) -> bool:
        """Whether all that was to be written is there."""
        return not self.passes

    @property
    def is_gone(self) -> bool:
        """Whether it is in the tree no more."""
        return self.block < 0 and self.shelf < 0


class Prefix:
    """What the cache has to do with one sequence."""

    __slots__ = ("cursor", "kept", "key", "path")

    def __init__(self) -> None:
        self.path: list[Node] = []  # while it waits: what was found for it
        self.key = b""  # its tokens, as they are looked up
        self.cursor: Node | None = None  # while it runs: where its next full block goes; None: nowhere
        self.kept = 0  # blocks up to there


class Move(NamedTuple):
    """A block goes to a shelf, from the device or from the shelf before."""

    source: int
    shelf: int
    slot: int
    node: Node


class PrefixCache:
    """Finds, keeps and gives up blocks of one pool, and moves them to shelves if there are any."""

    def __init__(self, pool: BlockPool, shelves: Sequence[BlockPool] = (), cost: Cost | None = None) -> None:
        self.shelves = [shelf for shelf in shelves if shelf.total]
        self.evictions = 0  # blocks that left the device
        self.returns = [0] * len(self.shelves)  # blocks that came back to it, from each shelf
        self.leaving: list[Move] = []  # in this plan
        self.is_sound: Callable[[int], bool] = lambda slot: True  # whether a block on the last shelf can be trusted
        self._pool = pool
        self._cost = cost or Cost()
        self._width = pool.block_size * _INT
        self._chunks = Struct(f"{self._width}s")
        self.pack = Struct(f"{pool.block_size}i").pack  # the tokens of one block, as its key
        self._roots: dict[bytes, Node] = {}
        self._nodes: list[Node | None] = [None] * pool.total  # of each block
        self._shelved: list[list[Node | None]] = [[None] * shelf.total for shelf in self.shelves]
        pool.on_evict = self._evicted
        for number, shelf in enumerate(self.shelves):
            shelf.on_evict = partial(self._dropped, number)

    def match(self, path: list[Node], salt: str, key: bytes, most: int) -> None:
        """Extend `path`, found before, to the most blocks, up to `most`, that hold the tokens `key` begins with."""
        while path and path[-1].is_gone:
            path.pop()
        node = path[-1] if path else self._roots.get(salt.encode())
        if node is None or most <= len(path):
            return
        rest = memoryview(key)[len(path) * self._width : most * self._width]
        with suppress(KeyError):
            for (chunk,) in self._chunks.iter_unpack(rest):
                node = node.children[chunk]
                path.append(node)

    def weigh(self, path: list[Node]) -> int:
        """How many blocks of a path are of use: not those on shelves that are not there yet, or dearer than anew."""
        on_device = next((depth for depth, node in enumerate(path) if node.block < 0), len(path))
        there = next((depth for depth in range(on_device, len(path)) if not path[depth].is_ready), len(path))
        size, cost = self._pool.block_size, self._cost
        # What is computed again shares a step with others: its fixed part is not its own.
        again = cost.prompt_seconds((there - on_device) * size, on_device * size) - cost.fixed
        return there if cost.block_copy * (there - on_device) < again else on_device

    def match_part(self, path: list[Node], salt: str, tokens: list[int]) -> tuple[int, int]:
        """A block behind the path that begins as `tokens` do, and with how many of them."""
        node = path[-1] if path else self._roots.get(salt.encode())
        best, block = 0, -1
        wanted = packed(tokens)
        for child in islice(reversed(node.children.values()), _LOOKED_AT) if node is not None else ():
            common = _common(child.chunk, wanted)
            if common > best and child.is_ready and child.block >= 0:
                best, block = common, child.block
        return block, best

    def root(self, salt: str) -> Node:
        """Where the blocks of a salt begin."""
        return Node(None, salt.encode())

    def insert(self, parent: Node, chunk: bytes, block: int) -> Node | None:
        """Let a held block be found behind `parent`; None if another block with the same content can be."""
        if parent.parent is None:
            parent = self._roots.setdefault(parent.chunk, parent)
        elif parent.block < 0:
            return None  # all was forgotten in the meantime
        node = parent.children.get(chunk)
        if node is None:
            node = Node(parent, chunk)
            if parent.children is _LEAF:
                parent.children = {}
            parent.children[chunk] = node
        elif node.block >= 0:
            return node if node.block == block else None
        self._put(node, block)
        return node

    def bring_back(self, path: list[Node], table: BlockTable) -> list[tuple[int, int, int]]:
        """What is on shelves gets the table's blocks as its own; for each, the shelf, the slot there and the block."""
        moves = []
        for depth, node in enumerate(path):
            if node.block < 0:
                self._put(node, table.blocks[depth])
                self.returns[node.shelf] += 1
                moves.append((node.shelf, node.slot, node.block))
        return moves

    def drop_unsound(self, path: list[Node]) -> None:
        """Cut a path where a block cannot be trusted any more: it will be computed again."""
        for depth, node in enumerate(path):
            if node.block < 0 and node.shelf == DISK and not self.is_sound(node.slot):
                self.remove(node)
                del path[depth:]
                return

    def node_at(self, block: int) -> Node | None:
        """Return the node whose content a block of the device holds."""
        return self._nodes[block]

    def remove(self, node: Node) -> list[int]:
        """Forget a node and all behind it; the blocks they had on the device."""
        return [] if node.is_gone else self._uproot(node)

    def _uproot(self, node: Node) -> list[int]:
        blocks = []
        for each in list(_below(node)):
            if each.block >= 0:
                blocks.append(each.block)
                self._nodes[each.block] = None
                self._pool.forget(each.block)
                each.block = -1
            if each.shelf >= 0:
                self.shelves[each.shelf].forget(each.slot)
                self._take_off(each)
            self._cut(each)
        return blocks

    def clear(self) -> int:
        """Forget everything; how many blocks it was, wherever they were."""
        nodes = [child for root in self._roots.values() for child in root.children.values()]
        count = sum(1 for node in nodes for _ in _below(node))
        for node in nodes:
            self.remove(node)
        return count

    def check(self) -> None:
        """Prove that the tree holds together, and that no block is in two places."""
        found = [node for root in self._roots.values() for child in root.children.values() for node in _below(child)]
        on_device = [node for node in found if node.block >= 0]
        assert all(self._nodes[node.block] is node for node in on_device)
        assert len(on_device) == sum(node is not None for node in self._nodes), "blocks are kept that cannot be found"
        for number, nodes in enumerate(self._shelved):
            there = [node for node in found if node.shelf == number]
            assert all(nodes[node.slot] is node for node in there)
            assert len(there) == sum(node is not None for node in nodes), "slots are kept that cannot be found"
        for node in found:
            assert not node.is_gone
            assert node.passes >= 0
            assert node.parent is not None
            assert node.parent.children[node.chunk] is node
            assert len(node.chunk) == self._width
            if node.block >= 0 and node.parent.parent is not None:
                assert node.parent.block >= 0, "on the device without those before"
                assert not self._pool.is_held(node.block) or self._pool.is_held(node.parent.block), "held without those"
        assert all(root.children for root in self._roots.values()), "a root without anything behind it"
        assert not self.leaving, "a plan has not said what moves"

    # ---- what comes and goes

    def _put(self, node: Node, block: int) -> None:
        node.block = block
        self._nodes[block] = node
        self._pool.keep(block)

    def _evicted(self, block: int) -> None:
        """The device gives a block away."""
        node = self._nodes[block]
        assert node is not None, "what is cached can be found"
        self.evictions += 1
        self._nodes[block] = None
        node.block = -1
        if node.shelf >= 0:
            self.shelves[node.shelf].touch(node.slot)  # it is there already
        elif not self._shelve(node, HOST, block):
            self._lose(node)

    def _dropped(self, shelf: int, slot: int) -> None:
        """A shelf gives a slot away."""
        node = self._shelved[shelf][slot]
        assert node is not None, "what is cached can be found"
        is_there = self._take_off(node)
        if node.block < 0 and not (is_there and self._shelve(node, shelf + 1, slot)):
            self._lose(node)

    def _shelve(self, node: Node, shelf: int, source: int) -> bool:
        """Move a node to a shelf that has room for it or for which another makes room; whether it has found a place."""
        if shelf >= len(self.shelves) or not self.shelves[shelf].available:
            return False
        slot = self.shelves[shelf].stow()
        assert node.parent is not None
        if node.parent.children.get(node.chunk) is not node:  # the one that made room was before it, and took it along
            self.shelves[shelf].forget(slot)
            return True
        node.shelf, node.slot = shelf, slot
        node.passes += 1
        self._shelved[shelf][node.slot] = node
        self.leaving.append(Move(source, shelf, node.slot, node))
        return True

    def _take_off(self, node: Node) -> bool:
        """It is on its shelf no more; False if it was only about to come, in this very plan."""
        self._shelved[node.shelf][node.slot] = None
        node.shelf = node.slot = -1
        coming = [move for move in self.leaving if move.node is not node]
        cancelled = len(self.leaving) - len(coming)
        node.passes -= cancelled
        self.leaving = coming
        return not cancelled

    def _lose(self, node: Node) -> None:
        """It is nowhere any more, and so what is behind it is of no use."""
        self._uproot(node)

    def _cut(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.chunk]
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
