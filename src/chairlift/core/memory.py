"""Memory: the blocks that sequences hold, on the device and in host memory."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

from chairlift.core.admission import Admission
from chairlift.core.beams import Beam
from chairlift.core.blocks import BlockPool, BlockTable
from chairlift.core.cache_groups import CacheGroups
from chairlift.core.plan import StepPlan
from chairlift.core.preemption import Preemption, Recompute, release_all
from chairlift.core.prefix_cache import PrefixCache
from chairlift.core.prefixes import PrefixBinding
from chairlift.core.request import Phase, Sequence


class Memory:
    """Allocates and frees the blocks of sequences, and notes in the step what the executor must move or write."""

    def __init__(
        self,
        pool: BlockPool,
        preemption: Preemption | None = None,
        prefix_cache: PrefixCache | None = None,
        groups: CacheGroups | None = None,
    ) -> None:
        self.pool = pool
        self.groups = groups or CacheGroups((0,), pool.block_size, chunk=1)
        self.preemption = preemption or Recompute()
        self.prefixes = PrefixBinding(pool, prefix_cache, self.groups)
        self.admission = Admission(pool, self.prefixes, self.groups)
        self.copied = 0  # cached blocks of which only the first tokens were of use
        self._is_plain = self.groups.is_plain

    @property
    def prefix_cache(self) -> PrefixCache | None:
        """The prefix cache, if there is one."""
        return self.prefixes.cache

    # ---- admission and the end

    def admit(self, step: StepPlan, sequence: Sequence) -> None:
        """Give a sequence the blocks of all its tokens, or of its next chunk in groups with a window."""
        path = self.prefixes.find(sequence)
        if self.prefix_cache is not None and self.prefix_cache.shelves:
            self.prefix_cache.drop_unsound(path)
        if sequence.saved and path:
            self.preemption.forget(sequence)
        if not sequence.saved:
            sequence.computed = len(path) * self.pool.block_size
        self.prefixes.share(sequence, path)
        source, common = self.prefixes.bind(sequence, path)
        sequence.computed += common
        self.free_outside_windows(sequence)
        held = self.prefixes.hold_shelved(path)
        self._allocate(sequence)
        self.prefixes.load_shelved(step, path, sequence, held)
        if sequence.saved:
            step.restored += self.preemption.resume(sequence)
            self.prefixes.insert(sequence, sequence.computed, step)  # as part of this step: its failure loses them
            return
        if source is not None:  # its blocks may have been reallocated, but they are read before anything is written
            targets = (table.blocks[len(path)] for table in sequence.tables)
            step.copies += zip(source, targets, strict=True)
            self.copied += 1

    def _allocate(self, sequence: Sequence) -> None:
        """Let a sequence write all its tokens, or its next chunk in groups with a window: these free blocks as it goes.

        A prompt in prefill waits for no block of other groups, and a settled sequence for none at all.
        """
        length, start = self.admission.reserved_length(sequence), sequence.computed
        for table, window in zip(sequence.tables, self.groups.windows, strict=True):
            if window and sequence.is_settled:
                self.pool.reserve(table, self.groups.blocks_within(window, length, start))
            self.pool.grow(table, min(length, start + self.groups.chunk) if window else length)

    def preempt(self, step: StepPlan, sequence: Sequence) -> None:
        """Free the blocks of a running sequence, and keep what it needs to be resumed."""
        self.prefixes.insert_answer(sequence)
        if sequence.is_search:
            sequence.rewind(sequence.in_flight)  # its candidates are computed again
        self.free_outside_windows(sequence)
        step.saved += self.preemption.leave(sequence, self.pool)
        sequence.prefix.cursor = None

    def end(self, sequence: Sequence) -> None:
        """Free all blocks of a sequence, on the device and in host memory."""
        if sequence.phase is Phase.RUNNING:
            self.prefixes.insert_answer(sequence)
            release_all(self.pool, sequence)
        else:
            self.preemption.forget(sequence)

    # ---- growth

    def held(self, sequence: Sequence) -> int:
        """Return the blocks that a running sequence has, shared ones included."""
        return sum(len(table.blocks) - table.freed for table in sequence.tables)

    def growth(self, sequences: Iterable[Sequence]) -> int:
        """Return the blocks that running sequences without a slice in this plan take for their next one."""
        return sum(self._growth(sequence) for sequence in sequences)

    def _growth(self, sequence: Sequence) -> int:
        length = min(sequence.length, sequence.limit)
        if self._is_plain:
            return self.pool.missing(sequence.tables[0], length)
        self.free_outside_windows(sequence)
        return self._missing(sequence, min(length, sequence.computed + self.groups.chunk))

    def can_grow(self, sequence: Sequence, length: int) -> bool:
        """Whether a sequence can write up to `length` tokens without a preemption."""
        return self._missing(sequence, length) <= self.pool.available

    def _missing(self, sequence: Sequence, length: int) -> int:
        return sum(self.pool.missing(table, length) for table in sequence.tables)

    def append(self, step: StepPlan, sequence: Sequence) -> bool:
        """Append one block, if that is all that the sequence needs and one is free."""
        table = sequence.tables[0]
        if not self._is_plain or not self.pool.append(table):
            return False
        blocks = table.blocks
        step.table_rows.append(sequence.row)
        step.table_places.append(len(blocks) - 1)
        step.table_blocks.append(blocks[-1])
        return True

    def grow(self, step: StepPlan, sequence: Sequence, length: int) -> None:
        """Let a sequence write up to `length` tokens; last blocks are copied if they are shared."""
        for group, table in enumerate(sequence.tables):
            first = len(table.blocks)
            copy = self.pool.grow(table, length)
            if copy:
                step.copies.append(copy)
                first -= 1
            changed = table.blocks[first:]
            step.table_rows += repeat(sequence.row, len(changed))
            step.table_places += range(first, first + len(changed))
            step.table_blocks += changed
            if not self._is_plain:
                step.table_groups += repeat(group, len(changed))

    def free_outside_windows(self, sequence: Sequence) -> None:
        """Free the blocks that no later token of a sequence attends to.

        Call it only before the sequence gets a slice in a plan: that slice may attend to blocks that later ones do not.
        """
        if self._is_plain:
            return
        # The least that it may be rewound to: rejected drafts, or candidates of a beam that is preempted, come again.
        start = sequence.computed - (sequence.in_flight if sequence.is_search else sequence.unchecked)
        for table, window in zip(sequence.tables, self.groups.windows, strict=True):
            self.pool.free_front(table, self.groups.first_block(window, start))

    # ---- forks

    def fork(self, sequence: Sequence, sibling: Sequence) -> None:
        """Let a sibling share all blocks of a sequence."""
        sibling.computed, sibling.length = sequence.computed, sequence.length
        for table in sequence.tables:
            self.pool.drop_reserve(table)  # the prompt's blocks are shared now
        sibling.tables = self._fork_tables(sequence)
        sibling.prefix = sequence.prefix.copy()
        sibling.cached = sequence.cached

    def follow(self, going: list[Beam], members: list[Sequence]) -> None:
        """Let each member continue a beam, as a fork of the sequence that computed it."""
        parents = [beam.parent for beam in going]
        tables = [self._fork_tables(parent) for parent in parents]
        places = [(list(each.tokens), each.computed, each.prefix.copy()) for each in parents]
        for member, beam, own, place in zip(members, going, tables, places, strict=True):
            release_all(self.pool, member)
            member.tables = own
            member.tokens, member.computed, member.prefix = place
            member.tokens.append(beam.token)
            member.length = len(member.tokens)

    def _fork_tables(self, sequence: Sequence) -> list[BlockTable]:
        return [self.pool.fork(table, sequence.computed) for table in sequence.tables]

    # ---- steps

    def finish(self, step: StepPlan) -> None:
        """Complete a plan: add the evictions, and note the step as in flight."""
        self.prefixes.plan_moves(step)
        if step:
            self.prefixes.in_flight.append(step)
        else:  # an empty step is not launched, so it saves nothing: all running sequences wait for tokens in flight
            self.disown(step, ())

    def confirm(self, step: StepPlan) -> None:
        """Note that a step succeeded."""
        self.prefixes.confirm(step)

    def disown(self, step: StepPlan, running: Iterable[Sequence]) -> list[Sequence]:
        """Drop what a failed step should have written or saved; return the running sequences that depend on it."""
        found = self.prefixes.disown(step, running)
        for sequence in step.preempted:  # the step may have failed before it saved anything
            if sequence.phase is Phase.WAITING:
                self.preemption.forget(sequence)
        step.saved.clear()
        return found

    def check(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """Check that every block is accounted for."""
        assert all(not table.blocks and table.spare is None for each in waiting for table in each.tables)
        assert not any(sequence.saved for sequence in running)
        self.pool.check(table for sequence in running for table in sequence.tables)
        self.preemption.check(waiting)
        self.prefixes.check(running, waiting)
        for sequence in running:
            assert sequence.tables[-1].writable == min(table.writable for table in sequence.tables)
            for table, window in zip(sequence.tables, self.groups.windows, strict=True):
                most = self.groups.blocks_within(window, max(sequence.limit, table.writable))
                assert len(table.blocks) - table.freed <= most, f"{sequence} has more blocks than its window needs"
