"""Request, Sequence and Group: a prompt with its parameters, one answer to it, and answers that run together."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum

from chairlift.core.blocks import BlockTable
from chairlift.core.constraint import Constraint
from chairlift.core.params import ALL, SamplingParams
from chairlift.core.prefix_node import Prefix
from chairlift.core.step import Processor, Sampling

EVERY = 1 << 30  # alternatives: more than any vocabulary has
# A sequence that was preempted so often reserves all the memory it can need when it is resumed, and is not preempted
# again.
MAX_PREEMPTIONS = 3


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # the model, a stop token or a stop string ended it
    COMPLETE = "complete"  # its constraint allows nothing more; replies say "stop"
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # the client disconnected or cancelled
    ERROR = "error"  # its step failed, or no token could be chosen


class Phase(Enum):
    """The state of a sequence; only the scheduler changes it."""

    WAITING = 0
    RUNNING = 1
    DONE = 2


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt with its parameters, all in numbers: nothing in the engine reads text."""

    id: str
    prompt: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    arrival: float = 0.0
    seed: int = 0  # params.seed, or what the engine drew
    eos_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()  # params.bad_words in token ids
    tenant: str = ""  # fair sharing counts by tenant
    weight: float = 1.0  # the tenant's share, relative to other tenants
    priority: int = 0  # higher priorities are admitted first
    deadline: float | None = None  # when its first token is due, on the clock of `arrival`
    salt: str = ""  # prefixes are shared only between requests with the same salt
    endpoint: str = ""  # the API route, which hints at the answer's length
    known_length: int | None = None  # of the answer, in experiments only
    processors: tuple[Processor, ...] = ()  # params.logits_processors, safe to call
    constraint: Constraint | None = None  # in its first state: each sequence gets a fork
    prediction: tuple[int, ...] = ()  # what the client expects the answer to be like, for drafts
    prefilled: int = 0  # prompt tokens that another engine computed for it: these are no prefix hits
    sampling: Sampling = field(init=False, repr=False)  # what executors need of all this

    def __post_init__(self) -> None:
        own = tuple(self.params.stop_token_ids)
        stop_ids = own if self.params.ignore_eos else (*own, *self.eos_ids.difference(own))
        sampling = Sampling(
            self.params,
            len(self.prompt),
            self.seed,
            stop_ids,
            self.bad_words,
            self.scored,
            self.prompt_scored,
            self.processors,
        )
        object.__setattr__(self, "sampling", sampling)

    @property
    def scored(self) -> int | None:
        """With how many alternatives each token's log-probability must be known; None: not at all."""
        params = self.params
        asked = EVERY if params.logprobs == ALL else params.logprobs
        return 0 if asked is None and (params.use_beam_search or params.width > params.n) else asked

    @property
    def prompt_scored(self) -> int | None:
        """The same for the prompt's tokens."""
        return EVERY if self.params.prompt_logprobs == ALL else self.params.prompt_logprobs

    @property
    def rules(self) -> list[str]:
        """Names of the parameters that forbid tokens."""
        rules = {
            "allowed_token_ids": self.params.allowed_token_ids,
            "bad_words": self.bad_words,
            "min_tokens": self.params.min_tokens,
            "logits_processors": self.processors,
            "structured": self.constraint,
        }
        return [name for name, value in rules.items() if value]

    @property
    def no_token_error(self) -> str:
        """Why a step found no token for it."""
        if not self.rules:
            return "no token can be chosen: the model's logits are not numbers; check its weights and its dtype"
        return f"no token is left to choose under {' and '.join(self.rules)}: allow more tokens"

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end a sequence of this request."""
        return frozenset(self.sampling.stop_ids)


class Group:
    """The sequences of one request that are admitted, preempted and resumed as one.

    A prompt is a group of one sequence that reserves rows for all its siblings. When it forks, beams stay in the group
    (beams.py). Sampled siblings get a group each: their answers need not fit in memory side by side, so one of them may
    have to wait until another has ended.
    """

    is_search = False

    def __init__(self, first: Sequence) -> None:
        self.members = [first]
        width = first.request.params.width
        self.reserved = width if width > 1 else 0  # rows, while the prompt has not forked

    @property
    def rows(self) -> int:
        """The number of rows that it needs in the batch."""
        return self.reserved or len(self.members)

    def drop_candidates(self) -> None:
        """Drop results that the members computed for a common decision: they are preempted, and compute them again."""


class Sequence:
    """One answer: its tokens, of which the first `computed` have keys and values in the cache.

    `computed` and `length` count what has been planned, so they include the steps in flight.
    """

    __slots__ = (
        "accepted",
        "cached",
        "computed",
        "constraint",
        "decode_until",
        "drafted",
        "expected",
        "grade",
        "group",
        "hits",
        "index",
        "length",
        "limit",
        "order",
        "phase",
        "plain_until",
        "preemptions",
        "prefix",
        "prompt_length",
        "rank",
        "request",
        "row",
        "saved",
        "started",
        "stop_ids",
        "tables",
        "tokens",
        "tries",
        "unchecked",
    )

    def __init__(self, request: Request, order: int, limit: int, index: int = 0, groups: int = 1) -> None:
        self.request = request
        self.order = order  # the request's number, in order of arrival
        self.limit = limit  # the most tokens it may hold, prompt included
        self.index = index  # which of the request's n answers
        self.tokens = list(request.prompt)
        self.prompt_length = len(request.prompt)
        self.stop_ids = request.stop_ids
        self.computed = 0
        self.length = self.prompt_length  # tokens known and in flight
        self.unchecked = 0  # draft tokens in flight: how many of them will be accepted is not known
        self.drafted = self.accepted = 0  # draft tokens that were checked, and those that were accepted
        self.hits = self.tries = 0.0  # the same, the older the less: for the acceptance estimate
        self.grade = 0  # of the last proposal (drafting.py)
        self.decode_until = 0  # while computed < decode_until, the next slice is one token, in an allocated block
        self.phase = Phase.WAITING
        self.rank: tuple[float, int, int] = (0.0, order, index)
        self.row = -1  # its row in the batch while it runs: executors keep per-sequence state there
        self.started: float | None = None  # when it was first admitted
        self.expected = 0  # predicted length of its answer, where a policy needs it
        self.preemptions = 0
        self.tables = [BlockTable() for _ in range(groups)]  # its blocks in each group of layers
        self.saved: list[BlockTable] = []  # the same in host memory while it is swapped out; else none
        self.group = Group(self)  # a fork's is set by the scheduler
        self.prefix = Prefix()
        self.cached = 0  # tokens of its prompt that the prefix cache had when it was first admitted
        self.constraint = None if request.constraint is None else request.constraint.fork()
        # While it has fewer tokens, one more is appended without a check, unless it is a stop token.
        self.plain_until = limit - 1 if self.constraint is None else 0

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self.phase is Phase.DONE

    @property
    def is_settled(self) -> bool:
        """Whether it has been preempted so often that it has all its memory and is not preempted again.

        Beams never have: they fork at every token, so none of them can own the blocks that it will need.
        """
        return self.preemptions >= MAX_PREEMPTIONS and not self.is_search

    @property
    def in_flight(self) -> int:
        """How many of its tokens have been planned and are not known yet."""
        return self.length - len(self.tokens)

    def rewind(self, count: int) -> None:
        """Take back the last `count` tokens in flight: they were rejected, or will be sampled again."""
        self.length -= count
        self.computed = min(self.computed, self.length - 1)

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.prompt_length :]

    @property
    def is_forked(self) -> bool:
        """Whether its siblings have their own sequences, or it has none."""
        return not self.group.reserved

    @property
    def is_search(self) -> bool:
        """Whether it is a beam."""
        return self.group.is_search

    def __repr__(self) -> str:
        return f"Sequence({self.request.id}#{self.index} {self.phase.name} {self.computed}/{self.length})"
