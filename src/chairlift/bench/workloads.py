"""Workloads: prompts in token ids and the exact number of tokens to answer each with, the same on every machine."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chairlift.core.errors import ChairliftError
from chairlift.core.values import MOST_COUNT, one_line, show
from chairlift.core.words import counted

Ids = list[int]
SIGMA = 0.8  # of lognormal lengths: most are short and a few ten times as long, as in real traffic


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked, all of it at once."""

    name: str
    prompts: list[Ids]
    outputs: list[int]
    group: int = 1  # requests that follow each other and begin alike,
    shared: int = 0  # with so many tokens

    @property
    def prompt_tokens(self) -> int:
        """Tokens to read."""
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        """Tokens to write."""
        return sum(self.outputs)

    def within(self, vocab_size: int) -> Workload:
        """The same for a vocabulary that may be smaller."""
        return replace(self, prompts=[[token % vocab_size for token in prompt] for prompt in self.prompts])

    def __str__(self) -> str:
        return (
            f"{self.name}: {counted(len(self.prompts), 'request')}, {counted(self.prompt_tokens, 'prompt token')}, "
            f"{counted(self.output_tokens, 'output token')}"
        )


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long prompts or answers are: from low to high, and for skewed lengths their mean."""

    low: int
    high: int
    mean: float

    @staticmethod
    def parse(text: str) -> Lengths:
        """Read LOW..HIGH, a single length, or MEAN:LOW..HIGH.

        >>> Lengths.parse("64:8..512")
        Lengths(low=8, high=512, mean=64.0)
        """
        try:
            mean, _, span = text.rpartition(":")
            low, dots, high = span.partition("..")
            found = Lengths(int(low), int(high) if dots else int(low), 0.0)
            found = replace(found, mean=float(mean) if mean else (found.low * found.high) ** 0.5)
        except ValueError:
            raise ChairliftError(f"{text!r} is no length: use 128, 100..1024, or 64:8..512 with a mean") from None
        if not 1 <= found.low <= found.mean <= found.high:
            raise ChairliftError(f"{text!r} is no length: use 1 or more, the lower first and the mean between them")
        return found


def uniform(n: int, prompt: Lengths, output: Lengths, vocab: int = 10000, seed: int = 0) -> Workload:
    """Every length between low and high is as likely."""
    r = random.Random(seed)
    prompts = [[r.randint(0, vocab) for _ in range(r.randint(prompt.low, prompt.high))] for _ in range(n)]
    return Workload("uniform", prompts, [r.randint(output.low, output.high) for _ in range(n)])


def fixed(n: int, prompt: int, output: int, vocab: int = 10000, seed: int = 0) -> Workload:
    """All of one length."""
    r = random.Random(seed)
    return Workload("fixed", [[r.randint(0, vocab) for _ in range(prompt)] for _ in range(n)], [output] * n)


def groups(n: int, group: int, shared: int, own: int, output: int, vocab: int = 10000, seed: int = 0) -> Workload:
    """Groups of requests that begin alike, as with a long system prompt, and go on each in its own way."""
    r = random.Random(seed)
    heads = [[r.randint(0, vocab) for _ in range(shared)] for _ in range(n)]
    prompts = [head + [r.randint(0, vocab) for _ in range(own)] for head in heads for _ in range(group)]
    return Workload("groups", prompts, [output] * len(prompts), group, shared)


def lognormal(n: int, prompt: Lengths, output: Lengths, seed: int = 0) -> Workload:
    """Many short and a few long."""
    import numpy as np

    rng = np.random.default_rng(seed)

    def draw(lengths: Lengths) -> list[int]:
        drawn = rng.lognormal(np.log(lengths.mean) - SIGMA**2 / 2, SIGMA, n)
        return [int(length) for length in np.clip(np.round(drawn), lengths.low, lengths.high)]

    prompts, outputs = draw(prompt), draw(output)
    return Workload("lognormal", [rng.integers(10, 31990, length).tolist() for length in prompts], outputs)


NAMED: dict[str, Callable[[], Workload]] = {
    "uniform256": lambda: uniform(256, Lengths(100, 1024, 0), Lengths(100, 1024, 0)),
    "uniform512": lambda: uniform(512, Lengths(100, 1024, 0), Lengths(100, 1024, 0)),
    "single": lambda: fixed(1, 128, 256),
    "prefill8k": lambda: fixed(32, 8192, 1),
    "groups512": lambda: groups(16, 32, 2048, 64, 64),
    "cpu64": lambda: lognormal(64, Lengths(8, 512, 64), Lengths(4, 256, 64), seed=1234),
}
GENERIC: dict[str, Callable[..., Workload]] = {"uniform": uniform, "lognormal": lognormal}


def make(
    name: str, requests: int, prompt: Lengths, output: Lengths, seed: int, encode: Callable[[str], Ids]
) -> Workload:
    """A workload by its name, of a kind with lengths, or from a JSONL file."""
    if name in NAMED:
        return replace(NAMED[name](), name=name)
    if name in GENERIC:
        return GENERIC[name](requests, prompt, output, seed=seed)
    path = Path(name)
    if not path.is_file():
        known = ", ".join([*NAMED, *GENERIC])
        raise ChairliftError(f"there is no workload {name!r}: use {known}, or a JSONL file")
    return from_file(path, seed, encode)


def from_file(path: Path, seed: int, encode: Callable[[str], Ids]) -> Workload:
    """Read lines of {"prompt": text} or {"prompt_tokens": how many, or the ids}, each with "output_tokens"."""
    r = random.Random(seed)

    def prompt_of(line: dict[str, Any]) -> Ids:
        match line:
            case {"prompt_tokens": [*ids]} if ids and all(isinstance(token, int) for token in ids):
                return ids
            case {"prompt_tokens": int(count)} if 0 < count <= MOST_COUNT:
                return [r.randint(0, 10000) for _ in range(count)]
            case {"prompt": str(text)} if text:
                return encode(text)
        raise ValueError(f'it has neither a "prompt" nor "prompt_tokens" of up to {MOST_COUNT:,}')

    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ChairliftError(f"{path} cannot be read: {one_line(error)}") from None
    prompts, outputs = [], []
    for number, text in enumerate(content.splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            prompts.append(prompt_of(line))
            if not isinstance(line["output_tokens"], int) or not 1 <= line["output_tokens"] <= MOST_COUNT:
                raise ValueError(f"output_tokens is {show(line['output_tokens'])}, not 1 to {MOST_COUNT:,}")
            outputs.append(line["output_tokens"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ChairliftError(f"{path}, line {number}, is no request: {one_line(error)}") from None
    if not prompts:
        raise ChairliftError(f"{path} holds no requests")
    return Workload(path.name, prompts, outputs)
