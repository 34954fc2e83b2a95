"""Request and Sequence: what is asked, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Protocol

from chairlift.core.blocks import BlockTable
from chairlift.core.constraint import Constraint
from chairlift.core.params import ALL, SamplingParams
from chairlift.core.prefix_cache import Prefix
from chairlift.core.step import Processor, Sampling

EVERY = 1 << 30  # alternatives: more than any vocabulary has


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # the model, a stop token or a stop string ended it
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # the caller left
    ERROR = "error"  # the step that held it failed


class Phase(Enum):
    """Where a sequence is: the scheduler alone moves it."""

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
    tenant: str = ""  # on whose behalf: fair sharing counts by it
    weight: float = 1.0  # the tenant's share against others'
    priority: int = 0  # higher goes first
    deadline: float | None = None  # when its first token is due, on the clock of `arrival`
    salt: str = ""  # whose prefixes it may share
    endpoint: str = ""  # where it came from: a hint on the length of its answer
    known_length: int | None = None  # of the answer, in experiments alone
    processors: tuple[Processor, ...] = ()  # params.logits_processors, safe to call
    constraint: Constraint | None = None  # in its first state: each sequence gets a fork
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
    def no_token_error(self) -> str:
        """Why a step found no token for it."""
        rules = {
            "allowed_token_ids": self.params.allowed_token_ids,
            "bad_words": self.bad_words,
            "min_tokens": self.params.min_tokens,
            "logits_processors": self.processors,
        }
        named = [name for name, value in rules.items() if value]
        if not named:
            return "no token can be chosen: the model's logits are not numbers; check its weights and its dtype"
        return f"no token is left to choose under {' and '.join(named)}: allow more tokens"

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end a sequence of this request."""
        return frozenset(self.sampling.stop_ids)


class Search(Protocol):
    """What a sequence knows of the beam search that it is part of; `beams.py` has the search itself."""

    members: list[Sequence]

    def withdraw(self) -> None:
        """Forget this round's offers: the members are preempted, and offer again when they are resumed."""


class Sequence:
    """One answer: its tokens, of which the first `computed` have keys and values in the cache.

    `computed` and `length` count what has been planned, so they include the steps in flight.
    """

    __slots__ = (
        "beams",
        "cached",
        "computed",
        "constraint",
        "decode_until",
        "expected",
        "followers",
        "index",
        "is_forked",
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
        "table",
        "tokens",
        "unchecked",
    )

    def __init__(self, request: Request, order: int, limit: int, index: int = 0) -> None:
        self.request = request
        self.order = order  # the request's place among all that ever came
        self.limit = limit  # the most tokens it may hold, prompt included
        self.index = index  # which of the request's n answers
        self.tokens = list(request.prompt)
        self.prompt_length = len(request.prompt)
        self.stop_ids = request.stop_ids
        self.computed = 0
        self.length = self.prompt_length  # tokens known and in flight
        self.unchecked = 0  # draft tokens in flight: how many of them will be accepted is not known
        self.decode_until = 0  # while computed < decode_until, the next slice is one token, in an allocated block
        self.phase = Phase.WAITING
        self.rank: tuple[float, int, int] = (0.0, order, index)
        self.row = -1  # its seat in the batch while running: executors keep per-sequence state there
        self.started: float | None = None  # when it first took a seat
        self.is_forked = request.params.width == 1 or index > 0
        self.expected = 0  # tokens that its answer is predicted to have, where a policy asks
        self.preemptions = 0  # times it had to yield
        self.table = BlockTable()
        self.saved = BlockTable()  # blocks in host memory while it is away
        self.beams: Search | None = None  # the search that it is part of
        self.followers: list[Sequence] = []  # preempted beams that are resumed together with this one
        self.prefix = Prefix()
        self.cached = 0  # tokens of its prompt that the prefix cache had when it first took a seat
        self.constraint = None if request.constraint is None else request.constraint.fork()
        # While it has fewer tokens, one more is appended without a check, unless it is a stop token.
        self.plain_until = limit - 1 if self.constraint is None else 0

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self.phase is Phase.DONE

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
    def seats(self) -> int:
        """Seats it needs in the batch: all its siblings' until it forks, and those of its followers."""
        return (1 if self.is_forked else self.request.params.width) + len(self.followers)

    @property
    def group(self) -> list[Sequence]:
        """The sequences that are admitted together: this one and its followers."""
        return [self, *self.followers]

    def __repr__(self) -> str:
        return f"Sequence({self.request.id}#{self.index} {self.phase.name} {self.computed}/{self.length})"
