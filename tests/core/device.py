"""The fake device: an executor that computes marks instead of keys and values, and trusts no plan.

Every slot of every block, on the device, in host memory and on disk, holds the mark of the exact tokens it stands for
(fakes.py), and copies, saves, restores, spills and loads move these marks. An allocated block holds garbage until it is
written. A pass that fails leaves garbage wherever it was to write. One that fails at `collect` has left it there since
`launch`: the pass that the overlapped loop submits in between computes on garbage, without anyone knowing yet.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field, fields
from itertools import accumulate
from random import Random
from typing import NoReturn

import pytest
from fakes import VOCAB, likeliest, mark_after, marks_of, sample_masked

from chairlift.core.drafting import UNKNOWN
from chairlift.core.plan import StepPlan
from chairlift.core.request import Phase, Sequence
from chairlift.core.step import Candidates, PromptLogprobs, Sampling, Step, StepResult, TokenLogprobs

Score = TokenLogprobs | Candidates | None
GARBAGE = -1  # no mark is negative
_SENT = 16  # one step in so many is turned into text and read again, as if it came from another process
NO_TOKEN = 1 << 32
_UNKNOWN = -2  # what a token sampled from garbage must have in the cache: nothing is ever equal to it


class BrokenPassError(RuntimeError):
    """The failure that a test asked the executor for."""


@dataclass(slots=True)
class Row:
    """What the device knows of one seat: its tokens, what the cache must hold for them, and its block table."""

    tokens: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=lambda: [[]])  # of each group of layers
    index: int = 0
    sampling: Sampling | None = None
    owner: Sequence | None = None


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A pass under way. It holds numbers only: nothing of the step is read after `launch`."""

    result: StepResult
    is_broken: bool = False  # it wrote garbage, and `collect` will say so
    damaged: list[Sequence] = field(default_factory=list)  # sequences that read garbage of a broken pass
    # Samples to choose: their number, and what `_take` needs.
    masked: list[tuple[int, Row, list[int], list[int]]] = field(default_factory=list)
    taken: list[list[tuple[int, Score]]] = field(default_factory=list)  # by sample


class FakeExecutor:
    """Runs plans as a device would, in order, and proves at each that every slice finds its whole context in place.

    It computes from the step's numbers alone: a row's tokens from when the sequence was placed, those it sampled
    itself, and the table with its changes. It looks at the sequences of the plan only for the salt, to name them, and
    to know which blocks are new. A complaint is a pytest failure, which the engine, unlike an error of the executor,
    does not survive.
    """

    def __init__(
        self,
        seats: int,
        blocks: int,
        block_size: int,
        max_length: int,
        host_blocks: int = 0,
        disk_blocks: int = 0,
        windows: tuple[int, ...] = (0,),
        drafts: Random | None = None,
    ) -> None:
        self._random = drafts  # of drafts that are left to it
        self.block_size = block_size
        self.windows = windows  # of each group of layers; 0: it reads the whole context
        self.max_length = max_length
        self.rows = [Row() for _ in range(seats)]
        self.cache = [GARBAGE] * (blocks * block_size)  # one mark a slot
        self.host = [[GARBAGE] * block_size for _ in range(host_blocks)]
        self.disk = [[GARBAGE] * block_size for _ in range(disk_blocks)]
        self.incoming: dict[int, list[int]] = {}  # slots outside the pool, of blocks that have arrived
        self.outgoing: dict[int, list[int]] = {}  # and of evicted blocks that leave
        self.received = 0
        self.swapped = 0
        self.spilled = 0
        self.copied = 0
        self.breaks_at_submit = False
        self.breaks_at_collect = False
        self.breaks_at_choose = False
        self.accepted = 0  # drafts
        self.rejected = 0
        self.dropped = 0  # tokens that could not be chosen, behind accepted drafts
        self._in_flight: deque[LaunchedStep] = deque()
        self._steps = 0

    def launch(self, plan: Step) -> LaunchedStep:
        """The whole pass: a device that works in order might as well be done at once."""
        assert isinstance(plan, StepPlan)
        self._steps += 1
        step = Step(**{each.name: getattr(plan, each.name) for each in fields(Step)})
        if self._steps % _SENT == 0:
            step = Step.of_plain(json.loads(json.dumps(plan.plain())))
        if self.breaks_at_submit:
            self.breaks_at_submit = False
            self._leave_garbage(plan)
            for row in (*(each.row for each in step.newcomers), *step.table_rows, *step.rows):
                self.rows[row] = Row()
            raise BrokenPassError("the device fell off the bus")
        is_broken, self.breaks_at_collect = self.breaks_at_collect, False
        if self._in_flight and self._in_flight[-1].masked:
            complain("a step was launched before the masks of the step before came")
        self._move_blocks(step, plan)
        step.drafts = [(number, self._append_drafts(step, number, drafts)) for number, drafts in step.drafts]
        flat = self._write(step)
        if is_broken:
            self._leave_garbage(plan)
        damaged = self._verify_contexts(plan)
        if damaged and not is_broken and not self.is_doubtful:
            complain("; ".join(damaged.values()))
        launched = LaunchedStep(StepResult([], prompt_logprobs=self._score_prompts(step)), is_broken, list(damaged))
        self._sample(step, plan, flat, damaged, launched)
        self._in_flight.append(launched)
        return launched

    def _append_drafts(self, step: Step, number: int, drafts: list[int]) -> list[int]:
        """Write a sample's drafts to its row, and choose those that are left to the executor: some are right."""
        row, found = self.rows[step.sample_rows[number]], []
        assert row.sampling is not None
        for draft in drafts:
            token = draft
            if draft == UNKNOWN:
                assert self._random is not None and number not in step.masked
                token = sample_masked(row.marks[-1], row.sampling.seed, row.index, len(row.tokens), None) or 0
                token = token if self._random.random() < 0.7 else self._random.randrange(VOCAB)
            row.tokens.append(token)
            row.marks.append(mark_after(row.marks[-1], token))
            found.append(token)
        return found

    def choose(self, launched: LaunchedStep, masks: list[bytes | None]) -> None:
        """The samples that waited for their masks."""
        if self.breaks_at_choose:
            self.breaks_at_choose = False
            self._in_flight.remove(launched)
            for _, row, _, _ in launched.masked:
                row.tokens.append(0)  # whatever it is, its request is about to end
            raise BrokenPassError("the device lost the masks")
        if launched is not self._in_flight[-1]:
            complain("masks came for another step than the last")
        left = list(masks)
        for number, row, marks, drafts in launched.masked:
            launched.taken[number] = self._take(row, marks, drafts, left[: len(marks)])
            del left[: len(marks)]
        if left:
            complain(f"{len(left)} masks are for no token")
        launched.masked = []
        launched.result.failed = [number for number, taken in enumerate(launched.taken) if taken[0][0] == NO_TOKEN]

    def _take(
        self, row: Row, marks: list[int], drafts: list[int], masks: list[bytes | None]
    ) -> list[tuple[int, Score]]:
        """Sample behind each mark, as long as the tokens are those drafted.

        A token that cannot be chosen is a result only if no draft before it was accepted.
        """
        found: list[tuple[int, Score]] = []
        assert row.sampling is not None
        for mark, draft, mask in zip(marks, [*drafts, None], masks, strict=True):
            token = self._append(row, mark, mask)
            if token == NO_TOKEN and found:
                self.dropped += 1
                row.tokens.pop(), row.marks.pop()
                break
            found.append((token, self._score(row.sampling, token, mark)))
            if token != draft:
                break
        self.accepted += len(found) - 1
        self.rejected += len(drafts) - len(found) + 1
        return found

    def _append(self, row: Row, mark: int, mask: bytes | None = None) -> int:
        """Sample the next token of a row, behind a context that ends with `mark`."""
        assert row.sampling is not None
        token = sample_masked(mark, row.sampling.seed, row.index, len(row.tokens), mask)
        if token is None:  # its request ends, but a step in flight may read the place
            row.tokens.append(0)
            row.marks.append(_UNKNOWN)
            return NO_TOKEN
        row.tokens.append(token)
        row.marks.append(_UNKNOWN if mark == GARBAGE else mark_after(row.marks[-1], token))
        return token

    @property
    def is_doubtful(self) -> bool:
        """Whether a broken pass has not been collected: until then, passes behind it may read its garbage."""
        return any(launched.is_broken for launched in self._in_flight)

    def collect(self, launched: LaunchedStep) -> StepResult:
        """What the pass gave."""
        if launched is not self._in_flight.popleft():
            complain("steps were not collected in the order they were submitted")
        if launched.is_broken:
            raise BrokenPassError("the device never answered")
        for sequence in launched.damaged:
            if sequence.phase is not Phase.DONE:
                complain(f"{sequence} has read what a failed pass should have written, and goes on")
        result = launched.result
        result.tokens = [token for taken in launched.taken for token, _ in taken]
        scores = [score for taken in launched.taken for _, score in taken]
        result.logprobs = scores if any(scores) else None
        if result.counts is not None:
            result.counts = list(map(len, launched.taken))
        return result

    def _move_blocks(self, step: Step, plan: StepPlan) -> None:
        """Write newcomers to their rows, change tables, and copy blocks: all are read before any is written."""
        leaving = [self.read_block(source) for source, _ in step.saved]
        returning = {target: self.host[source] for source, target in step.restored}
        returning |= {target: self.disk[source] for source, target in step.loaded}
        arriving = {target: self.incoming[source] for source, target in step.received}
        if len(arriving) != len(step.received) or returning.keys() & arriving.keys():
            complain(f"two blocks are moved to one: {step.received} and {step.restored}")
        self.outgoing |= {target: self.read_block(source) for source, target in step.sent}
        self.received += len(arriving)
        spilling = [self.host[source] for source, _ in step.spilled]
        for pairs, read_from, shelf in ((step.spilled, spilling, self.disk), (step.saved, leaving, self.host)):
            if len({target for _, target in pairs}) != len(pairs):
                complain(f"two blocks are moved to one: {pairs}")
            for (_, target), marks in zip(pairs, read_from, strict=True):
                shelf[target] = marks
        self.spilled += len(step.loaded)
        self.swapped += len(returning)
        # Nothing is copied that came back in the same step: whoever shares a block has been here before.
        read = [self.read_block(source) for source, _ in step.copies]
        starts = {piece.sequence: piece.start for piece in plan.slices}
        self._spoil(list(returning))
        for target, marks in arriving.items():
            self._write_block(target, marks)
        for sequence, newcomer in zip(plan.placed, step.newcomers, strict=True):
            row = self.rows[newcomer.row]
            row.tokens, row.marks = list(newcomer.tokens), marks_of(newcomer.tokens, sequence.request.salt)
            row.tables = [list(blocks) for blocks in newcomer.tables]
            row.sampling, row.index = newcomer.sampling, newcomer.index
            is_moved = row.owner is sequence and sequence.is_search  # it goes on in blocks that it has, or shares
            row.owner = sequence
            if not is_moved and (sequence in starts or sequence not in plan.samples):  # siblings share what they have
                for blocks in row.tables:
                    self._spoil(blocks[starts.get(sequence, sequence.computed) // self.block_size :])
        for target, marks in returning.items():
            self._write_block(target, marks)
        groups = step.table_groups or [0] * len(step.table_rows)
        for number, place, block, group in zip(
            step.table_rows, step.table_places, step.table_blocks, groups, strict=True
        ):
            blocks = self.rows[number].tables[group]
            if place > len(blocks):
                complain(f"row {number} has {len(blocks)} blocks, and its block number {place} changed")
            blocks[place : place + 1] = [block]
            self._spoil([block])
        for (_, target), marks in zip(step.copies, read, strict=True):
            self._write_block(target, marks)
        if len({target for _, target in step.copies}) != len(step.copies):
            complain(f"two blocks are copied to one: {step.copies}")
        self.copied += len(step.copies)

    def _write(self, step: Step) -> list[int]:
        """Store every slice's tokens through its row's own table; the flat batch, as marks."""
        size, cache = self.block_size, self.cache
        flat: list[int] = []
        slots: list[int] = []
        for number, start, count in zip(step.rows, step.starts, step.counts, strict=True):
            row, end = self.rows[number], start + count
            if count < 1 or end > min(len(row.tokens), self.max_length - 1):
                complain(f"{row.owner} has a slice {start}:{end}, but the device knows {len(row.tokens)} tokens of it")
            if end > min(map(len, row.tables)) * size:
                complain(f"{row.owner} has a slice {start}:{end} and blocks of {size}: {row.tables}")
            for group, blocks in enumerate(row.tables):
                for position in range(start, end):
                    slot = blocks[position // size] * size + position % size
                    cache[slot] = mark_in(row.marks[position], group)
                    slots.append(slot)
            flat += row.marks[start:end]
        if len(set(slots)) != len(slots):
            complain("two slices write the same slot of a block")
        if len(flat) != step.tokens:
            complain(f"the step says {step.tokens} tokens, its slices hold {len(flat)}")
        return flat

    def _verify_contexts(self, plan: StepPlan) -> dict[Sequence, str]:
        """After all have written, each slice must find every token that it attends to: a wrong shared write shows here.

        A slice that does not writes garbage itself: returned are the sequences of such slices, with what is wrong.
        """
        damaged: dict[Sequence, str] = {}
        for sequence, start, count in plan.slices:
            row, end = self.rows[sequence.row], start + count
            for group, (blocks, window) in enumerate(zip(row.tables, self.windows, strict=True)):
                first = max(0, start - window + 1) if window else 0
                must = [mark_in(mark, group) for mark in row.marks[first:end]]
                wrong = [at for at, mark in enumerate(must, first) if self._read_slot(blocks, at) != mark]
                if wrong:
                    damaged[sequence] = (
                        f"{sequence} reads {first}:{end} of group {group}, "
                        f"but the cache holds something else at {wrong} of {blocks}"
                    )
            if sequence in damaged:
                for blocks in row.tables:
                    self._spoil_slots(blocks, start, end)
        return damaged

    def _sample(
        self, step: Step, plan: StepPlan, flat: list[int], damaged: dict[Sequence, str], launched: LaunchedStep
    ) -> None:
        """A token for each sample; for one with drafts, those accepted and one more."""
        ends, drafts = list(accumulate(step.counts)), dict(step.drafts)
        for sequence, end, count in zip(plan.sequences, ends, step.counts, strict=True) if damaged else ():
            if sequence in damaged:
                flat[end - count : end] = [GARBAGE] * count
        for number, at in enumerate(step.sampled_at):
            row, wanted, place = self.rows[step.sample_rows[number]], drafts.get(number, []), bisect_right(ends, at)
            position = step.starts[place] + step.counts[place] - (ends[place] - 1 - at)
            if position != len(row.tokens):
                complain(f"{row.owner} samples position {position}, the device knows {len(row.tokens)} of its tokens")
            del row.tokens[len(row.tokens) - len(wanted) :], row.marks[len(row.marks) - len(wanted) :]
            marks = flat[at - len(wanted) : at + 1]
            if number in step.masked:
                launched.masked.append((number, row, marks, wanted))
                launched.taken.append([])  # `choose` tells
            else:
                launched.taken.append(self._take(row, marks, wanted, [None] * len(marks)))
        launched.result.counts = [] if drafts else None

    def _score(self, sampling: Sampling, token: int, mark: int) -> Score:
        if sampling.alternatives is None:
            return None
        top = likeliest(mark, sampling.alternatives)
        if not sampling.params.use_beam_search:
            return TokenLogprobs(token, -1.0, 1, top)
        tokens, logprobs = zip(*likeliest(mark, sampling.params.width + len(sampling.stop_ids)), strict=True)
        return Candidates(list(tokens), list(logprobs), top)

    def _score_prompts(self, step: Step) -> list[tuple[int, PromptLogprobs]] | None:
        """The scores of prompt tokens, each from the token before it."""
        found = []
        for place, (number, start, count) in enumerate(zip(step.rows, step.starts, step.counts, strict=True)):
            row = self.rows[number]
            assert row.sampling is not None
            last = min(start + count, row.sampling.prompt_length - 1)
            if row.sampling.prompt_alternatives is not None and row.index == 0 and start < last:
                entries = [TokenLogprobs(token, -1.0, 1, []) for token in row.tokens[start + 1 : last + 1]]
                found.append((place, PromptLogprobs(start + 1, entries)))
        return found or None

    def _leave_garbage(self, plan: StepPlan) -> None:
        """A pass that broke: everything it was to write may hold anything."""
        self._spoil([target for _, target in (*plan.copies, *plan.restored, *plan.loaded, *plan.received)])
        for _, target in plan.sent:
            self.outgoing[target] = [GARBAGE] * self.block_size
        for pairs, shelf in ((plan.saved, self.host), (plan.spilled, self.disk)):
            for _, target in pairs:
                shelf[target] = [GARBAGE] * self.block_size
        for sequence, start, count in plan.slices:
            for table in sequence.tables:
                self._spoil_slots(table.blocks, start, start + count)

    def _spoil_slots(self, blocks: list[int], start: int, end: int) -> None:
        for position in range(start, end):
            self.cache[blocks[position // self.block_size] * self.block_size + position % self.block_size] = GARBAGE

    def _spoil(self, blocks: list[int]) -> None:
        for block in blocks:
            self._write_block(block, [GARBAGE] * self.block_size)

    def _read_slot(self, blocks: list[int], position: int) -> int:
        return self.cache[blocks[position // self.block_size] * self.block_size + position % self.block_size]

    def read_block(self, block: int) -> list[int]:
        """What a block of the device holds, slot by slot."""
        return self.cache[block * self.block_size : (block + 1) * self.block_size]

    def _write_block(self, block: int, marks: list[int]) -> None:
        self.cache[block * self.block_size : (block + 1) * self.block_size] = marks


def mark_in(mark: int, group: int) -> int:
    """What a group of layers stores for a mark: it tells the groups from one another."""
    return mark if mark < 0 else mark ^ group << 48


def complain(what: str) -> NoReturn:
    """Fail the test, through whoever catches errors in between."""
    pytest.fail(what)


def sequences_of(plan: StepPlan) -> list[Sequence]:
    """The sequences that a plan computes tokens of, in order."""
    return [piece.sequence for piece in plan.slices]
