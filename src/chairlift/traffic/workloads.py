"""Workloads: named lists of requests, drawn from a seed (equal on every machine) or read from a file."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from chairlift.core.errors import ChairliftError
from chairlift.core.values import MOST_COUNT, one_line, show
from chairlift.traffic.query import Encode, Ids, Query, encoded

SIGMA = 0.8  # of lognormal lengths: most are short and a few are ten times as long, as in real traffic
_Z99 = 2.3263478740408408  # standard deviations from the mean to the 99th percentile of a normal distribution
_FITTED_MOST = 8  # times the p99: longer lengths, of which there are hardly any, are cut


@dataclass(frozen=True, slots=True)
class Workload:
    """A named list of requests."""

    name: str
    queries: list[Query]
    group: int = field(default=1, kw_only=True)  # number of consecutive requests with a common prefix
    shared: int = field(default=0, kw_only=True)  # tokens of that prefix

    @staticmethod
    def of(name: str, prompts: Sequence[Ids], outputs: Sequence[int], group: int = 1, shared: int = 0) -> Workload:
        """Build a workload from prompts and answer lengths."""
        return Workload(name, list(map(Query, prompts, outputs)), group=group, shared=shared)

    @property
    def prompts(self) -> list[Ids]:
        """The token ids of each prompt."""
        return [query.ids for query in self.queries]

    @property
    def outputs(self) -> list[int]:
        """The length of each answer."""
        return [query.output_tokens for query in self.queries]

    @property
    def prompt_tokens(self) -> int:
        """The total of prompt tokens."""
        return sum(query.prompt_tokens for query in self.queries)

    @property
    def output_tokens(self) -> int:
        """The total of output tokens."""
        return sum(self.outputs)

    @property
    def is_at_once(self) -> bool:
        """Whether all requests are sent at the start."""
        return not any(query.at or query.after_tokens for query in self.queries)

    def encoded(self, encode: Encode, vocab_size: int) -> Self:
        """Return the workload with prompts encoded, and token ids within the vocabulary."""
        return replace(self, queries=encoded(self.queries, encode, vocab_size))


@dataclass(frozen=True, slots=True)
class Lengths:
    """A range of prompt or answer lengths, with the mean and the spread for lognormal ones."""

    low: int
    high: int
    mean: float
    sigma: float = SIGMA  # of the logarithm
    is_fitted: bool = False  # to a mean and a 99th percentile, so that it has no range of its own

    @staticmethod
    def parse(text: str) -> Lengths:
        """Read LOW..HIGH, a single length, MEAN:LOW..HIGH, or MEAN:p99=LENGTH.

        >>> Lengths.parse("64:8..512")
        Lengths(low=8, high=512, mean=64.0, sigma=0.8, is_fitted=False)
        """
        mean, _, span = text.rpartition(":")
        try:
            if span.startswith("p99="):
                return Lengths.fitted(float(mean), float(span.removeprefix("p99=")))
            low, dots, high = span.partition("..")
            found = Lengths(int(low), int(high) if dots else int(low), 0.0)
            found = replace(found, mean=float(mean) if mean else (found.low * found.high) ** 0.5)
        except ValueError:
            raise ChairliftError(
                f"{text!r} is not a length: use 128, 100..1024, 64:8..512 with a mean, or 64:p99=512"
            ) from None
        if not 1 <= found.low <= found.mean <= found.high:
            raise ChairliftError(f"{text!r} is not a length: use 1 or more, the lower first and the mean between them")
        return found

    @staticmethod
    def fitted(mean: float, p99: float) -> Lengths:
        """Return lognormal lengths with this mean and 99th percentile."""
        most = mean * math.exp(_Z99**2 / 2)  # no lognormal distribution has a heavier tail
        if not 1 <= mean < p99 < min(most, MOST_COUNT):
            raise ChairliftError(
                f"a mean of {mean:g} with a p99 of {p99:g} is no lognormal length: use a p99 above the mean, and less "
                "than 14 times it"
            )
        sigma = _Z99 - math.sqrt(_Z99**2 - 2 * math.log(p99 / mean))
        return Lengths(1, min(int(_FITTED_MOST * p99), MOST_COUNT), mean, sigma, is_fitted=True)

    def uniform(self, r: random.Random) -> int:
        """Draw a length between low and high."""
        if self.is_fitted:
            raise ChairliftError("lengths with a p99 are lognormal: use the workload lognormal, or a range LOW..HIGH")
        return r.randint(self.low, self.high)

    def lognormal(self, r: random.Random) -> int:
        """Draw a length around the mean, within low and high."""
        drawn = r.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return max(self.low, min(self.high, round(drawn)))


def uniform(n: int, prompt: Lengths, output: Lengths, vocab: int = 10000, seed: int = 0) -> Workload:
    """Draw lengths uniformly between low and high."""
    r = random.Random(seed)
    prompts = [[r.randint(0, vocab) for _ in range(prompt.uniform(r))] for _ in range(n)]
    return Workload.of("uniform", prompts, [output.uniform(r) for _ in range(n)])


def fixed(n: int, prompt: int, output: int, vocab: int = 10000, seed: int = 0) -> Workload:
    """Draw prompts of one length, with answers of one length."""
    r = random.Random(seed)
    return Workload.of("fixed", [[r.randint(0, vocab) for _ in range(prompt)] for _ in range(n)], [output] * n)


def groups(n: int, group: int, shared: int, own: int, output: int, vocab: int = 10000, seed: int = 0) -> Workload:
    """Draw groups of requests that share a prefix, such as a long system prompt, before their own tokens."""
    r = random.Random(seed)
    heads = [[r.randint(0, vocab) for _ in range(shared)] for _ in range(n)]
    prompts = [head + [r.randint(0, vocab) for _ in range(own)] for head in heads for _ in range(group)]
    return Workload.of("groups", prompts, [output] * len(prompts), group, shared)


def lognormal(n: int, prompt: Lengths, output: Lengths, seed: int = 0) -> Workload:
    """Draw many short and a few long requests."""
    import numpy as np

    rng = np.random.default_rng(seed)

    def draw(lengths: Lengths) -> list[int]:
        drawn = rng.lognormal(np.log(lengths.mean) - lengths.sigma**2 / 2, lengths.sigma, n)
        return [int(length) for length in np.clip(np.round(drawn), lengths.low, lengths.high)]

    prompts, outputs = draw(prompt), draw(output)
    return Workload.of("lognormal", [rng.integers(10, 31990, length).tolist() for length in prompts], outputs)


NAMED: dict[str, Callable[[], Workload]] = {
    "uniform256": lambda: uniform(256, Lengths(100, 1024, 0), Lengths(100, 1024, 0)),
    "uniform512": lambda: uniform(512, Lengths(100, 1024, 0), Lengths(100, 1024, 0)),
    "single": lambda: fixed(1, 128, 256),
    "prefill8k": lambda: fixed(32, 8192, 1),
    "groups512": lambda: groups(16, 32, 2048, 64, 64),
    "cpu64": lambda: lognormal(64, Lengths(8, 512, 64), Lengths(4, 256, 64), seed=1234),
}
GENERIC: dict[str, Callable[..., Workload]] = {"uniform": uniform, "lognormal": lognormal}


def make(name: str, requests: int, prompt: Lengths, output: Lengths, seed: int) -> Workload:
    """Return a workload by its name, a generic one with these lengths, or one from a JSONL file."""
    if name in NAMED:
        return replace(NAMED[name](), name=name)
    if name in GENERIC:
        return GENERIC[name](requests, prompt, output, seed=seed)
    path = Path(name)
    if not path.is_file():
        known = ", ".join([*NAMED, *GENERIC, "groups", "chats"])
        raise ChairliftError(f"there is no workload {name!r}: use {known}, or a JSONL file")
    return from_file(path, seed)


def from_file(path: Path, seed: int) -> Workload:
    """Read lines of {"prompt": text} or {"prompt_tokens": number or list of ids}, each with "output_tokens"."""
    r = random.Random(seed)

    def query_of(line: Any) -> Query:
        output = line["output_tokens"]
        if not isinstance(output, int) or not 1 <= output <= MOST_COUNT:
            raise ValueError(f"output_tokens is {show(output)}, not 1 to {MOST_COUNT:,}")
        match line:
            case {"prompt_tokens": [*ids]} if ids and all(isinstance(token, int) for token in ids):
                return Query(ids, output)
            case {"prompt_tokens": int(count)} if 0 < count <= MOST_COUNT:
                return Query([r.randint(0, 10000) for _ in range(count)], output)
            case {"prompt": str(text)} if text:
                return Query(text, output)
        raise ValueError(f'it has neither a "prompt" nor "prompt_tokens" of up to {MOST_COUNT:,}')

    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ChairliftError(f"{path} cannot be read: {one_line(error)}") from None
    queries = []
    for number, text in enumerate(content.splitlines(), 1):
        if not text.strip():
            continue
        try:
            queries.append(query_of(json.loads(text)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ChairliftError(f"{path}, line {number}, is not a valid request: {one_line(error)}") from None
    if not queries:
        raise ChairliftError(f"{path} holds no requests")
    return Workload(path.name, queries)
