"""PrefixBinding: the cached blocks that sequences start with, and the blocks of sequences that others can find."""

from __future__ import annotations

from collections.abc import Iterable

from chairlift.core.blocks import BlockPool, BlockTable
from chairlift.core.cache_groups import CacheGroups
from chairlift.core.exchange import Arrived, Exchange
from chairlift.core.plan import StepPlan
from chairlift.core.prefix_cache import HOST, PrefixCache
from chairlift.core.prefix_node import Node, packed
from chairlift.core.request import Phase, Sequence

_PART = 4  # copy a block for its first tokens if they are at least one in so many of it


class PrefixBinding:
    """Binds sequences to the prefix cache, if there is one. All lookups and insertions go through here."""

    def __init__(self, pool: BlockPool, cache: PrefixCache | None, groups: CacheGroups) -> None:
        self.cache = cache
        self._groups = groups
        self._is_plain = groups.is_plain
        self.running: list[Sequence] = []  # other sequences may start with their answers
        self.has_new_tokens = False  # whether answers have grown since they were last inserted
        self.in_flight: list[StepPlan] = []  # steps that have neither been applied nor failed, in order
        self.exchange = Exchange() if cache is None else cache.exchange
        self._pool = pool

    # ---- lookups

    def find(self, sequence: Sequence) -> list[Node]:
        """Return the cached blocks that a waiting sequence can start with, and keep the path for the next lookup."""
        if not self._may_share(sequence):
            return []
        prefix, tokens, size = sequence.prefix, sequence.tokens, self._pool.block_size
        if self.has_new_tokens:  # answers grow in every step, and few steps look anything up
            for each in self.running:
                if len(each.tokens) > (each.prefix.kept + 1) * size:
                    self.insert_answer(each)
            self.has_new_tokens = False
        if len(prefix.key) != 4 * len(tokens):
            prefix.key = packed(tokens)
        self._match(sequence, prefix.path, prefix.key)
        return self._useful(sequence, prefix.path)

    def look_up(self, sequence: Sequence) -> list[Node]:
        """Return the cached blocks that a waiting sequence could start with, without changing anything.

        Unlike `find`, this does not insert the growing answers of running sequences first.
        """
        if not self._may_share(sequence):
            return []
        path = list(sequence.prefix.path)
        self._match(sequence, path, packed(sequence.tokens))
        return self._useful(sequence, path)

    def _may_share(self, sequence: Sequence) -> bool:
        """Whether a sequence may start with cached blocks: log-probabilities of a prompt need all its logits.

        A settled sequence shares no block of a group with a window: it gets back those it frees (BlockPool.reserve).
        """
        if self.cache is None or (sequence.is_settled and not self._is_plain):
            return False
        return sequence.request.params.prompt_logprobs is None

    def _match(self, sequence: Sequence, path: list[Node], key: bytes) -> None:
        assert self.cache is not None
        most = (len(sequence.tokens) - 1) // self._pool.block_size  # the last token is computed: its logits are needed
        self.cache.match(path, sequence.request.salt, key, most)

    def _useful(self, sequence: Sequence, path: list[Node]) -> list[Node]:
        """Return the part of a path that is cheaper to load than to compute: nothing if more of it was swapped out."""
        assert self.cache is not None
        if self.cache.shelves:
            path = path[: self.cache.weigh(path)]
        elif not self._is_plain:
            path = path[: self.cache.covered(path)]
        return path if len(path) * self._pool.block_size > sequence.computed else []

    # ---- admitted sequences

    def share(self, sequence: Sequence, path: list[Node]) -> None:
        """Let a sequence hold the blocks of a path: all of them, or those in the window of each group."""
        self._pool.share(sequence.tables[0], [node.block for node in path if node.block >= 0])
        for group, (table, window) in enumerate(zip(sequence.tables, self._groups.windows, strict=True)):
            first = self._groups.first_block(window, sequence.computed)
            if first:
                self._pool.skip(table, first)
            if group:
                self._pool.share(table, [node.others[group - 1] for node in path[first:]])

    def bind(self, sequence: Sequence, path: list[Node]) -> tuple[list[int] | None, int]:
        """Start a sequence behind `path`; return blocks to copy for its first tokens, and how many, or (None, 0)."""
        if self.cache is None or (sequence.is_settled and not self._is_plain):
            return None, 0
        prefix, tokens, size = sequence.prefix, sequence.tokens, self._pool.block_size
        salt, behind = sequence.request.salt, len(path) * size
        prefix.cursor = path[-1] if path else self.cache.root(salt)
        prefix.kept = len(path)
        prefix.is_private = False
        prefix.path = []
        rest = tokens[behind : min(behind + size, len(tokens) - 1)]
        if len(rest) * _PART < size or sequence.saved or not self._may_share(sequence):
            return None, 0
        blocks, common = self.cache.match_part(path, salt, rest)
        return (blocks, common) if common * _PART >= size else (None, 0)

    def hold_shelved(self, path: list[Node]) -> list[BlockTable]:
        """Hold the host and disk blocks of a path, so that making room on the device does not evict them."""
        shelves = [] if self.cache is None else self.cache.shelves
        held = [BlockTable() for _ in shelves]
        for node in path:
            if node.block < 0:
                shelves[node.shelf].share(held[node.shelf], [node.slot])
        return held

    def load_shelved(self, step: StepPlan, path: list[Node], sequence: Sequence, held: list[BlockTable]) -> None:
        """Move the host and disk blocks of a path to the device, as part of the step."""
        cache = self.cache
        if cache is None or all(node.block >= 0 for node in path):
            return
        for node in path:
            if node.block < 0:
                step.expect(node)
        for number, slot, block in cache.bring_back(path, sequence.tables[0]):
            (step.restored if number == HOST else step.loaded).append((slot, block))
        for shelf, table in zip(cache.shelves, held, strict=True):
            shelf.release(table)

    # ---- blocks of other processes

    def take_in(self, step: StepPlan, most: int) -> None:
        """Let a step copy up to `most` of the blocks that have arrived into the pool, as cached blocks."""
        exchange = self.exchange
        while exchange.arrived and most > 0:
            salt, key, start, slots = exchange.arrived.popleft()
            if len(slots) > most:
                exchange.arrived.appendleft(Arrived(salt, key, start + most, slots[most:]))
                slots = slots[:most]
            first, end = self._take_in(step, Arrived(salt, key, start, slots))
            exchange.taken += end - first
            most -= end - first
            exchange.read += (*slots[:first], *slots[end:])  # known already, or there is no room for them

    def _take_in(self, step: StepPlan, arrived: Arrived) -> tuple[int, int]:
        """Insert arrived blocks behind those that are there; return which of them the step copies."""
        cache, size = self.cache, self._pool.block_size
        if cache is None or not self._is_plain:
            return 0, 0
        path: list[Node] = []
        cache.match(path, arrived.salt, arrived.key, arrived.first + len(arrived.slots))
        there = next((depth for depth, node in enumerate(path) if node.block < 0), len(path))
        first = there - arrived.first
        if first < 0:
            return 0, 0
        path = path[:there]
        parent = path[-1] if path else cache.root(arrived.salt)
        held = BlockTable()  # so that making room does not evict them; released together, children before parents
        self._pool.share(held, [node.block for node in path])
        end = first
        while end < len(arrived.slots) and self._pool.available:
            number = arrived.first + end
            self._pool.grow(held, (number + 1) * size)
            chunk = arrived.key[number * cache.width : (number + 1) * cache.width]
            node = cache.insert(parent, chunk, held.blocks[-1])
            assert node is not None, "its parent is on the device, and it is not"
            step.expect(node)
            cache.coming[node.block] = arrived.slots[end]
            parent, end = node, end + 1
        self._pool.release(held)
        return first, end

    # ---- insertion

    def insert(self, sequence: Sequence, computed: int, step: StepPlan | None = None) -> None:
        """Insert the blocks that `computed` tokens fill; `step` computes them, or an earlier one if it is None.

        Within a step every layer writes KV before it attends, so sequences behind it in the same plan may share.
        """
        prefix, cache, size = sequence.prefix, self.cache, self._pool.block_size
        node, first, full = prefix.cursor, prefix.kept, computed // size
        if cache is None or node is None or full <= first:
            return
        tokens, blocks, others = sequence.tokens, sequence.tables[0].blocks, sequence.tables[1:]
        width = cache.width
        for i in range(first, full):
            chunk = prefix.key[i * width : (i + 1) * width]
            if len(chunk) < width:  # tokens behind those of the last lookup
                prefix.key = b""
                chunk = cache.pack(*tokens[i * size : (i + 1) * size])
            beside = _blocks_at(others, i) if others else ()
            found = None if prefix.is_private else cache.insert(node, chunk, blocks[i], beside)
            if found is None:  # another sequence inserted the same tokens first: the rest of this one stays private
                prefix.is_private = True
                found = self._lend(sequence, node, chunk, i, step) if others else None
            elif step is not None:
                step.expect(found)
                if i == first:
                    self._expect_started(found, sequence)
            node = found
            if node is None:
                break
        prefix.cursor, prefix.kept = node, full

    def _lend(self, sequence: Sequence, parent: Node, chunk: bytes, i: int, step: StepPlan | None) -> Node | None:
        """Return the node behind `parent`, if there is one, after giving it the blocks of windows that it lacks.

        If a step computes these, it must succeed first: a failed one removes only nodes that it was to fill itself.
        """
        assert self.cache is not None
        node = self.cache.child(parent, chunk)
        if node is not None and step is not None:
            step.lent.append((sequence, i, node))
        elif node is not None:
            self.cache.lend(node, _blocks_at(sequence.tables[1:], i))
        return node

    def insert_answer(self, sequence: Sequence) -> None:
        """Insert the blocks of an answer; the prompt's have been inserted when they were planned."""
        if not sequence.is_search and sequence.computed >= len(sequence.tokens) - 1:
            self.insert(sequence, len(sequence.tokens) - 1)  # the last known token may not be computed yet

    def _expect_started(self, node: Node, sequence: Sequence) -> None:
        """Let a block depend on the earlier steps in flight that wrote its first tokens, too.

        The blocks behind it in the tree are removed with it.
        """
        for earlier in self.in_flight:
            if sequence in earlier.sequences or sequence in earlier.placed:
                earlier.expect(node)

    # ---- steps

    def plan_moves(self, step: StepPlan) -> None:
        """Add the evictions to host memory and disk to a step."""
        cache = self.cache
        if cache is None:
            return
        for source, shelf, slot, node in cache.leaving:
            (step.saved if shelf == HOST else step.spilled).append((source, slot))
            step.fresh.append(node)
        cache.leaving = []
        if cache.coming:
            step.received += ((slot, block) for block, slot in cache.coming.items())
            cache.coming = {}
        if cache.departing:
            step.sent += ((block, each.slot) for block, each in cache.departing)
            step.departing += (each for _, each in cache.departing)
            cache.departing = []

    def confirm(self, step: StepPlan) -> None:
        """Note that a step succeeded: the blocks that it wrote are valid."""
        self._take_out(step)
        for node in step.fresh:
            node.passes -= 1
        if step.received:
            self.exchange.read += (slot for slot, _ in step.received)
        if step.departing:
            self.exchange.written += step.departing
        for sequence, i, node in step.lent:
            if sequence.phase is Phase.RUNNING and self.cache is not None:
                self.cache.lend(node, _blocks_at(sequence.tables[1:], i))

    def disown(self, step: StepPlan, running: Iterable[Sequence]) -> list[Sequence]:
        """Remove the blocks that a failed step should have written; return the running sequences that share them."""
        self.exchange.read += (slot for slot, _ in step.received)
        self.exchange.free.extend(slot for _, slot in step.sent)
        unsaved = {slot for _, slot in step.saved}
        later = self._take_out(step)
        lost = {block for each in later for slot, block in each.restored if slot in unsaved}
        if self.cache is not None:
            for node in (*step.fresh, *filter(None, map(self.cache.node_at, lost))):
                lost.update(self.cache.remove(node))
        return [each for each in running if _has_any(each, lost)] if lost else []

    def _take_out(self, step: StepPlan) -> list[StepPlan]:
        """Remove a step from those in flight; return the steps that were planned after it."""
        if step not in self.in_flight:
            return []
        place = self.in_flight.index(step)
        del self.in_flight[place]
        return self.in_flight[place:]

    # ---- invariants

    def check(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """Check the tree, its host and disk blocks, and the path of every running sequence."""
        if self.cache is None:
            return
        self.cache.check()
        for number, shelf in enumerate(self.cache.shelves):
            shelf.check(saved for sequence in waiting for saved in sequence.saved if number == HOST)
        for sequence in running:
            self._check_path(sequence)

    def _check_path(self, sequence: Sequence) -> None:
        """Check that the nodes on a sequence's path hold its tokens and its blocks."""
        node, size = sequence.prefix.cursor, self._pool.block_size
        if node is None or (node.block < 0 and node.parent is not None) or sequence.prefix.is_private:
            return
        for i in reversed(range(sequence.prefix.kept)):
            assert node is not None
            assert node.block == sequence.tables[0].blocks[i]
            assert node.chunk == packed(sequence.tokens[i * size : (i + 1) * size])
            node = node.parent
        assert node is not None
        assert node.chunk == sequence.request.salt.encode()


def _blocks_at(tables: list[BlockTable], place: int) -> list[int]:
    """Return each table's block at a place, or -1 if it has none there."""
    return [table.blocks[place] if table.freed <= place < len(table.blocks) else -1 for table in tables]


def _has_any(sequence: Sequence, blocks: set[int]) -> bool:
    return any(not blocks.isdisjoint(table.blocks[table.freed :]) for table in sequence.tables)
