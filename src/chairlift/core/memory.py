"""Memory: which sequence gets which blocks, and what it must find free to get a seat."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

from chairlift.core.beams import Beam
from chairlift.core.blocks import BlockPool, BlockTable
from chairlift.core.errors import RequestError
from chairlift.core.plan import StepPlan
from chairlift.core.preemption import Preemption, Recompute
from chairlift.core.prefix_cache import HOST, Node, PrefixCache, packed
from chairlift.core.request import Phase, Request, Sequence
from chairlift.core.watermark import Watermark

# One that has yielded so often gets all the memory it can ever need when it next runs, and yields no more.
YIELDS = 3
_PART = 4  # a block is copied for its first tokens if they are at least one in so many


class Memory:
    """The blocks on the device, what they can be found by, and those that wait in host memory."""

    def __init__(
        self,
        pool: BlockPool,
        preemption: Preemption | None = None,
        prefix_cache: PrefixCache | None = None,
        window: int = 0,
    ) -> None:
        assert not (window and prefix_cache), "a prefix that is partly gone cannot be shared"
        self.pool = pool
        self.window = window  # tokens that the model sees, if no layer sees more; 0: all
        self.prefix_cache = prefix_cache
        self.watermark = Watermark(pool.total)
        self.preemption = preemption or Recompute()
        self.copied = 0  # blocks of which only the first tokens were of use
        self.running: list[Sequence] = []  # whose answers others may begin with
        self.is_behind = False  # whether tokens have come since these were last looked at
        self.in_flight: list[StepPlan] = []  # passes that have neither come back nor failed, in order

    # ---- questions

    def check_beams(self, request: Request, limit: int) -> None:
        """Refuse beams that could not all be here at once: they go on together or not at all."""
        most = request.params.width * self.pool.blocks_for(limit)
        if request.params.use_beam_search and most > self.pool.total:
            raise RequestError(
                f"{request.params.width} beams of up to {limit} tokens may take {most} KV blocks and there are "
                f"{self.pool.total}: lower n, best_of or max_tokens"
            )

    # Three questions look a sequence up in the prefix cache, unless they are given the path that `look_up` has found.

    def needs(self, sequence: Sequence, path: list[Node] | None = None) -> int:
        """Blocks that a waiting sequence and its followers take with their seats, of those that can be had."""
        own = self._needs(sequence, self._find(sequence) if path is None else path)
        look = self._find if path is None else self.look_up
        # Followers may share blocks with it, which are then counted twice: all beams fit side by side (check_beams).
        return own + sum(self._needs(each, look(each)) for each in sequence.followers)

    def _needs(self, sequence: Sequence, path: list[Node]) -> int:
        shared = len(path)
        while shared and not ((block := path[shared - 1].block) >= 0 and self.pool.is_held(block)):
            shared -= 1  # nobody has it yet, so it is one less for others
        return self.pool.blocks_for(self._claim(sequence)) - shared

    def growth(self, sequence: Sequence) -> int:
        """Blocks that a running sequence takes for its next token."""
        return self.pool.missing(sequence.table, min(sequence.length, sequence.limit))

    def is_settled(self, sequence: Sequence) -> bool:
        """Whether it has been preempted so often that it now has all its memory, and is not preempted again.

        Beams never have: they fork at every token, so that none of them can own the blocks it will need.
        """
        return sequence.preemptions >= YIELDS and sequence.beams is None

    def has_room(self, sequence: Sequence, is_alone: bool, path: list[Node] | None = None) -> bool:
        """Whether it fits, with the watermark to spare unless nobody runs."""
        spare = 0 if is_alone else self.watermark.blocks
        return self.needs(sequence, path) + spare <= self.pool.available

    def known(self, sequence: Sequence, path: list[Node] | None = None) -> int:
        """Tokens of a waiting sequence that need not be computed."""
        path = self._find(sequence) if path is None else path
        return max(sequence.computed, len(path) * self.pool.block_size)

    def look_up(self, sequence: Sequence) -> list[Node]:
        """Return the cached blocks that a waiting sequence could begin with, and change nothing.

        Unlike a plan, it does not first let the growing answers of running sequences be found.
        """
        if self.prefix_cache is None or sequence.request.params.prompt_logprobs is not None:
            return []
        path = list(sequence.prefix.path)
        self._match(sequence, path, packed(sequence.tokens))
        return self._of_use(sequence, path)

    def can_grow(self, sequence: Sequence, length: int) -> bool:
        """Whether it can write up to `length` tokens without anybody having to yield."""
        return self.pool.missing(sequence.table, length) <= self.pool.available

    # ---- in and out

    def seat(self, step: StepPlan, sequence: Sequence) -> None:
        """All blocks of what is known at once: a prompt under way never has to wait for memory."""
        path = self._find(sequence)
        if self.prefix_cache is not None and self.prefix_cache.shelves:
            self.prefix_cache.drop_unsound(path)
        if sequence.saved.blocks and path:
            self.preemption.forget(sequence)
        here = [node.block for node in path if node.block >= 0]
        self.pool.share(sequence.table, here)
        source, common = self._begin(sequence, path)
        held = self._hold_shelved(path)
        self.pool.grow(sequence.table, self._claim(sequence))
        self._bring_back(step, path, sequence, held)
        if sequence.saved.blocks:
            step.restored += self.preemption.come_back(sequence)
            self.keep(sequence, sequence.computed, step)  # as part of this pass: if it fails, they hold garbage
            return
        sequence.computed = len(path) * self.pool.block_size
        if common:  # the source may have been given away by now, but it is read before anything is written
            step.copies.append((source, sequence.table.blocks[len(path)]))
            sequence.computed += common
            self.copied += 1

    def shed(self, sequence: Sequence) -> None:
        """Free the blocks that its next token, and so all that follow, cannot see."""
        if self.window and sequence.computed >= self.window:
            self.pool.shed(sequence.table, (sequence.computed - self.window + 1) // self.pool.block_size)

    def append(self, step: StepPlan, sequence: Sequence) -> bool:
        """Let it write one block more, if that is all it takes."""
        blocks = sequence.table.blocks
        if not self.pool.append(sequence.table):
            return False
        step.table_rows.append(sequence.row)
        step.table_places.append(len(blocks) - 1)
        step.table_blocks.append(blocks[-1])
        return True

    def grow(self, step: StepPlan, sequence: Sequence, length: int) -> None:
        """Let it write up to `length` tokens."""
        first = len(sequence.table.blocks)
        copy = self.pool.grow(sequence.table, length)
        if copy:
            step.copies.append(copy)
            first -= 1
        changed = sequence.table.blocks[first:]
        step.table_rows += repeat(sequence.row, len(changed))
        step.table_places += range(first, first + len(changed))
        step.table_blocks += changed

    def fork(self, sequence: Sequence, sibling: Sequence) -> None:
        """Give a sibling the same blocks."""
        sibling.computed, sibling.length = sequence.computed, sequence.length
        sibling.table = self.pool.fork(sequence.table, sequence.computed)
        sibling.prefix.cursor, sibling.prefix.kept = sequence.prefix.cursor, sequence.prefix.kept
        sibling.cached = sequence.cached

    def follow(self, going: list[Beam], members: list[Sequence]) -> None:
        """Each member goes on as a fork of the sequence that its beam continues."""
        parents = [beam.parent for beam in going]
        tables = [self.pool.fork(parent.table, parent.computed) for parent in parents]
        places = [(list(each.tokens), each.computed, each.prefix.cursor, each.prefix.kept) for each in parents]
        for member, beam, table, place in zip(members, going, tables, places, strict=True):
            self.pool.release(member.table)
            member.table = table
            member.tokens, member.computed, member.prefix.cursor, member.prefix.kept = place
            member.tokens.append(beam.token)
            member.length = len(member.tokens)

    def yield_all(self, step: StepPlan, victim: Sequence) -> None:
        """It gives up its blocks and will come back."""
        self._keep_answer(victim)
        if victim.beams is not None:
            victim.rewind(victim.in_flight)  # its candidates are computed again
        step.saved += self.preemption.leave(victim, self.pool)
        victim.prefix.cursor = None

    def end(self, sequence: Sequence) -> None:
        """It gives up all it has, here and in host memory."""
        if sequence.phase is Phase.RUNNING:
            self._keep_answer(sequence)
            self.pool.release(sequence.table)
        else:
            self.preemption.forget(sequence)

    def finish(self, step: StepPlan) -> None:
        """A plan is made: what must move for it."""
        cache = self.prefix_cache
        for source, shelf, slot, node in cache.leaving if cache is not None else ():
            (step.saved if shelf == HOST else step.spilled).append((source, slot))
            step.fresh.append(node)
        if cache is not None:
            cache.leaving = []
        if step.sequences:
            self.in_flight.append(step)
        else:  # nothing runs, so nothing is saved either: all that is left waits for a token in flight
            self.disown(step, ())

    def drop_saved(self, step: StepPlan) -> None:
        """What the plan wanted to save was not, or may not have been."""
        for sequence in step.preempted:
            if sequence.phase is Phase.WAITING:
                self.preemption.forget(sequence)
        step.saved.clear()

    # ---- what others may find

    def keep(self, sequence: Sequence, computed: int, step: StepPlan | None = None) -> None:
        """Let those blocks be found that `computed` tokens fill; in the pass of `step`, or before now if there is none.

        Within a pass every layer stores before it attends, so those who sit down behind it in the same plan may share.
        """
        prefix, cache, size = sequence.prefix, self.prefix_cache, self.pool.block_size
        node, first, full = prefix.cursor, prefix.kept, computed // size
        if cache is None or node is None or full <= first:
            return
        tokens, blocks = sequence.tokens, sequence.table.blocks
        for i in range(first, full):
            node = cache.insert(node, cache.pack(*tokens[i * size : (i + 1) * size]), blocks[i])
            if node is None:  # another with the same tokens was faster: what follows stays private
                break
            if step is not None:
                step.expect(node)
                if i == first:
                    self._expect_begun(node, sequence)
        prefix.cursor, prefix.kept = node, full

    def _expect_begun(self, node: Node, sequence: Sequence) -> None:
        """A block that earlier passes in flight have begun to fill holds what they wrote only if they succeed, too.

        The blocks behind it in the tree are lost with it.
        """
        for earlier in self.in_flight:
            if sequence in earlier.sequences or sequence in earlier.placed:
                earlier.expect(node)

    def _keep_answer(self, sequence: Sequence) -> None:
        """Let the blocks of its answer be found; a prompt's can be already."""
        if sequence.beams is None and sequence.computed >= len(sequence.tokens) - 1:
            self.keep(sequence, len(sequence.tokens) - 1)  # the last that came is not in the cache

    def confirm(self, step: StepPlan) -> None:
        """The pass has come back: what it wrote is there."""
        self._land(step)
        for node in step.fresh:
            node.passes -= 1

    def disown(self, step: StepPlan, running: Iterable[Sequence]) -> list[Sequence]:
        """The pass has failed: let no sequence find what it should have written; return those that already have it."""
        unsaved = {slot for _, slot in step.saved}
        later = self._land(step)
        lost = {block for each in later for slot, block in each.restored if slot in unsaved}
        self.drop_saved(step)  # it may have broken before anything was saved
        cache = self.prefix_cache
        if cache is not None:
            for node in (*step.fresh, *filter(None, map(cache.node_at, lost))):
                lost.update(cache.remove(node))
        return [each for each in running if not lost.isdisjoint(each.table.blocks)] if lost else []

    def _land(self, step: StepPlan) -> list[StepPlan]:
        """Count a pass out of those in flight; return those that were planned after it."""
        if step not in self.in_flight:
            return []
        place = self.in_flight.index(step)
        del self.in_flight[place]
        return self.in_flight[place:]

    def check(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """Prove that every block is accounted for."""
        assert all(not sequence.table.blocks for sequence in waiting)
        assert all(not sequence.saved.blocks for sequence in running)
        self.pool.check(sequence.table for sequence in running)
        self.preemption.check(waiting)
        if self.prefix_cache is not None:
            self.prefix_cache.check()
            for number, shelf in enumerate(self.prefix_cache.shelves):
                shelf.check(sequence.saved for sequence in waiting if number == HOST)
            for sequence in running:
                self._check_path(sequence)

    def _check_path(self, sequence: Sequence) -> None:
        """The blocks that can be found by a sequence's tokens are its own."""
        node, size = sequence.prefix.cursor, self.pool.block_size
        if node is None or (node.block < 0 and node.parent is not None):
            return
        for i in reversed(range(sequence.prefix.kept)):
            assert node is not None
            assert node.block == sequence.table.blocks[i]
            assert node.chunk == packed(sequence.tokens[i * size : (i + 1) * size])
            node = node.parent
        assert node is not None
        assert node.chunk == sequence.request.salt.encode()

    def _find(self, sequence: Sequence) -> list[Node]:
        """The cached blocks that a waiting sequence can begin with."""
        if self.prefix_cache is None or sequence.request.params.prompt_logprobs is not None:
            return []
        prefix, tokens, size = sequence.prefix, sequence.tokens, self.pool.block_size
        if self.is_behind:  # answers grow at every step, and few steps see somebody who looks
            for each in self.running:
                if len(each.tokens) > (each.prefix.kept + 1) * size:
                    self._keep_answer(each)
            self.is_behind = False
        if len(prefix.key) != 4 * len(tokens):
            prefix.key = packed(tokens)
        self._match(sequence, prefix.path, prefix.key)
        return self._of_use(sequence, prefix.path)

    def _match(self, sequence: Sequence, path: list[Node], key: bytes) -> None:
        assert self.prefix_cache is not None
        # Not the last token: to have its successor, it must be computed.
        most = (len(sequence.tokens) - 1) // self.pool.block_size
        self.prefix_cache.match(path, sequence.request.salt, key, most)

    def _of_use(self, sequence: Sequence, path: list[Node]) -> list[Node]:
        """Return as much of a path as is cheaper to read than to compute: nothing if more of the sequence was saved."""
        assert self.prefix_cache is not None
        if self.prefix_cache.shelves:
            path = path[: self.prefix_cache.weigh(path)]
        return path if len(path) * self.pool.block_size > sequence.computed else []

    def _begin(self, sequence: Sequence, path: list[Node]) -> tuple[int, int]:
        """It sits down behind `path`; a block that begins with its next tokens, and with how many, if copying pays."""
        if self.prefix_cache is None:
            return -1, 0
        prefix, tokens, size = sequence.prefix, sequence.tokens, self.pool.block_size
        salt, behind = sequence.request.salt, len(path) * size
        prefix.cursor = path[-1] if path else self.prefix_cache.root(salt)
        prefix.kept = len(path)
        prefix.path, prefix.key = [], b""
        rest = tokens[behind : min(behind + size, len(tokens) - 1)]
        if len(rest) * _PART < size or sequence.saved.blocks or sequence.request.params.prompt_logprobs is not None:
            return -1, 0
        block, common = self.prefix_cache.match_part(path, salt, rest)
        return (block, common) if common * _PART >= size else (-1, 0)

    def _hold_shelved(self, path: list[Node]) -> list[BlockTable]:
        """See to it that what is to come back is not dropped to make room for what leaves."""
        shelves = [] if self.prefix_cache is None else self.prefix_cache.shelves
        held = [BlockTable() for _ in shelves]
        for node in path:
            if node.block < 0:
                shelves[node.shelf].share(held[node.shelf], [node.slot])
        return held

    def _bring_back(self, step: StepPlan, path: list[Node], sequence: Sequence, held: list[BlockTable]) -> None:
        cache = self.prefix_cache
        if cache is None or all(node.block >= 0 for node in path):
            return
        for node in path:
            if node.block < 0:
                step.expect(node)
        for number, slot, block in cache.bring_back(path, sequence.table):
            (step.restored if number == HOST else step.loaded).append((slot, block))
        for shelf, table in zip(cache.shelves, held, strict=True):
            shelf.release(table)

    def _claim(self, sequence: Sequence) -> int:
        """Tokens it must have room for: what is known, or all it can become if it has yielded too often.

        Not before it forks: siblings share its blocks, and none may share one that another is yet to write.
        """
        return sequence.limit if self.is_settled(sequence) and sequence.is_forked else len(sequence.tokens)
