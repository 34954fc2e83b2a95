"""Mixes: workloads for comparing schedulers, with answer lengths that are known only when an answer ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from chairlift.core.errors import ChairliftError
from chairlift.traffic.arrivals import Demand
from chairlift.traffic.generators import GENERATORS, is_generator
from chairlift.traffic.query import VOCABULARY, Encode, Ids, Query, encoded
from chairlift.traffic.workloads import NAMED, Workload

SIGMA = 1.2  # of lognormal12: one answer in ten is five times as long as the median
TENANTS = {"amber": 0.5, "birch": 1.0, "cedar": 2.0}  # answer length of each tenant, relative to the others
# Median answer length and endpoint of each kind of prompt.
KINDS = {"label": (6, "completions"), "chat": (40, "chat"), "summary": (80, "chat"), "story": (200, "completions")}
WITHIN = 0.4  # sigma of lengths within one tenant and kind
FLOOD = 100  # requests of the loud tenant for each of the quiet one
TIGHTNESS = (1.0, 2.0, 4.0, 8.0)  # deadlines, in units of the shortest
MAX_SEQUENCES = 16


@dataclass(frozen=True, slots=True)
class Mix(Workload):
    """A workload for a comparison; `cap` is the max_tokens of all requests if lengths are hidden."""

    cap: int
    lengths_are_known: bool  # each request's max_tokens is its true length, so that only the batching differs
    max_sequences: int = MAX_SEQUENCES  # a batch size at which the scheduling choices differ
    rehearsal: list[Query] = field(default_factory=list)  # sent before the measurement, for a predictor to learn from

    def max_tokens(self, query: Query) -> int:
        """Return the request's max_tokens: its true length if lengths are known, else the cap."""
        return query.output_tokens if self.lengths_are_known else self.cap

    def encoded(self, encode: Encode, vocab_size: int) -> Self:
        """Return the mix with prompts encoded, and token ids within the vocabulary."""
        queries, rehearsal = (encoded(each, encode, vocab_size) for each in (self.queries, self.rehearsal))
        return replace(self, queries=queries, rehearsal=rehearsal)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a named mix is drawn, and its default size."""

    draw: Callable[[int, random.Random], list[Query]]
    requests: int = 64
    lengths_are_known: bool = False
    max_sequences: int = MAX_SEQUENCES


def halves(n: int, r: random.Random) -> list[Query]:
    """Half of the answers are short, half are long: the worst case of static batching."""
    lengths = [r.randint(2, 9) if i % 2 else r.randint(501, 600) for i in range(n)]
    r.shuffle(lengths)
    return [Query(tokens(r, 8, 24), length, kind="short" if length < 10 else "long") for length in lengths]


def lognormal12(n: int, r: random.Random) -> list[Query]:
    """Many short answers and a few very long ones, as in chats."""
    return [Query(tokens(r, 16, 64), lognormal(r, 64, SIGMA, 1024)) for _ in range(n)]


def homogeneous(n: int, r: random.Random) -> list[Query]:
    """Equal prompts and answers: the one case in which static batching loses nothing."""
    return [Query(tokens(r, 32, 32), 128) for _ in range(n)]


def tenants(n: int, r: random.Random) -> list[Query]:
    """Answer lengths depend on the tenant and the prompt's first tokens, which a predictor has to learn."""
    prefixes = {kind: tokens(r, 32, 32) for kind in KINDS}
    queries = []
    for _ in range(n):
        tenant, kind = r.choice(list(TENANTS)), r.choice(list(KINDS))
        middle, endpoint = KINDS[kind]
        length = lognormal(r, middle * TENANTS[tenant], WITHIN, 1024)
        queries.append(Query(prefixes[kind] + tokens(r, 4, 32), length, tenant=tenant, kind=kind, endpoint=endpoint))
    return queries


def flood(n: int, r: random.Random) -> list[Query]:
    """One tenant sends a hundred times as many requests as the other, which sends a few long prompts in between."""
    quiet = max(1, n // (FLOOD + 1))
    places = {(2 * i + 1) * n // (2 * quiet) for i in range(quiet)}
    return [
        Query(tokens(r, 1000, 1500), r.randint(16, 32), tenant="quiet")
        if place in places
        else Query(tokens(r, 16, 64), r.randint(16, 32), tenant="loud")
        for place in range(n)
    ]


def priorities(n: int, r: random.Random) -> list[Query]:
    """One request in eight is urgent."""
    urgent = set(r.sample(range(n), max(1, n // 8)))
    return [
        Query(tokens(r, 16, 64), lognormal(r, 32, 0.8, 256), kind=kind, priority=int(kind == "urgent"))
        for kind in ("urgent" if place in urgent else "ordinary" for place in range(n))
    ]


def deadlines(n: int, r: random.Random) -> list[Query]:
    """First tokens are due soon for some requests and much later for others."""
    return [
        Query(tokens(r, 16, 64), lognormal(r, 32, 0.8, 256), kind=f"{tightness:g}x", deadline=tightness)
        for tightness in (r.choice(TIGHTNESS) for _ in range(n))
    ]


def longprompt(n: int, r: random.Random) -> list[Query]:
    """A prompt of 2,000 tokens arrives while sixteen sequences decode, to measure how long they stall."""
    decodes = [Query(tokens(r, 16, 16), 128, kind="decode") for _ in range(max(1, n - 1))]
    return [*decodes, Query(tokens(r, 2000, 2000), 16, after_tokens=32 * len(decodes), kind="newcomer")]


MIXES: dict[str, Recipe] = {
    "halves": Recipe(halves, lengths_are_known=True),
    "lognormal12": Recipe(lognormal12, lengths_are_known=True),
    "homogeneous": Recipe(homogeneous, lengths_are_known=True),
    "tenants": Recipe(tenants, requests=128),
    "flood": Recipe(flood, requests=5 * (FLOOD + 1)),
    "priorities": Recipe(priorities),
    "deadlines": Recipe(deadlines),
    "longprompt": Recipe(longprompt, requests=17, max_sequences=17),
}


def make(
    demand: Demand,
    *,
    deadline: float = 1.0,
    cap: int | None = None,
    lengths_are_known: bool | None = None,
    rehearse: int = 0,
    only: str | None = None,
) -> Mix:
    """Draw a mix by name, or any other workload or recording; `deadline` is the shortest one, in seconds."""
    recipe = None if demand.is_recorded else MIXES.get(demand.workload)
    if recipe is None:
        queries = bench_queries(demand)
    else:
        drawn = recipe.draw(rehearse + (demand.requests or recipe.requests), random.Random(demand.seed))
        queries = [
            replace(query, at=at, deadline=None if query.deadline is None else query.deadline * deadline)
            for query, at in zip(drawn, demand.send_times(), strict=False)
        ]
    if only is not None:  # their send times stay as they are
        known = sorted({query.tenant for query in queries})
        queries = [query for query in queries if query.tenant == only]
        if not queries:
            raise ChairliftError(f"no request is from tenant {only!r}: the tenants are {', '.join(known) or 'none'}")
    rehearsal, queries = queries[:rehearse], queries[rehearse:]
    if not queries:
        raise ChairliftError("there is no request to run: give a longer --duration or more --requests")
    longest = max(query.output_tokens for query in (*rehearsal, *queries))
    if cap is not None and cap < longest:
        raise ChairliftError(f"max_tokens is {cap}, less than the longest answer of {longest} tokens: use that or more")
    return Mix(
        Path(demand.arrivals if demand.is_recorded else demand.workload).name,
        [replace(query, at=query.at - queries[0].at) for query in queries],
        cap or 1 << longest.bit_length(),
        (recipe is not None and recipe.lengths_are_known) if lengths_are_known is None else lengths_are_known,
        recipe.max_sequences if recipe else MAX_SEQUENCES,
        rehearsal,
    )


def bench_queries(demand: Demand) -> list[Query]:
    """Return the requests of a workload or recording of `chairlift bench`."""
    known = [*MIXES, *NAMED, *GENERATORS]
    is_known = demand.workload in known or is_generator(demand.workload)
    if not demand.is_recorded and not is_known and not Path(demand.workload).is_file():
        raise ChairliftError(f"there is no workload {demand.workload!r}: use {', '.join(known)}, or a JSONL file")
    r = random.Random(demand.seed)
    return [query.drawn(r) for query in demand.queries()]


def tokens(r: random.Random, low: int, high: int) -> Ids:
    """Draw a prompt of `low` to `high` tokens."""
    return r.choices(range(VOCABULARY), k=r.randint(low, high))


def lognormal(r: random.Random, middle: float, sigma: float, longest: int) -> int:
    """Draw a length with the median `middle`."""
    return max(1, min(longest, round(middle * r.lognormvariate(0, sigma))))
