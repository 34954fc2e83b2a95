"""Predicted answer lengths, which policies order requests by, and their measured correlation with the true lengths."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from operator import mul
from typing import Protocol
from zlib import crc32

from chairlift.core.request import Request

WINDOW = 256  # finished requests that the correlation covers
ENOUGH = 32  # finished requests before it is first computed
STRIDE = 128  # finished requests between computations: its sorts cost as much as twenty predictions
REMEMBERED = 1 << 14  # predictions kept for unfinished requests; aborted requests are dropped as the oldest
BUCKETS = 4096  # most values kept per feature

_DOUBT = 1.645  # standard errors below 0, reached by chance one time in twenty
_PRIOR = math.log(256)  # the estimate before the first finished answer: equal estimates keep arrival order
_MEMORY = 48  # answers that a bucket's running average covers, so that it follows a drift
_STEP = [1 / (count + 1) for count in range(_MEMORY)] + [1 / _MEMORY]
_BAND = [count.bit_length() for count in range(_MEMORY + 1)]  # counts of 1, 2-3, 4-7, ... have one share each
_RATE = 0.07  # learning rate of the shares: they converge within some tens of answers

Features = tuple[int, ...]


class Predictor(Protocol):
    """Predicts answer lengths and learns from the true ones."""

    def predict(self, request: Request) -> int:
        """Return the expected number of output tokens, 1 or more; called when a request arrives."""
        ...

    def learn(self, request: Request, length: int) -> None:
        """Learn from an answer that stopped or reached its limit after `length` output tokens."""
        ...

    @property
    def correlation(self) -> float | None:
        """Spearman's correlation of predicted and true lengths of the last finished requests; None while unknown."""
        ...

    @property
    def is_trusted(self) -> bool:
        """False while predictions are worse than chance; arrival order is better then."""
        ...


class LengthModel(Protocol):
    """The part of a predictor that guesses; a request's features are computed once, for `guess` and `learn`."""

    def features(self, request: Request) -> Features: ...
    def guess(self, request: Request, features: Features) -> int: ...
    def learn(self, request: Request, features: Features, length: int) -> None: ...


class ScoredPredictor:
    """A predictor: a length model, and the correlation of its predictions with the true lengths.

    >>> predictor = ScoredPredictor(Oracle(max_length=100))
    >>> for length in range(1, 33):
    ...     request = Request(str(length), [7], known_length=length)
    ...     assert predictor.predict(request) == length
    ...     predictor.learn(request, length)
    >>> predictor.correlation, predictor.is_trusted
    (1.0, True)
    """

    def __init__(self, model: LengthModel) -> None:
        self.correlation: float | None = None
        self.is_trusted = True
        self._model = model
        self._pending: OrderedDict[str, tuple[int, Features]] = OrderedDict()  # prediction and features by request id
        self._predicted: deque[int] = deque(maxlen=WINDOW)
        self._actual: deque[int] = deque(maxlen=WINDOW)
        self._finished = 0

    def predict(self, request: Request) -> int:
        """Return the model's guess and keep it until the request finishes."""
        features = self._model.features(request)
        length = self._model.guess(request, features)
        pending = self._pending
        pending[request.id] = (length, features)
        if len(pending) > REMEMBERED:
            pending.popitem(last=False)
        return length

    def learn(self, request: Request, length: int) -> None:
        """Record the true length and train the model; with n > 1, the request's first finished answer is recorded."""
        kept = self._pending.pop(request.id, None)
        if kept is None:
            self._model.learn(request, self._model.features(request), length)
            return
        self._model.learn(request, kept[1], length)
        self._predicted.append(kept[0])
        self._actual.append(length)
        self._finished += 1
        # At fixed counts, not on read: reading metrics must not change what a policy does.
        if self._finished % STRIDE == ENOUGH:
            self._score()

    def _score(self) -> None:
        self.correlation = spearman(self._predicted, self._actual)
        # A random order costs no more than arrival order, on average; a reversed order does. So distrust needs
        # evidence of a negative correlation, and ends as soon as the evidence does.
        least = -_DOUBT / math.sqrt(len(self._actual) - 1)
        self.is_trusted = self.correlation is None or self.correlation > least


class MaxTokens:
    """Predicts the limit: max_tokens, or the rest of the context."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length

    def features(self, request: Request) -> Features:
        """Return no features."""
        return ()

    def guess(self, request: Request, features: Features) -> int:
        """Return the limit."""
        return _limit(request, self.max_length)

    def learn(self, request: Request, features: Features, length: int) -> None:
        """Learn nothing."""


class Oracle(MaxTokens):
    """Predicts the true length where an experiment has set it, else the limit."""

    def guess(self, request: Request, features: Features) -> int:
        """Return the known length, within the limit."""
        limit = _limit(request, self.max_length)
        return limit if request.known_length is None else max(1, min(request.known_length, limit))


class _Table:
    """One feature: the correction of the log length for each of its values, and the share of it to apply.

    A bucket holds the running average of a value's residuals, and their count. The estimate adds a share of that
    average, learned per band of counts instead of a fixed shrinkage: the share of a feature without information, or
    without any until eight answers, stays near 0 until then.
    """

    __slots__ = ("buckets", "shares")

    def __init__(self) -> None:
        self.buckets: OrderedDict[int, tuple[float, int]] = OrderedDict()  # least recently updated first
        self.shares = [0.5, 0.5]  # by band

    def learn(self, key: int, residual: float) -> float:
        """Learn from the residual of the features before this one; return the residual for the next feature."""
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
        share += (
            _RATE * value * rest / (1.0 + value * value)
        )  # gradient descent on rest², in steps that cannot overshoot
        shares[band] = 0.0 if share < 0.0 else 1.0 if share > 1.0 else share
        value += (residual - value) * _STEP[count]
        if count < _MEMORY:
            count += 1
            if _BAND[count] == len(shares):
                shares.append(shares[-1])  # the first bucket of this band
        buckets[key] = (value, count)
        buckets.move_to_end(key)
        return rest


class History:
    """Predicts from finished answers: a sum of feature corrections in the log domain, learned online.

    The estimate is the average of all answers plus the correction of each feature's table, in order. A table learns
    the residual of the tables before it, so that correlated features do not count twice.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self._most = math.log(max_length)
        self._average = _PRIOR
        self._count = 0
        self._tables = [_Table() for _ in range(8)]  # one per feature

    def features(self, request: Request) -> Features:
        """Return the request's features; they read a bounded number of prompt tokens."""
        prompt = request.prompt
        size = len(prompt)
        # crc32, since hash() of strings and None differs between processes; hash() of integers does not.
        tenant = crc32(request.tenant.encode("utf-8", "surrogatepass"))
        endpoint = crc32(request.endpoint.encode("utf-8", "surrogatepass"))
        head = hash(tuple(prompt[:32]))
        octave = size.bit_length()
        depth = 1 << octave >> 2 if octave < 12 else 1024  # the later half is new in each request
        return (
            tenant,
            hash((endpoint, request.params.max_tokens or 0)),
            head,  # a template, a system prompt
            hash(tuple(prompt[depth >> 3 : depth : depth >> 3 or 1])),  # a long system prompt, a conversation
            hash(tuple(prompt[-8:])),  # "in one word, please"
            hash((tenant, head)),
            (size**8).bit_length(),  # eighths of an octave: they predict better than octaves on Azure's conversations
            hash((tenant, octave)),
        )

    def guess(self, request: Request, features: Features) -> int:
        """Return the estimate, within the request's min_tokens and limit."""
        limit = _limit(request, self.max_length)
        if _runs_to_limit(request):
            return limit
        length = round(math.exp(self._estimate(features)))
        least = request.params.min_tokens
        if length < least:
            length = least
        return length if length < limit else limit

    def learn(self, request: Request, features: Features, length: int) -> None:
        """Move the average and the request's buckets toward the true length."""
        seen = math.log(length) if length > 1 else 0.0
        if length >= _limit(request, self.max_length):
            if _runs_to_limit(request):
                return  # the length was known beforehand
            # The answer was cut at its limit, so it is at least that long: learn only if the estimate was shorter.
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
    """Return the largest number of output tokens that the request may generate."""
    room = max_length - len(request.prompt)
    max_tokens = request.params.max_tokens
    if max_tokens is not None and max_tokens < room:
        return max_tokens
    return room if room > 1 else 1


def _runs_to_limit(request: Request) -> bool:
    params = request.params
    return params.ignore_eos and not params.stop and not params.stop_token_ids


def spearman(left: Sequence[int], right: Sequence[int]) -> float | None:
    """Return Spearman's rank correlation, with ties at their average rank; None if all values of one side are equal.

    >>> spearman([1, 2, 3, 4], [10, 20, 20, 90])
    0.9486832980505138
    """
    a, b = _ranks(left), _ranks(right)
    spread = math.sqrt(sum(map(mul, a, a)) * sum(map(mul, b, b)))
    return sum(map(mul, a, b)) / spread if spread else None


def _ranks(values: Sequence[int]) -> list[int]:
    """Return each value's rank, doubled and centred on 0."""
    ordered = sorted(values)
    last = dict(zip(ordered, range(len(ordered)), strict=True))
    ordered.reverse()
    first = dict(zip(ordered, range(len(ordered)), strict=True))  # from the end
    return [last[value] - first[value] for value in values]


PREDICTORS: dict[str, Callable[[int], Predictor]] = {
    "max_tokens": lambda max_length: ScoredPredictor(MaxTokens(max_length)),
    "history": lambda max_length: ScoredPredictor(History(max_length)),
    "oracle": lambda max_length: ScoredPredictor(Oracle(max_length)),
}
