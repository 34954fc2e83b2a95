"""A model that costs nothing and a clock that stands still; the device that runs the model is in device.py.

The model is autoregressive like a real one: what it stores for a token depends on every token before it, and the token
it samples depends on that context, the request's seed, the sibling's index and the position; on nothing else. So an
answer is known before it is served, and whatever the scheduler does to it must not show. Unlike a real one it also
depends on the salt, so that a block shared across salts shows, too.
"""

from __future__ import annotations

from collections.abc import Sequence as Sized
from zlib import crc32

from chairlift.core.constraint import Constraint
from chairlift.core.drafting import Drafter, Proposal
from chairlift.core.request import FinishReason, Request, Sequence
from chairlift.core.speculation import Speculation
from chairlift.core.step_times import StepTimes

VOCAB = 64


def mark_after(mark: int, token: int) -> int:
    """What the cache holds for a token: it tells this token and all before it from any others."""
    return hash((mark, token)) & 0xFFFF_FFFF_FFFF


def first_mark(salt: str) -> int:
    """What stands before the first token of a salt."""
    return crc32(salt.encode())


def marks_of(tokens: Sized[int], salt: str = "") -> list[int]:
    """What the cache holds for each of `tokens` when they stand at the beginning."""
    marks, mark = [], first_mark(salt)
    for token in tokens:
        mark = mark_after(mark, token)
        marks.append(mark)
    return marks


def sample(mark: int, seed: int, index: int, position: int) -> int:
    """The token at `position`, behind a context that ends with `mark`."""
    return hash((mark, seed, index, position)) % VOCAB


class Always(Drafter):
    """Proposes the same tokens behind any sequence."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        return Proposal(self._tokens[:most])


def drafts_of(tokens: list[int]) -> Speculation:
    """Speculation that checks these tokens in every step: they cost nothing."""
    return Speculation(Always(tokens), StepTimes([(1, 1.0), (1000, 1.0)]))


class Picky(Constraint):
    """A constraint that forbids about half of all tokens, depending on all that were chosen before."""

    def __init__(self, state: int = 0) -> None:
        self._state = state

    def mask(self) -> bytes | None:
        """The tokens that may come next, as bits; sometimes all."""
        if self._state % 5 == 0:
            return None
        bits = hash((self._state, "bits")) & ((1 << VOCAB) - 1) | 1
        return bits.to_bytes(VOCAB // 8, "little")

    def accept(self, token: int) -> None:
        """Go on behind a token, which must be one of those allowed."""
        mask = self.mask()
        assert mask is None or mask[token // 8] >> token % 8 & 1, f"{token} is not allowed"
        self._state = hash((self._state, token)) & 0xFFFF

    def fork(self) -> Picky:
        """The same, on its own from now on."""
        return type(self)(self._state)

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        return self._state % 29 == 28


class Flawed(Picky):
    """A constraint that leaves no token to choose in some states, and fails in others."""

    def mask(self) -> bytes | None:
        if self._state % 23 == 7:
            return bytes(VOCAB // 8)
        if self._state % 23 == 8:
            raise ValueError("no mask")
        return super().mask()

    def accept(self, token: int) -> None:
        if self._state % 23 == 9:
            raise ValueError("no next state")
        super().accept(token)


def sample_masked(mark: int, seed: int, index: int, position: int, mask: bytes | None) -> int | None:
    """The token at `position` of those that a mask allows; None if it allows none."""
    if mask is not None and not any(mask):
        return None
    token = sample(mark, seed, index, position)
    mask = None if mask is None else mask.ljust(VOCAB // 8, bytes(1))
    while mask is not None and not mask[token // 8] >> token % 8 & 1:
        token = (token + 1) % VOCAB
    return token


def answer_to(request: Request, index: int, limit: int) -> tuple[list[int], FinishReason]:
    """What the model answers, alone and without a cache, to a request with sequences of at most `limit` tokens."""
    tokens: list[int] = []
    mark = marks_of(request.prompt, request.salt)[-1]
    constraint = None if request.constraint is None else request.constraint.fork()
    for position in range(len(request.prompt), limit):
        try:
            token = sample_masked(mark, request.seed, index, position, constraint and constraint.mask())
            if token is None:
                return tokens, FinishReason.ERROR
            if constraint is not None:
                constraint.accept(token)
        except ValueError:
            return tokens, FinishReason.ERROR
        tokens.append(token)
        if token in request.stop_ids:
            return tokens, FinishReason.STOP
        if constraint is not None and constraint.is_complete:
            return tokens, FinishReason.COMPLETE
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
    going: list[tuple[float, list[int], int]] = [(0.0, [], marks_of(request.prompt, request.salt)[-1])]
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
