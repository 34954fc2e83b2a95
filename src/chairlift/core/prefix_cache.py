"""The prefix cache: a tree over whole blocks, found by the exact tokens that lead to them.

A node is one block; the path to it from its root spells the tokens of the keys and values in it and its ancestors.
Each salt has its own root, so that no tenant can find another's prompts, or notice them by a faster answer.

A sequence that holds a block also holds all blocks before it, and releases the last one first. So in the order in which
unheld blocks were released, children come before their parents: the least recently released block is always a leaf, and
eviction needs no search.

Shelves (host memory, a file) are tiers below the device: an evicted block moves to the first, from there to the next,
and stays in the tree. Each shelf evicts the least recently used block, which for the same reason has no descendant on
that shelf. A node on the device has all its ancestors there.

If a model's layers are in several groups (cache_groups.py), a node has a block in each. A group with a window needs
only the blocks of the window before a hit's end: its other blocks are evicted one by one, and a hit is as long as the
blocks that are left allow. Such models have no shelves: windows would have to move with the blocks that need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from struct import Struct

from chairlift.core.blocks import BlockPool, BlockTable
from chairlift.core.cache_groups import CacheGroups
from chairlift.core.cost import Cost
from chairlift.core.exchange import Departing, Exchange, key_of
from chairlift.core.prefix_node import LEAF, NO_OTHERS, TOKEN_BYTES, Move, Node, below, common_tokens, packed

HOST, DISK = 0, 1  # shelves
_LOOKED_AT = 32  # most recent children that are compared for a partial match


class PrefixCache:
    """Finds, inserts and evicts blocks of one pool, and moves evicted ones to the shelves."""

    def __init__(
        self,
        pool: BlockPool,
        shelves: Sequence[BlockPool] = (),
        cost: Cost | None = None,
        groups: CacheGroups | None = None,
    ) -> None:
        self._groups = groups or CacheGroups((0,), pool.block_size, chunk=1)
        assert not self._groups.windows[0], "the layers of the first group attend to all tokens"
        self.shelves = [shelf for shelf in shelves if shelf.total and self._groups.is_plain]
        self.evictions = 0  # from the device
        self.returns = [0] * len(self.shelves)  # blocks loaded from each shelf
        self.leaving: list[Move] = []  # moves to shelves of the present plan
        self.departing: list[tuple[int, Departing]] = []  # evicted blocks that the present plan sends out
        self.coming: dict[int, int] = {}  # blocks that the present plan fills from slots outside the pool
        self.exchange = Exchange()
        self.is_sound: Callable[[int], bool] = lambda slot: True  # whether a block on disk passes its checksum
        self._pool = pool
        self._cost = cost or Cost()
        self.width = pool.block_size * TOKEN_BYTES  # bytes of a block's packed tokens
        self._chunks = Struct(f"{self.width}s")
        self.pack = Struct(f"{pool.block_size}i").pack  # the tokens of one block, as its key
        self._roots: dict[bytes, Node] = {}
        self._nodes: list[Node | None] = [None] * pool.total  # of each block
        self._shelved: list[list[Node | None]] = [[None] * shelf.total for shelf in self.shelves]
        pool.on_evict = self._evicted
        for number, shelf in enumerate(self.shelves):
            shelf.on_evict = partial(self._dropped, number)

    @property
    def roots(self) -> Iterable[Node]:
        """The roots, one for each salt."""
        return self._roots.values()

    def match(self, path: list[Node], salt: str, key: bytes, most: int) -> None:
        """Extend the path of an earlier match to the longest one, up to `most` blocks, that spells `key`."""
        while path and path[-1].is_gone:
            path.pop()
        node = path[-1] if path else self._roots.get(salt.encode())
        if node is None or most <= len(path):
            return
        rest = memoryview(key)[len(path) * self.width : most * self.width]
        with suppress(KeyError):
            for (chunk,) in self._chunks.iter_unpack(rest):
                node = node.children[chunk]
                path.append(node)

    def weigh(self, path: list[Node]) -> int:
        """Return how many blocks of a path to use: not those still being moved, nor those that are slower to load."""
        on_device = next((depth for depth, node in enumerate(path) if node.block < 0), len(path))
        there = next((depth for depth in range(on_device, len(path)) if not path[depth].is_ready), len(path))
        size, cost = self._pool.block_size, self._cost
        # A recomputed prompt shares its steps with other sequences, so their fixed time is not its own.
        again = cost.prompt_seconds((there - on_device) * size, on_device * size) - cost.fixed
        return there if cost.block_copy * (there - on_device) < again else on_device

    def covered(self, path: list[Node]) -> int:
        """Return how many blocks of a path to use: groups with a window need the last ones, and may have lost them."""
        end, last = len(path), -1
        while end != last:
            last = end
            for group, window in enumerate(self._groups.windows[1:]):
                first = self._groups.first_block(window, end * self._groups.block_size)
                lost = (depth for depth in range(end - 1, first - 1, -1) if path[depth].others[group] < 0)
                end = next(lost, end)  # any longer hit would need that block, too
        return end

    def match_part(self, path: list[Node], salt: str, tokens: list[int]) -> tuple[list[int] | None, int]:
        """Return the blocks behind the path that start with the most of `tokens`, and how many; None: no blocks."""
        node = path[-1] if path else self._roots.get(salt.encode())
        best, blocks = 0, None
        wanted = packed(tokens)
        for child in islice(reversed(node.children.values()), _LOOKED_AT) if node is not None else ():
            common = common_tokens(child.chunk, wanted)
            if common > best and child.is_ready and child.block >= 0 and min(child.others, default=0) >= 0:
                best, blocks = common, [child.block, *child.others]
        return blocks, best

    def root(self, salt: str) -> Node:
        """Return a root for a salt."""
        return Node(None, salt.encode())

    def insert(self, parent: Node, chunk: bytes, block: int, others: Sequence[int] = ()) -> Node | None:
        """Insert held blocks behind `parent`; None if another block with the same content is there."""
        if parent.parent is None:
            parent = self._roots.setdefault(parent.chunk, parent)
        elif parent.block < 0:
            return None  # the cache was cleared since
        node = parent.children.get(chunk)
        if node is None:
            node = Node(parent, chunk)
            if parent.children is LEAF:
                parent.children = {}
            parent.children[chunk] = node
        elif node.block >= 0:
            return node if node.block == block else None
        self._put(node, block)
        if others:
            node.others = [-1] * len(others)
            self._add(node, others)
        return node

    def child(self, parent: Node, chunk: bytes) -> Node | None:
        """Return the node behind `parent` with these tokens, if there is one."""
        return (self._roots.get(parent.chunk, parent) if parent.parent is None else parent).children.get(chunk)

    def lend(self, node: Node, others: Sequence[int]) -> None:
        """Give a node the blocks of groups with a window that it lacks; `others` are held, and have its content.

        So a hit that eviction has shortened is as long as before, once a sequence has computed the tokens again.
        """
        if not node.is_gone:
            self._add(node, others)

    def _add(self, node: Node, others: Sequence[int]) -> None:
        """Give a node the blocks that it lacks, of `others`, in which -1 is no block."""
        for group, block in enumerate(others):
            if block >= 0 and node.others[group] < 0:
                node.others[group] = block
                self._nodes[block] = node
                self._pool.keep(block)

    def bring_back(self, path: list[Node], table: BlockTable) -> list[tuple[int, int, int]]:
        """Give the nodes on shelves the table's blocks; return (shelf, slot, block) for each."""
        moves = []
        for depth, node in enumerate(path):
            if node.block < 0:
                self._put(node, table.blocks[depth])
                self.returns[node.shelf] += 1
                moves.append((node.shelf, node.slot, node.block))
        return moves

    def drop_unsound(self, path: list[Node]) -> None:
        """Cut a path at the first block on disk that fails its checksum: it is computed again."""
        for depth, node in enumerate(path):
            if node.block < 0 and node.shelf == DISK and not self.is_sound(node.slot):
                self.remove(node)
                del path[depth:]
                return

    def node_at(self, block: int) -> Node | None:
        """Return the node of a block on the device."""
        return self._nodes[block]

    def remove(self, node: Node) -> list[int]:
        """Remove a node and its descendants; return their blocks on the device."""
        return [] if node.is_gone else self._uproot(node)

    def _uproot(self, node: Node) -> list[int]:
        blocks: list[int] = []
        for each in list(below(node)):
            if each.block >= 0:
                blocks.append(each.block)
                each.block = -1
            if each.others:
                blocks += (block for block in each.others if block >= 0)
                each.others = NO_OTHERS
            if each.shelf >= 0:
                self.shelves[each.shelf].forget(each.slot)
                self._take_off(each)
            self._cut(each)
        for block in blocks:
            self._drop_coming(block)
            self._nodes[block] = None
            self._pool.forget(block)
        return blocks

    def clear(self) -> int:
        """Remove all nodes; return their number."""
        nodes = [child for root in self._roots.values() for child in root.children.values()]
        count = sum(1 for node in nodes for _ in below(node))
        for node in nodes:
            self.remove(node)
        return count

    def check(self) -> None:
        """Check that the tree is consistent, and that no block belongs to two nodes."""
        found = [node for root in self._roots.values() for child in root.children.values() for node in below(child)]
        on_device = [node for node in found if node.block >= 0]
        assert all(self._nodes[node.block] is node for node in on_device)
        others = [(node, block) for node in found for block in node.others if block >= 0]
        assert all(self._nodes[block] is node for node, block in others)
        count = sum(node is not None for node in self._nodes)
        assert len(on_device) + len(others) == count, "blocks are kept that cannot be found"
        for number, nodes in enumerate(self._shelved):
            there = [node for node in found if node.shelf == number]
            assert all(nodes[node.slot] is node for node in there)
            assert len(there) == sum(node is not None for node in nodes), "slots are kept that cannot be found"
        for node in found:
            assert not node.is_gone
            assert node.passes >= 0
            assert node.parent is not None
            assert node.parent.children[node.chunk] is node
            assert len(node.chunk) == self.width
            if node.block >= 0 and node.parent.parent is not None:
                assert node.parent.block >= 0, "on the device without its parent"
                assert not self._pool.is_held(node.block) or self._pool.is_held(node.parent.block), (
                    "held without its parent"
                )
        assert all(root.children for root in self._roots.values()), "a root without children"
        assert not (self.leaving or self.departing or self.coming), "moves that no plan has taken"

    # ---- eviction

    def _put(self, node: Node, block: int) -> None:
        node.block = block
        self._nodes[block] = node
        self._pool.keep(block)

    def _evicted(self, block: int) -> None:
        """Handle the eviction of a block from the device."""
        node = self._nodes[block]
        assert node is not None, "a cached block has a node"
        self.evictions += 1
        self._nodes[block] = None
        if node.block != block:
            group = node.others.index(block)
            node.others[group] = -1
            if not self._groups.windows[1 + group]:
                self._lose(node)
            return
        node.block = -1
        has_content = not self._drop_coming(block)
        if has_content and node.is_ready and self._groups.is_plain:
            self._send_out(node, block)
        if node.shelf >= 0:
            self.shelves[node.shelf].mark_used(node.slot)  # its content is there already
        elif not (has_content and self._shelve(node, HOST, block)):
            self._lose(node)

    def _send_out(self, node: Node, block: int) -> None:
        """Let the present plan copy an evicted block to a slot outside the pool, if there are slots.

        The last blocks of a prompt are evicted first and are of no use without those before them: if no slot is free, a
        block takes the slot of the one that this plan evicted first.
        """
        free = self.exchange.free
        if free or self.departing:
            slot = free.popleft() if free else self.departing.pop(0)[1].slot
            self.departing.append((block, Departing(*key_of(node), slot)))

    def _drop_coming(self, block: int) -> bool:
        """Cancel the move of the present plan that was to fill a block; whether there was one."""
        slot = self.coming.pop(block, None)
        if slot is not None:
            self.exchange.read.append(slot)
        return slot is not None

    def _dropped(self, shelf: int, slot: int) -> None:
        """Handle the eviction of a slot from a shelf."""
        node = self._shelved[shelf][slot]
        assert node is not None, "a cached block has a node"
        is_there = self._take_off(node)
        if node.block < 0 and not (is_there and self._shelve(node, shelf + 1, slot)):
            self._lose(node)

    def _shelve(self, node: Node, shelf: int, source: int) -> bool:
        """Move a node to a shelf, which may evict another one; whether the shelf had a slot."""
        if shelf >= len(self.shelves) or not self.shelves[shelf].available:
            return False
        slot = self.shelves[shelf].allocate_cached()
        assert node.parent is not None
        if node.parent.children.get(node.chunk) is not node:  # its ancestor was evicted for it, and removed it
            self.shelves[shelf].forget(slot)
            return True
        node.shelf, node.slot = shelf, slot
        node.passes += 1
        self._shelved[shelf][node.slot] = node
        self.leaving.append(Move(source, shelf, node.slot, node))
        return True

    def _take_off(self, node: Node) -> bool:
        """Take a node off its shelf; False if the present plan was to move it there."""
        self._shelved[node.shelf][node.slot] = None
        node.shelf = node.slot = -1
        coming = [move for move in self.leaving if move.node is not node]
        cancelled = len(self.leaving) - len(coming)
        node.passes -= cancelled
        self.leaving = coming
        return not cancelled

    def _lose(self, node: Node) -> None:
        """Remove a node that has no block any more, with its descendants."""
        self._uproot(node)

    def _cut(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.chunk]
        if parent.parent is None and not parent.children:
            del self._roots[parent.chunk]
