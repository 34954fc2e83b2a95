"""Slice, StepPlan and StepResult: what one forward pass computes, and what comes back from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from chairlift.core.prefix_cache import Node
from chairlift.core.request import FinishReason, Sequence


class Slice(NamedTuple):
    """`count` tokens of one sequence from `start`: a decode is a slice of 1, a prompt chunk a slice of many."""

    sequence: Sequence
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody asks of a slice


@dataclass(slots=True, eq=False)
class StepPlan:
    """One forward pass. An executor reads it, and the sequences in it, during `submit` only."""

    # The slices in columns, since to make a record of each in every pass takes longer than to choose them: whose it is,
    # its first token, and how many it has.
    sequences: list[Sequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    # Who samples, and at which token of the flattened batch; a prompt that forks samples once for each sibling.
    samples: list[Sequence] = field(default_factory=list)
    sampled_at: list[int] = field(default_factory=list)
    tokens: int = 0
    # Sequences that took a row in this step: the executor writes their state there before the pass.
    placed: list[Sequence] = field(default_factory=list)
    # Sequences whose block table changed: its last block was copied, or blocks were added behind it.
    grown: list[Sequence] = field(default_factory=list)
    # Blocks to copy before the pass: every source is read before any target is written, or any block that is restored.
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    # Blocks to move to host memory and back before the pass: here, too, all are read before any is written, and those
    # that leave are read before anything is written at all. The same between host memory and a file, and from there.
    saved: list[tuple[int, int]] = field(default_factory=list)
    restored: list[tuple[int, int]] = field(default_factory=list)
    spilled: list[tuple[int, int]] = field(default_factory=list)
    loaded: list[tuple[int, int]] = field(default_factory=list)
    # Blocks that this pass fills or moves and that others can find: those planned after it read what it has written.
    fresh: list[Node] = field(default_factory=list)

    @property
    def slices(self) -> list[Slice]:
        """The slices as records, for those who look at few passes."""
        return list(map(Slice, self.sequences, self.starts, self.counts))

    def expect(self, node: Node) -> None:
        """This pass fills or moves a cached block."""
        node.passes += 1
        self.fresh.append(node)

    def __bool__(self) -> bool:
        return bool(self.sequences)


class TokenLogprobs(NamedTuple):
    """The log-probability of one token under the model, its rank, and the likeliest alternatives."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class Candidates(NamedTuple):
    """The tokens that a beam may go on with, the likeliest first: as many as there are beams that end no answer, and
    those before them that do."""

    tokens: list[int]
    logprobs: list[float]
    top: list[tuple[int, float]]  # the likeliest alternatives, as many as the client asked for


class PromptLogprobs(NamedTuple):
    """Log-probabilities of the prompt's tokens from position `start` on."""

    start: int
    entries: list[TokenLogprobs]


@dataclass(slots=True, eq=False)
class StepResult:
    """What a forward pass gave: one token for each of the plan's samples."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | Candidates | None] | None = None  # candidates for beams
    prompt_logprobs: list[tuple[Sequence, PromptLogprobs]] | None = None
    # Samples without a token, since no logit was above -inf; what stands in their place in `tokens` means nothing.
    failed: list[int] = field(default_factory=list)


class Event(NamedTuple):
    """News of one sequence, for whoever streams it."""

    sequence: Sequence
    token: int | None = None
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None


@dataclass(slots=True, eq=False)
class Outcome:
    """What a step has brought: for most of its sequences a token and nothing else, for others more.

    As with slices, those many stand in columns. To iterate is to have an event for each.
    """

    sequences: list[Sequence] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # one for each of these
    events: list[Event] = field(default_factory=list)  # of the others, or before their token

    def __iter__(self) -> Iterator[Event]:
        yield from self.events
        yield from map(Event, self.sequences, self.tokens)

    def __len__(self) -> int:
        return len(self.events) + len(self.tokens)
