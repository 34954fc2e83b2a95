"""A model that costs nothing, an executor that trusts nobody, and a clock that stands still.

The model is autoregressive like a real one: what it stores for a token depends on every token before it, and the token
it samples depends on that context, the request's seed, the sibling's index and the position; on nothing else. So an
answer is known before it is served, and whatever the scheduler does to it must not show.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Sized
from dataclasses import dataclass, field
from typing import NoReturn

import pytest

from chairlift.core.plan import Candidates, PromptLogprobs, StepPlan, StepResult, TokenLogprobs
from chairlift.core.request import FinishReason, Request, Sequence

VOCAB = 64
Score = TokenLogprobs | Candidates | None
_GARBAGE = -1  # no mark is negative


def mark_after(mark: int, token: int) -> int:
    """What the cache holds for a token: it tells this token and all before it from any others."""
    return hash((mark, token)) & 0xFFFF_FFFF_FFFF


def marks_of(tokens: Sized[int]) -> list[int]:
    """What the cache holds for each of `tokens` when they stand at the beginning."""
    marks, mark = [], 0
    for token in tokens:
        mark = mark_after(mark, token)
        marks.append(mark)
    return marks


def sample(mark: int, seed: int, index: int, position: int) -> int:
    """The token at `position`, behind a context that ends with `mark`."""
    return hash((mark, seed, index, position)) % VOCAB


def answer_to(request: Request, index: int, limit: int) -> tuple[list[int], FinishReason]:
    """What the model answers, alone and without a cache, to a request whose sequences may hold `limit` tokens."""
    tokens: list[int] = []
    mark = marks_of(request.prompt)[-1]
    for position in range(len(request.prompt), limit):
        token = sample(mark, request.seed, index, position)
        tokens.append(token)
        if token in request.stop_ids:
            return tokens, FinishReason.STOP
        mark = mark_after(mark, token)
    return tokens, FinishReason.LENGTH


def likeliest(mark: int, count: int) -> list[tuple[int, float]]:
    """The likeliest tokens behind a context that ends with `mark`, with log-probabilities that are all distinct."""
    first = hash((mark, "first")) % VOCAB
    return [((first + 5 * i) % VOCAB, -0.2 * (i + hash((mark, i)) % 1000 / 1000)) for i in range(min(count, VOCAB))]


def beams_to(request: Request, limit: int) -> list[tuple[list[int], FinishReason]]:
    """What a beam search of the model gives, alone and without a cache, written apart from the one in the core."""
    params, stops = request.params, request.stop_ids
    width, longest = params.width, limit - len(request.prompt)
    spare = 1 + max(1, len(stops))
    going: list[tuple[float, list[int], int]] = [(0.0, [], marks_of(request.prompt)[-1])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, longest + 1):
        offers = [
            (score + logprob, [*tokens, token], mark_after(mark, token))
            for score, tokens, mark in going
            for token, logprob in likeliest(mark, width * spare)
        ]
        offers = sorted(offers, key=lambda offer: -offer[0])[: spare * width]
        is_full, going = len(ended) == width, []
        for rank, (score, tokens, mark) in enumerate(offers):
            if tokens[-1] in stops or length == longest:
                if rank < width and not (is_full and params.early_stopping is True):
                    ended.append((score / length**params.length_penalty, tokens))
            elif len(going) < width:
                going.append((score, tokens, mark))
        ended = sorted(ended, key=lambda beam: -beam[0])[:width]
        if not going:
            break
        reach = longest if params.early_stopping == "never" and params.length_penalty > 0 else length
        best = going[0][0] / reach**params.length_penalty
        if len(ended) == width and (params.early_stopping is True or best <= ended[-1][0]):
            break
    found = [tokens for _, tokens in ended[: params.n]]
    return [(each, FinishReason.STOP if each[-1] in stops else FinishReason.LENGTH) for each in found]


class ManualClock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


class BrokenPassError(RuntimeError):
    """The failure that a test asked the executor for."""


@dataclass(slots=True)
class Row:
    """What the device knows of one seat: its tokens, what the cache must hold for them, and its block table."""

    tokens: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    seed: int = 0
    index: int = 0
    owner: Sequence | None = None


@dataclass(slots=True, eq=False)
class Ticket:
    """A pass under way. It holds numbers only: nothing of the plan is read after `submit`."""

    result: StepResult


class FakeExecutor:
    """Runs plans as a device would, in order, and proves at each that every slice finds its whole context in place.

    It knows what a real one knows: a row's tokens from when the sequence was placed, those it sampled itself, and a
    table as it was when the plan last said that it changed. A block that changes hands holds garbage until it is
    written. A complaint is a pytest failure, which the engine, unlike an error of the executor, does not survive.
    """

    def __init__(
        self, seats: int, blocks: int, block_size: int, max_length: int, host_blocks: int = 0, disk_blocks: int = 0
    ) -> None:
        self.block_size = block_size
        self.max_length = max_length
        self.rows = [Row() for _ in range(seats)]
        self.cache = [_GARBAGE] * (blocks * block_size)  # one mark a slot
        self.host = [[_GARBAGE] * block_size for _ in range(host_blocks)]
        self.disk = [[_GARBAGE] * block_size for _ in range(disk_blocks)]
        self.swapped = 0
        self.spilled = 0
        self.copied = 0
        self.breaks_at_submit = False
        self.breaks_at_collect = False
        self._in_flight: deque[Ticket] = deque()

    def submit(self, plan: StepPlan) -> Ticket:
        """The whole pass: a device that works in order might as well be done at once."""
        if self.breaks_at_submit:
            self.breaks_at_submit = False
            self._leave_garbage(plan)
            raise BrokenPassError("the device fell off the bus")
        self._move_blocks(plan)
        flat = self._write(plan)
        self._verify_contexts(plan)
        ticket = Ticket(StepResult(*self._sample(plan, flat), self._score_prompts(plan)))
        self._in_flight.append(ticket)
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        """What the pass gave."""
        if ticket is not self._in_flight.popleft():
            complain("steps were not collected in the order they were submitted")
        if self.breaks_at_collect:
            self.breaks_at_collect = False
            raise BrokenPassError("the device never answered")
        return ticket.result

    def _move_blocks(self, plan: StepPlan) -> None:
        """Take in who sat down and whose table changed, and copy blocks: all are read before any is written."""
        leaving = [self._read_block(source) for source, _ in plan.saved]
        returning = {target: self.host[source] for source, target in plan.restored}
        returning |= {target: self.disk[source] for source, target in plan.loaded}
        spilling = [self.host[source] for source, _ in plan.spilled]
        for pairs, read_from, shelf in ((plan.spilled, spilling, self.disk), (plan.saved, leaving, self.host)):
            if len({target for _, target in pairs}) != len(pairs):
                complain(f"two blocks are moved to one: {pairs}")
            for (_, target), marks in zip(pairs, read_from, strict=True):
                shelf[target] = marks
        self.spilled += len(plan.loaded)
        self.swapped += len(returning)
        # Nothing is copied that came back in the same step: whoever shares a block has been here before.
        read = [self._read_block(source) for source, _ in plan.copies]
        starts = {piece.sequence: piece.start for piece in plan.slices}
        self._spoil(list(returning))
        for sequence in plan.placed:
            row = self.rows[sequence.row]
            row.tokens, row.marks = list(sequence.tokens), marks_of(sequence.tokens)
            row.blocks = list(sequence.table.blocks)
            row.seed, row.index = sequence.request.seed, sequence.index
            is_moved = (
                row.owner is sequence and sequence.beams is not None
            )  # it goes on in blocks that it has, or shares
            row.owner = sequence
            if not is_moved and (sequence in starts or sequence not in plan.samples):  # siblings share what they have
                self._spoil(row.blocks[starts.get(sequence, sequence.computed) // self.block_size :])
        for target, marks in returning.items():
            self._write_block(target, marks)
        for sequence in plan.grown:
            row = self.rows[sequence.row]
            known, row.blocks = len(row.blocks), list(sequence.table.blocks)
            self._spoil(row.blocks[known:])
        for (_, target), marks in zip(plan.copies, read, strict=True):
            self._write_block(target, marks)
        if len({target for _, target in plan.copies}) != len(plan.copies):
            complain(f"two blocks are copied to one: {plan.copies}")
        self.copied += len(plan.copies)

    def _write(self, plan: StepPlan) -> list[int]:
        """Store every slice's tokens through its row's own table; the flat batch, as marks."""
        size, cache = self.block_size, self.cache
        flat: list[int] = []
        slots: list[int] = []
        for sequence, start, count in plan.slices:
            row, end = self.rows[sequence.row], start + count
            if count < 1 or end > min(len(row.tokens), self.max_length - 1):
                complain(f"{sequence} has a slice {start}:{end}, but the device knows {len(row.tokens)} tokens of it")
            if end > len(row.blocks) * size:
                complain(f"{sequence} has a slice {start}:{end} and {len(row.blocks)} blocks of {size}")
            for position in range(start, end):
                slot = row.blocks[position // size] * size + position % size
                cache[slot] = row.marks[position]
                slots.append(slot)
            flat += row.marks[start:end]
        if len(set(slots)) != len(slots):
            complain("two slices write the same slot of a block")
        if len(slots) != plan.tokens:
            complain(f"the plan says {plan.tokens} tokens, its slices hold {len(slots)}")
        return flat

    def _verify_contexts(self, plan: StepPlan) -> None:
        """After all have written, each slice must find every token before its end: a wrong shared write shows here."""
        for sequence, start, count in plan.slices:
            row, end = self.rows[sequence.row], start + count
            context: list[int] = []
            for block in row.blocks[: -(-end // self.block_size)]:
                context += self._read_block(block)
            if context[:end] != row.marks[:end]:
                wrong = [at for at, (is_, must) in enumerate(zip(context, row.marks, strict=False)) if is_ != must]
                complain(f"{sequence} reads 0:{end}, but the cache holds something else at {wrong} of {row.blocks}")

    def _sample(self, plan: StepPlan, flat: list[int]) -> tuple[list[int], list[Score] | None]:
        sampled: list[int] = []
        scores: list[Score] = []
        for sequence, at in zip(plan.samples, plan.sampled_at, strict=True):
            row, position = self.rows[sequence.row], sequence.computed
            if position != len(row.tokens):
                complain(f"{sequence} samples position {position}, but the device knows {len(row.tokens)} tokens of it")
            token = sample(flat[at], row.seed, row.index, position)
            row.tokens.append(token)
            row.marks.append(mark_after(row.marks[-1], token))
            sampled.append(token)
            scores.append(self._score(sequence.request, token, flat[at]))
        return sampled, scores if any(scores) else None

    def _score(self, request: Request, token: int, mark: int) -> Score:
        if request.scored is None:
            return None
        top = likeliest(mark, request.scored)
        if not request.params.use_beam_search:
            return TokenLogprobs(token, -1.0, 1, top)
        tokens, logprobs = zip(*likeliest(mark, request.params.width + len(request.stop_ids)), strict=True)
        return Candidates(list(tokens), list(logprobs), top)

    def _score_prompts(self, plan: StepPlan) -> list[tuple[Sequence, PromptLogprobs]] | None:
        """The scores of prompt tokens, each from the token before it."""
        found = []
        for sequence, start, count in plan.slices:
            last = min(start + count, sequence.prompt_length - 1)
            if sequence.request.params.prompt_logprobs is not None and sequence.index == 0 and start < last:
                tokens = self.rows[sequence.row].tokens[start + 1 : last + 1]
                entries = [TokenLogprobs(token, -1.0, 1, []) for token in tokens]
                found.append((sequence, PromptLogprobs(start + 1, entries)))
        return found or None

    def _leave_garbage(self, plan: StepPlan) -> None:
        """A pass that broke half-way: everything it would have written may hold anything."""
        self._spoil([target for _, target in (*plan.copies, *plan.restored, *plan.loaded)])
        for sequence in (*plan.placed, *plan.grown, *(piece.sequence for piece in plan.slices)):
            self.rows[sequence.row] = Row()
        for sequence, start, count in plan.slices:
            for position in range(start, start + count):
                block = sequence.table.blocks[position // self.block_size]
                self.cache[block * self.block_size + position % self.block_size] = _GARBAGE

    def _spoil(self, blocks: list[int]) -> None:
        for block in blocks:
            self._write_block(block, [_GARBAGE] * self.block_size)

    def _read_block(self, block: int) -> list[int]:
        return self.cache[block * self.block_size : (block + 1) * self.block_size]

    def _write_block(self, block: int, marks: list[int]) -> None:
        self.cache[block * self.block_size : (block + 1) * self.block_size] = marks


def complain(what: str) -> NoReturn:
    """Fail the test, through whoever catches errors in between."""
    pytest.fail(what)


def sequences_of(plan: StepPlan) -> list[Sequence]:
    """Whose tokens a plan computes, in order."""
    return [piece.sequence for piece in plan.slices]
