"""Arrivals: when each request leaves and what it asks, drawn from a distribution or replayed from a recording."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate, count, islice, repeat, takewhile
from pathlib import Path
from typing import Any

from chairlift.bench.workloads import GENERIC, Ids, Lengths, make
from chairlift.core.errors import ChairliftError
from chairlift.core.values import MOST_COUNT, one_line, show

KINDS = ("poisson", "constant", "burst")
USUAL = Lengths(16, 256, 64)
REQUESTS = 64  # of a generic workload, where nothing else says how many
VOCABULARY = 10000  # tokens are drawn below this where nobody says how many there are; real models have more
BURSTINESS = 0.25  # gaps that vary twice as much as a Poisson process's

# How the recordings we know name a request's moment, its prompt's and its answer's length, and seconds in a time unit.
COLUMNS: tuple[tuple[str, str, str, float], ...] = (
    ("timestamp", "prompt_tokens", "output_tokens", 1.0),
    ("timestamp", "input_length", "output_length", 0.001),  # Mooncake
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens", 1.0),  # Azure
    ("Timestamp", "Request tokens", "Response tokens", 1.0),  # BurstGPT
)

# Nearly every vocabulary has each of these as one token.
_COMMON = (
    "the of and to in is that for it as was with be by on not he this are or his from at which but have an had they "
    "you were their one all we can her has there been if more when will would who so no out up into them then she "
    "some what could time two may other its only my now over new these your any me first how people also made way"
)
WORDS = _COMMON.split()


@dataclass(frozen=True, slots=True)
class Query:
    """One request: when it leaves, in seconds from the start, what it asks, and how many tokens it wants back."""

    at: float
    prompt: Ids | str | int  # tokens, a text, or just how many tokens
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens to read; a text has none until a server has counted them."""
        return self.prompt if isinstance(self.prompt, int) else 0 if isinstance(self.prompt, str) else len(self.prompt)

    def tokens(self, r: random.Random, vocab_size: int) -> Ids | str:
        """The prompt for a server that reads tokens."""
        return r.choices(range(vocab_size), k=self.prompt) if isinstance(self.prompt, int) else self.prompt

    def text(self, r: random.Random) -> str:
        """The prompt for a server that reads text: about as many tokens as are wanted."""
        found = self.tokens(r, VOCABULARY)
        return found if isinstance(found, str) else " ".join(WORDS[token % len(WORDS)] for token in found)


def moments(kind: str, rate: float, burstiness: float | None = None, seed: int = 0) -> Iterator[float]:
    """When requests leave, without end: the first at once, then `rate` per second on average."""
    if kind not in KINDS:
        raise ChairliftError(f"there are no arrivals {kind!r}: use {', '.join(KINDS)}, or a JSONL or CSV file")
    if not rate > 0:
        raise ChairliftError(f"the rate is {rate}: use more than 0 requests per second, or inf for all at once")
    if burstiness is not None and (kind != "burst" or math.isinf(rate)):
        raise ChairliftError("burstiness shapes the gaps of burst arrivals: add --arrivals burst and a finite --rate")
    if burstiness is not None and not 0 < burstiness < math.inf:
        raise ChairliftError(f"the burstiness is {burstiness}: use more than 0; 1 is Poisson, less comes in clumps")
    if math.isinf(rate):
        return repeat(0.0)
    if kind == "constant":
        return (number / rate for number in count())  # a sum of gaps would drift
    r, shape = random.Random(seed), BURSTINESS if burstiness is None else burstiness
    gaps = (r.expovariate(rate) if kind == "poisson" else r.gammavariate(shape, 1 / (rate * shape)) for _ in count())
    return accumulate(gaps, initial=0.0)


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked and when, as the command line says it."""

    workload: str = "uniform"
    requests: int | None = None
    prompt: Lengths = USUAL
    output: Lengths = USUAL
    seed: int = 0
    arrivals: str = "poisson"
    rate: float | None = None  # None: all at once, or a recording's own
    burstiness: float | None = None
    duration: float | None = None  # seconds in which requests leave
    vocab_size: int | None = None

    def queries(self) -> list[Query]:
        """Every request of the run, in the order they leave."""
        if self.arrivals not in KINDS and Path(self.arrivals).is_file():
            return self._recorded()
        rate = math.inf if self.rate is None else self.rate
        times: Iterable[float] = moments(self.arrivals, rate, self.burstiness, self.seed)
        limit = self.requests
        if self.duration is not None:
            times = takewhile(self._is_in_time, times)
        if self.workload in GENERIC:
            if limit is None and (self.duration is None or math.isinf(rate)):
                limit = REQUESTS
            times = list(islice(times, limit))
            limit = len(times)
        texts: list[str] = []

        def keep(text: str) -> Ids:
            """The server has the tokenizer, not we: a text stands as one negative token until it is sent."""
            texts.append(text)
            return [-len(texts)]

        made = make(self.workload, limit or 0, self.prompt, self.output, self.seed, keep)
        prompts = [texts[-prompt[0] - 1] if texts and prompt[0] < 0 else prompt for prompt in made.prompts]
        if self.vocab_size:
            prompts = [p if isinstance(p, str) else [token % self.vocab_size for token in p] for p in prompts]
        return [
            Query(at, prompt, wanted)
            for prompt, wanted, at in zip(prompts, made.outputs, islice(times, limit), strict=False)
        ]

    def _recorded(self) -> list[Query]:
        if self.burstiness is not None:
            raise ChairliftError("burstiness shapes drawn arrivals, and a recording has its own: leave one of them out")
        found = at_rate(read_trace(Path(self.arrivals))[: self.requests], self.rate)
        return found if self.duration is None else list(takewhile(lambda each: self._is_in_time(each.at), found))

    def _is_in_time(self, at: float) -> bool:
        return self.duration is None or at < self.duration


def read_trace(path: Path) -> list[Query]:
    """Read a recording: JSONL, or CSV with a header; times count from its first request."""
    found: list[Query] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, row in _rows(file, is_csv=path.suffix.lower() == ".csv"):
                try:
                    found.append(_query(json.loads(row) if isinstance(row, str) else row))
                except (ValueError, TypeError, OverflowError, RecursionError) as error:
                    raise ChairliftError(f"{path}, line {number}, is no arrival: {one_line(error)}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ChairliftError(f"{path} cannot be read: {one_line(error)}") from None
    if not found:
        raise ChairliftError(f"{path} holds no arrivals")
    found.sort(key=lambda each: each.at)
    return [replace(each, at=each.at - found[0].at) for each in found]


def at_rate(queries: Sequence[Query], rate: float | None) -> list[Query]:
    """The same, closer together or farther apart, so that `rate` of them leave per second on average."""
    if rate is None or not queries:
        return list(queries)
    if not rate > 0:
        raise ChairliftError(f"the rate is {rate}: use more than 0 requests per second, or inf for all at once")
    span = queries[-1].at
    scale = (len(queries) - 1) / rate / span if span else 0.0
    return [replace(each, at=each.at * scale) for each in queries]


def _rows(file: Iterable[str], is_csv: bool) -> Iterator[tuple[int, str | dict[str, Any]]]:
    """Each line that holds something, with its number."""
    if not is_csv:
        yield from ((number, text) for number, text in enumerate(file, 1) if text.strip())
        return
    lines = csv.DictReader(file)
    for row in lines:
        yield lines.line_num, row


def _query(row: Any) -> Query:
    if not isinstance(row, dict):
        raise ValueError("it is no object with a timestamp and lengths")
    for moment, prompt, output, unit in COLUMNS:
        if moment in row and prompt in row and output in row:
            at = _seconds(row[moment], unit)
            return Query(at, _length(prompt, row[prompt]), _length(output, row[output]))
    known = "; ".join(", ".join(names) for *names, _unit in COLUMNS)
    raise ValueError(f"it has {', '.join(map(str, row)) or 'nothing'}, and needs one of: {known}")


def _seconds(value: Any, unit: float) -> float:
    """A moment in seconds: a number of units, or a date and time."""
    try:
        at = float(value) * unit
    except ValueError:
        try:
            date = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError(f"its time is {show(value)}, neither a number nor a date") from None
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    except TypeError:
        raise ValueError(f"its time is {show(value)}, neither a number nor a date") from None
    if not math.isfinite(at):
        raise ValueError(f"its time is {show(value)}, which is no moment")
    return at


def _length(name: str, value: Any) -> int:
    try:
        found = int(value)
    except (ValueError, TypeError, OverflowError):
        found = -1
    if not 0 <= found <= MOST_COUNT or isinstance(value, bool):
        raise ValueError(f"{name} is {show(value)}, not a number of tokens up to {MOST_COUNT:,}")
    return max(found, 1)  # an empty answer in a recording was a request all the same
