"""Memory: the blocks that sequences hold, on the device and in host memory."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

from chairlift.core.admission import Admission
from chairlift.core.beams import Beam
from chairlift.core.blocks import BlockPool
from chairlift.core.plan import StepPlan
from chairlift.core.preemption import Preemption, Recompute
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
        window: int = 0,
    ) -> None:
        assert not (window and prefix_cache), "a prefix whose first blocks are freed cannot be shared"
        self.pool = pool
        self.preemption = preemption or Recompute()
        self.prefixes = PrefixBinding(pool, prefix_cache)
        self.admission = Admission(pool, self.prefixes)
        self.copied = 0  # cached blocks of which only the first tokens were of use
        self._window = window  # tokens that the model attends to, if no layer attends to more; 0: all

    @property
    def prefix_cache(self) -> PrefixCache | None:
        """The prefix cache, if there is one."""
        return self.prefixes.cache

    # ---- admission and the end

    def admit(self, step: StepPlan, sequence: Sequence) -> None:
        """Give a sequence the blocks of all its tokens: a prompt in prefill never waits for memory."""
        path = self.prefixes.find(sequence)
        if self.prefix_cache is not None and self.prefix_cache.shelves:
            self.prefix_cache.drop_unsound(path)
        if sequence.saved.blocks and path:
            self.preemption.forget(sequence)
        self.pool.share(sequence.table, [node.block for node in path if node.block >= 0])
        source, common = self.prefixes.bind(sequence, path)
        held = self.prefixes.hold_shelved(path)
        self.pool.grow(sequence.table, self.admission.reserved_length(sequence))
        self.prefixes.load_shelved(step, path, sequence, held)
        if sequence.saved.blocks:
            step.restored += self.preemption.resume(sequence)
            self.prefixes.insert(sequence, sequence.computed, step)  # as part of this step: its failure loses them
            return
        sequence.computed = len(path) * self.pool.block_size
        if common:  # the source may have been reallocated, but it is read before anything is written
            step.copies.append((source, sequence.table.blocks[len(path)]))
            sequence.computed += common
            self.copied += 1

    def preempt(self, step: StepPlan, sequence: Sequence) -> None:
        """Free the blocks of a running sequence, and keep what it needs to be resumed."""
        self.prefixes.insert_answer(sequence)
        if sequence.is_search:
            sequence.rewind(sequence.in_flight)  # its candidates are computed again
        step.saved += self.preemption.leave(sequence, self.pool)
        sequence.prefix.cursor = None

    def end(self, sequence: Sequence) -> None:
        """Free all blocks of a sequence, on the device and in host memory."""
        if sequence.phase is Phase.RUNNING:
            self.prefixes.insert_answer(sequence)
            self.pool.release(sequence.table)
        else:
            self.preemption.forget(sequence)

    # ---- growth

    def growth(self, sequence: Sequence) -> int:
        """Return the blocks that a running sequence takes for its next token."""
        return self.pool.missing(sequence.table, min(sequence.length, sequence.limit))

    def can_grow(self, sequence: Sequence, length: int) -> bool:
        """Whether a sequence can write up to `length` tokens without a preemption."""
        return self.pool.missing(sequence.table, length) <= self.pool.available

    def append(self, step: StepPlan, sequence: Sequence) -> bool:
        """Append one block, if that is all that the sequence needs and one is free."""
        blocks = sequence.table.blocks
        if not self.pool.append(sequence.table):
            return False
        step.table_rows.append(sequence.row)
        step.table_places.append(len(blocks) - 1)
        step.table_blocks.append(blocks[-1])
        return True

    def grow(self, step: StepPlan, sequence: Sequence, length: int) -> None:
        """Let a sequence write up to `length` tokens; its last block is copied if it is shared."""
        first = len(sequence.table.blocks)
        copy = self.pool.grow(sequence.table, length)
        if copy:
            step.copies.append(copy)
            first -= 1
        changed = sequence.table.blocks[first:]
        step.table_rows += repeat(sequence.row, len(changed))
        step.table_places += range(first, first + len(changed))
        step.table_blocks += changed

    def free_outside_window(self, sequence: Sequence) -> None:
        """Free the blocks that no later token of a sequence attends to."""
        if self._window and sequence.computed >= self._window:
            self.pool.free_front(sequence.table, (sequence.computed - self._window + 1) // self.pool.block_size)

    # ---- forks

    def fork(self, sequence: Sequence, sibling: Sequence) -> None:
        """Let a sibling share all blocks of a sequence."""
        sibling.computed, sibling.length = sequence.computed, sequence.length
        sibling.table = self.pool.fork(sequence.table, sequence.computed)
        sibling.prefix.cursor, sibling.prefix.kept = sequence.prefix.cursor, sequence.prefix.kept
        sibling.cached = sequence.cached

    def follow(self, going: list[Beam], members: list[Sequence]) -> None:
        """Let each member continue a beam, as a fork of the sequence that computed it."""
        parents = [beam.parent for beam in going]
        tables = [self.pool.fork(parent.table, parent.computed) for parent in parents]
        places = [(list(each.tokens), each.computed, each.prefix.cursor, each.prefix.kept) for each in parents]
        for member, beam, table, place in zip(members, going, tables, places, strict=True):
            self.pool.release(member.table)
            member.table = table
            member.tokens, member.computed, member.prefix.cursor, member.prefix.kept = place
            member.tokens.append(beam.token)
            member.length = len(member.tokens)

    # ---- steps

    def finish(self, step: StepPlan) -> None:
        """Complete a plan: add the evictions, and note the step as in flight."""
        self.prefixes.plan_moves(step)
        if step.sequences:
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
        assert all(not sequence.table.blocks for sequence in waiting)
        assert all(not sequence.saved.blocks for sequence in running)
        self.pool.check(sequence.table for sequence in running)
        self.preemption.check(waiting)
        self.prefixes.check(running, waiting)
