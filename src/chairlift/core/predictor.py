"""How long will this answer be: guesses that policies order by, and how well they have held so far."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from operator import mul
from typing import Protocol
from zlib import crc32

from chairlift.core.request import Request

WINDOW = 256  # finished requests that the correlation is taken over
ENOUGH = 32  # finished requests before it is first taken
STRIDE = 128  # finished requests until it is taken again: its sorts cost as much as twenty predictions
REMEMBERED = 1 << 14  # guesses kept for requests under way; those of aborted ones leave by age
BUCKETS = 4096  # values that each feature knows at most

_DOUBT = 1.645  # standard errors below 0: chance alone gets there one time in twenty
_PRIOR = math.log(256)  # before anything is learned all are alike but for their caps, so that arrival decides
_MEMORY = 48  # a bucket averages over about so many answers and no more: it follows a drift
_STEP = [1 / (count + 1) for count in range(_MEMORY)] + [1 / _MEMORY]
_BAND = [count.bit_length() for count in range(_MEMORY + 1)]  # counts of 1, 2-3, 4-7, ... are trusted alike
_RATE = 0.07  # of learning how far to trust: in some tens of answers

Features = tuple[int, ...]


class Predictor(Protocol):
    """Guesses the lengths of answers and is told what came."""

    def predict(self, request: Request) -> int:
        """The expected number of output tokens, 1 or more; asked when a request comes."""
        ...

    def learn(self, request: Request, length: int) -> None:
        """An answer ended by itself or at its limit, after so many output tokens."""
        ...

    @property
    def correlation(self) -> float | None:
        """Spearman's, between predicted and true lengths of the last finished requests; None while unknown."""
        ...

    @property
    def is_trusted(self) -> bool:
        """False while it is seen to be worse than chance: the order of arrival is better then."""
        ...


class Model(Protocol):
    """What makes a predictor's guesses; the features of a request are taken once, for the guess and for the lesson."""

    def features(self, request: Request) -> Features: ...
    def guess(self, request: Request, features: Features) -> int: ...
    def learn(self, request: Request, features: Features, length: int) -> None: ...


class Scored:
    """A predictor: a model, and the score of what it guessed when requests came against what became of them.

    >>> predictor = Scored(Oracle(max_length=100))
    >>> for length in range(1, 33):
    ...     request = Request(str(length), [7], known_length=length)
    ...     assert predictor.predict(request) == length
    ...     predictor.learn(request, length)
    >>> predictor.correlation, predictor.is_trusted
    (1.0, True)
    """

    def __init__(self, model: Model) -> None:
        self.correlation: float | None = None
        self.is_trusted = True
        self._model = model
        self._guesses: OrderedDict[str, tuple[int, Features]] = OrderedDict()
        self._guessed: deque[int] = deque(maxlen=WINDOW)
        self._came: deque[int] = deque(maxlen=WINDOW)
        self._finished = 0

    def predict(self, request: Request) -> int:
        """The model's guess, kept until the request finishes."""
        features = self._model.features(request)
        length = self._model.guess(request, features)
        guesses = self._guesses
        guesses[request.id] = (length, features)
        if len(guesses) > REMEMBERED:
            guesses.popitem(last=False)
        return length

    def learn(self, request: Request, length: int) -> None:
        """Score the guess and tell the model; of a request's several answers the first to end is scored."""
        kept = self._guesses.pop(request.id, None)
        if kept is None:
            self._model.learn(request, self._model.features(request), length)
            return
        self._model.learn(request, kept[1], length)
        self._guessed.append(kept[0])
        self._came.append(length)
        self._finished += 1
        # At fixed counts, not when somebody asks: that metrics are read must not change what a policy does.
        if self._finished % STRIDE == ENOUGH:
            self._score()

    def _score(self) -> None:
        self.correlation = spearman(self._guessed, self._came)
        # An order by chance costs no more than that of arrival, on average; one that is upside down does. So it takes
        # evidence to distrust, and no more than its absence to trust again.
        least = -_DOUBT / math.sqrt(len(self._came) - 1)
        self.is_trusted = self.correlation is None or self.correlation > least


class MaxTokens:
    """As long as it may be: max_tokens, or what the context leaves."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length

    def features(self, request: Request) -> Features:
        """None."""
        return ()

    def guess(self, request: Request, features: Features) -> int:
        """The limit."""
        return _limit(request, self.max_length)

    def learn(self, request: Request, features: Features, length: int) -> None:
        """Nothing to learn."""


class Oracle(MaxTokens):
    """The truth, where an experiment knows it; else as long as it may be."""

    def guess(self, request: Request, features: Features) -> int:
        """The known length, within the limit."""
        limit = _limit(request, self.max_length)
        return limit if request.known_length is None else max(1, min(request.known_length, limit))


class _Table:
    """One feature: what each of its values adds to the log length, and how far such additions have been right.

    A bucket is the running average of the residuals that came with its value, and their count. Of what it says, the
    estimate takes a share that is learned for buckets of like counts, where others choose a shrinkage: a feature that
    tells nothing, or nothing until it has seen eight answers, is not listened to until then.
    """

    __slots__ = ("buckets", "shares")

    def __init__(self) -> None:
        self.buckets: OrderedDict[int, tuple[float, int]] = OrderedDict()  # the least recently seen first
        self.shares = [0.5, 0.5]  # by band

    def learn(self, key: int, residual: float) -> float:
        """Take in what the features before this one leave to explain; the rest is for those behind it."""
        buckets = self.buckets
        bucket = buckets.get(key)
        if bucket is None:
            buckets[key] = (residual, 1)
            if len(buckets) > BUCKETS:
                buckets.popitem(last=False)
            return residual
        value, count = bucket
        shares, band = self.shares, _BAND[count]
        share = shares[band]
        rest = residual - value * share
        share += _RATE * value * rest / (1.0 + value * value)  # downhill on rest², in steps that cannot overshoot
        shares[band] = 0.0 if share < 0.0 else 1.0 if share > 1.0 else share
        value += (residual - value) * _STEP[count]
        if count < _MEMORY:
            count += 1
            if _BAND[count] == len(shares):
                shares.append(shares[-1])  # older than any before
        buckets[key] = (value, count)
        buckets.move_to_end(key)
        return rest


class History:
    """What requests like it got: a sum of features in the log domain, learned as answers end.

    The estimate is the average of all answers, and what each feature's table adds to it, one after the other. A table
    learns what those before it leave unexplained, so that features which tell the same do not count twice.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self._most = math.log(max_length)
        self._average = _PRIOR
        self._count = 0
        self._tables = [_Table() for _ in range(8)]  # one for each of the features

    def features(self, request: Request) -> Features:
        """What may tell the length of an answer, from a fixed few of the prompt's tokens."""
        prompt = request.prompt
        size = len(prompt)
        # Not hash(), which differs from process to process for strings and for None; for whole numbers it does not.
        tenant = crc32(request.tenant.encode("utf-8", "surrogatepass"))
        endpoint = crc32(request.endpoint.encode("utf-8", "surrogatepass"))
        head = hash(tuple(prompt[:32]))
        octave = size.bit_length()
        depth = 1 << octave >> 2 if octave < 12 else 1024  # not in the later half: what is new is there
        return (
            tenant,
            hash((endpoint, request.params.max_tokens or 0)),
            head,  # a template, a system prompt
            hash(tuple(prompt[depth >> 3 : depth : depth >> 3 or 1])),  # a long system prompt, a conversation
            hash(tuple(prompt[-8:])),  # "in one word, please"
            hash((tenant, head)),
            (size**8).bit_length(),  # eighths of an octave: on Azure's conversations they tell more than octaves
            hash((tenant, octave)),
        )

    def guess(self, request: Request, features: Features) -> int:
        """The estimate, within what the request allows."""
        limit = _limit(request, self.max_length)
        if _runs_to_limit(request):
            return limit
        length = round(math.exp(self._estimate(features)))
        least = request.params.min_tokens
        if length < least:
            length = least
        return length if length < limit else limit

    def learn(self, request: Request, features: Features, length: int) -> None:
        """Move the average and the request's buckets toward what came."""
        seen = math.log(length) if length > 1 else 0.0
        if length >= _limit(request, self.max_length):
            if _runs_to_limit(request):
                return  # its length was never in doubt
            # It was cut, so it would have been at least so long; if that was the estimate, nothing speaks against it.
            seen = max(seen, self._estimate(features))
        residual = seen - self._average
        self._average += residual * _STEP[self._count]
        if self._count < _MEMORY:
            self._count += 1
        for table, key in zip(self._tables, features, strict=True):
            residual = table.learn(key, residual)

    def _estimate(self, features: Features) -> float:
        estimate = self._average
        for table, key in zip(self._tables, features, strict=True):
            bucket = table.buckets.get(key)
            if bucket is not None:
                estimate += bucket[0] * table.shares[_BAND[bucket[1]]]
        return 0.0 if estimate < 0.0 else min(estimate, self._most)


def _limit(request: Request, max_length: int) -> int:
    """The most output tokens a request may get."""
    room = max_length - len(request.prompt)
    wanted = request.params.max_tokens
    if wanted is not None and wanted < room:
        return wanted
    return room if room > 1 else 1


def _runs_to_limit(request: Request) -> bool:
    params = request.params
    return params.ignore_eos and not params.stop and not params.stop_token_ids


def spearman(left: Sequence[int], right: Sequence[int]) -> float | None:
    """The correlation of ranks, ties sharing their average; None where one side is all the same.

    >>> spearman([1, 2, 3, 4], [10, 20, 20, 90])
    0.9486832980505138
    """
    a, b = _ranks(left), _ranks(right)
    spread = math.sqrt(sum(map(mul, a, a)) * sum(map(mul, b, b)))
    return sum(map(mul, a, b)) / spread if spread else None


def _ranks(values: Sequence[int]) -> list[int]:
    """Each value's rank, doubled and counted from the middle."""
    ordered = sorted(values)
    last = dict(zip(ordered, range(len(ordered)), strict=True))
    ordered.reverse()
    first = dict(zip(ordered, range(len(ordered)), strict=True))  # from the end
    return [last[value] - first[value] for value in values]


PREDICTORS: dict[str, Callable[[int], Predictor]] = {
    "max_tokens": lambda max_length: Scored(MaxTokens(max_length)),
    "history": lambda max_length: Scored(History(max_length)),
    "oracle": lambda max_length: Scored(Oracle(max_length)),
}
