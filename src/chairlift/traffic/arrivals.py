"""Arrivals: the send time and the prompt of each request, drawn from a distribution or replayed from a recording."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, islice, repeat, takewhile
from pathlib import Path

from chairlift.core.errors import ChairliftError
from chairlift.traffic.generators import generate, is_generator
from chairlift.traffic.query import VOCABULARY, Query
from chairlift.traffic.traces import read_trace
from chairlift.traffic.workloads import GENERIC, Lengths, make

KINDS = ("poisson", "constant", "burst", "diurnal")
DEFAULT_LENGTHS = Lengths(16, 256, 64)
REQUESTS = 64  # default of a generic workload
BURSTINESS = 0.25  # gaps with twice the standard deviation of a Poisson process
DAY = 86_400.0  # seconds; a diurnal rate is lowest at its start
SWING = 0.8  # of a diurnal rate around its mean: the busiest moment has nine times the requests of the quietest


def send_times(kind: str, rate: float, burstiness: float | None = None, seed: int = 0) -> Iterator[float]:
    """Return an endless iterator of send times: the first is 0, then `rate` per second on average."""
    if kind not in KINDS:
        raise ChairliftError(f"there are no arrivals {kind!r}: use {', '.join(KINDS)}, or a JSONL or CSV file")
    if not rate > 0:
        raise ChairliftError(f"the rate is {rate}: use more than 0 requests per second, or inf for all at once")
    if burstiness is not None and (kind != "burst" or math.isinf(rate)):
        raise ChairliftError("burstiness shapes the gaps of burst arrivals: add --arrivals burst and a finite --rate")
    if burstiness is not None and not 0 < burstiness < math.inf:
        raise ChairliftError(f"the burstiness is {burstiness}: use more than 0; 1 is Poisson, less is burstier")
    if math.isinf(rate):
        return repeat(0.0)
    if kind == "constant":
        return (number / rate for number in count())  # a sum of gaps would drift
    if kind == "diurnal":
        return _diurnal(rate, random.Random(seed))
    r, shape = random.Random(seed), BURSTINESS if burstiness is None else burstiness
    gaps = (r.expovariate(rate) if kind == "poisson" else r.gammavariate(shape, 1 / (rate * shape)) for _ in count())
    return accumulate(gaps, initial=0.0)


def _diurnal(rate: float, r: random.Random) -> Iterator[float]:
    """Yield the times of a Poisson process with a daily rhythm, by thinning one of the highest rate."""
    at = 0.0
    while True:
        at += r.expovariate(rate * (1 + SWING))
        if r.random() * (1 + SWING) < 1 - SWING * math.cos(2 * math.pi * at / DAY):
            yield at


@dataclass(frozen=True, slots=True)
class Demand:
    """Which requests to send and when, as the command line's flags describe it."""

    workload: str = "uniform"
    requests: int | None = None
    prompt: Lengths = DEFAULT_LENGTHS
    output: Lengths = DEFAULT_LENGTHS
    seed: int = 0
    arrivals: str = "poisson"
    rate: float | None = None  # requests per second; None: all at once, or a recording's own rate
    burstiness: float | None = None
    duration: float | None = None  # seconds; requests with a later send time are dropped
    vocab_size: int | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether the requests are from a recording, which has its own lengths and send times."""
        return self.arrivals not in KINDS and Path(self.arrivals).is_file()

    def send_times(self) -> Iterable[float]:
        """Return the send times: all 0 unless there is a rate."""
        times = send_times(self.arrivals, math.inf if self.rate is None else self.rate, self.burstiness, self.seed)
        return takewhile(self._is_in_time, times)

    def queries(self) -> list[Query]:
        """Return all requests of the run, ordered by send time; prompts that are texts are not encoded."""
        if self.is_recorded:
            return self._recorded()
        if is_generator(self.workload) and self.workload not in GENERIC:
            r = random.Random(self.seed)
            return [query.drawn(r, self.vocab_size or VOCABULARY) for query in self.stream()]
        times, limit = self.send_times(), self.requests
        if self.workload in GENERIC:
            times = list(islice(times, self.count))
            limit = len(times)
        made = make(self.workload, limit or 0, self.prompt, self.output, self.seed).queries
        found = [replace(query, at=at) for query, at in zip(made, islice(times, limit), strict=False)]
        return [query.within(self.vocab_size) for query in found] if self.vocab_size else found

    def stream(self) -> Iterator[Query]:
        """Draw the requests of a generator one by one, as lengths and block ids, for simulations of any length."""
        rate = math.inf if self.rate is None else self.rate

        def times(share: float, seed: int) -> Iterator[float]:
            return send_times(self.arrivals, rate * share, self.burstiness, seed)

        found = generate(self.workload, self.prompt, self.output, times, self.seed)
        return takewhile(lambda query: self._is_in_time(query.at), islice(found, self.count))

    @property
    def count(self) -> int | None:
        """The number of requests of a generator; None: as many as its duration holds."""
        is_endless = self.duration is None or self.rate is None or math.isinf(self.rate)
        return REQUESTS if self.requests is None and is_endless else self.requests

    def _recorded(self) -> list[Query]:
        if self.burstiness is not None:
            raise ChairliftError(
                "burstiness applies to drawn arrivals, and a recording has its own: leave one of them out"
            )
        found = at_rate(read_trace(Path(self.arrivals))[: self.requests], self.rate)
        return [each for each in found if self._is_in_time(each.at)]

    def _is_in_time(self, at: float) -> bool:
        return self.duration is None or at < self.duration


def at_rate(queries: Sequence[Query], rate: float | None) -> list[Query]:
    """Rescale the send times to `rate` requests per second on average."""
    if rate is None or not queries:
        return list(queries)
    if not rate > 0:
        raise ChairliftError(f"the rate is {rate}: use more than 0 requests per second, or inf for all at once")
    span = queries[-1].at
    scale = (len(queries) - 1) / rate / span if span else 0.0
    return [replace(each, at=each.at * scale) for each in queries]
