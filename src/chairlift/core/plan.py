"""StepPlan, Event and Outcome: the scheduler's own record of a step, and its news for the fronts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from chairlift.core.exchange import Departing
from chairlift.core.prefix_node import Node
from chairlift.core.request import FinishReason, Sequence
from chairlift.core.step import Newcomer, PromptLogprobs, Step, TokenLogprobs


class Slice(NamedTuple):
    """`count` tokens of one sequence from `start`: a decode is a slice of 1, a prompt chunk a slice of many."""

    sequence: Sequence
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nothing calls


@dataclass(slots=True, eq=False, init=False)
class StepPlan(Step):
    """A step with the sequences behind its numbers, which only the scheduler reads."""

    sequences: list[Sequence] = field(default_factory=list)  # of each slice
    samples: list[Sequence] = field(default_factory=list)  # of each sample
    placed: list[Sequence] = field(default_factory=list)  # sequences that take a row in this step
    preempted: list[Sequence] = field(default_factory=list)
    # Cached blocks that this pass fills or moves: later steps may read them, and lose them if this pass fails.
    fresh: list[Node] = field(default_factory=list)
    # Blocks of windows that nodes get if this pass succeeds: the sequence that holds them, their place and the node.
    lent: list[tuple[Sequence, int, Node]] = field(default_factory=list)
    departing: list[Departing] = field(default_factory=list)  # of each block in `sent`

    def __init__(self) -> None:
        # The dataclass's own calls a factory for each field, and takes twice as long: a tenth of a simulated step.
        self.tokens = 0
        self.rows, self.starts, self.counts, self.sample_rows, self.sampled_at = [], [], [], [], []
        self.masked, self.drafts, self.newcomers = [], [], []
        self.table_rows, self.table_places, self.table_blocks, self.table_groups = [], [], [], []
        self.copies, self.saved, self.restored, self.spilled, self.loaded = [], [], [], [], []
        self.sent, self.received = [], []
        self.sequences, self.samples, self.placed, self.preempted = [], [], [], []
        self.fresh, self.lent, self.departing = [], [], []

    @property
    def slices(self) -> list[Slice]:
        """The slices as records, for measurements and tests."""
        return list(map(Slice, self.sequences, self.starts, self.counts))

    def expect(self, node: Node) -> None:
        """Note that this pass fills or moves a cached block."""
        node.passes += 1
        self.fresh.append(node)

    def number(self) -> None:
        """Complete the numbers that executors read, once all sequences of the step are known."""
        self.rows = [sequence.row for sequence in self.sequences]
        is_decode = self.samples == self.sequences  # of all slices, as in most steps
        self.sample_rows = self.rows if is_decode else [sequence.row for sequence in self.samples]
        if not self.placed:
            return
        self.newcomers = [
            Newcomer(each.row, each.index, list(each.tokens), blocks_of(each), each.request.sampling)
            for each in self.placed
            if each.row >= 0
        ]
        if self.table_rows:  # a row's former sequence may have grown before this plan preempted it
            new = {each.row for each in self.placed}
            kept = [place for place, row in enumerate(self.table_rows) if row not in new]
            for name in ("table_rows", "table_places", "table_blocks", "table_groups"):
                column = getattr(self, name)
                setattr(self, name, [column[place] for place in kept] if column else [])

    def __bool__(self) -> bool:
        return bool(self.sequences or self.received)


def blocks_of(sequence: Sequence) -> list[list[int]]:
    """Return the blocks of a sequence in each group, as they are now."""
    return [list(table.blocks) for table in sequence.tables]


class Event(NamedTuple):
    """News of one sequence, for the front that streams it."""

    sequence: Sequence
    token: int | None = None
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None
    is_request_error: bool = False  # the request caused the error: repeating it cannot help


@dataclass(slots=True, eq=False)
class Outcome:
    """The news of a step: for most of its sequences a token and nothing else, for others an event.

    The tokens are columns, as slices are. Iteration gives an event for each.
    """

    sequences: list[Sequence] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # one for each of these
    events: list[Event] = field(default_factory=list)  # of other sequences, or before the token of one of these

    def __iter__(self) -> Iterator[Event]:
        yield from self.events
        yield from map(Event, self.sequences, self.tokens)

    def __len__(self) -> int:
        return len(self.events) + len(self.tokens)
