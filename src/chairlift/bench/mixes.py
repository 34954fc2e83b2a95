"""Mixes: requests as real traffic has them, each with a length that nobody knows before its last token has come."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from chairlift.bench import arrivals
from chairlift.bench.arrivals import VOCABULARY, Demand, moments
from chairlift.bench.workloads import GENERIC, NAMED, Ids
from chairlift.core.errors import ChairliftError

SIGMA = 1.2  # of lognormal12: one answer in ten is five times as long as the middle one
TENANTS = {"amber": 0.5, "birch": 1.0, "cedar": 2.0}  # how long each likes its answers, against the others
# How long answers to a prompt of this kind are in the middle, and through which endpoint it comes.
KINDS = {"label": (6, "completions"), "chat": (40, "chat"), "summary": (80, "chat"), "story": (200, "completions")}
WITHIN = 0.4  # sigma of lengths that share tenant and kind
FLOOD = 100  # requests of the loud tenant for each of the quiet one
TIGHTNESS = (1.0, 2.0, 4.0, 8.0)  # deadlines, in units of the tightest
SEATS = 16


@dataclass(frozen=True, slots=True)
class Ask:
    """One request and what only the experiment knows of it: its kind, and after how many tokens its answer ends."""

    prompt: Ids
    length: int
    at: float = 0.0  # seconds from the start
    after: int = 0  # and not before all others together have so many tokens: a moment that is the same on any machine
    tenant: str = ""
    kind: str = ""
    endpoint: str = ""
    priority: int = 0
    deadline: float | None = None  # seconds from `at` to its first token


@dataclass(frozen=True, slots=True)
class Mix:
    """A workload for a comparison; `cap` is the max_tokens of all where lengths are not known."""

    name: str
    asks: list[Ask]
    cap: int
    lengths_are_known: bool  # each request's max_tokens is its true length, so that only the batching differs
    seats: int = SEATS  # of a batch that shows the point
    rehearsal: list[Ask] = field(default_factory=list)  # asked before, and not measured: a predictor learns from them

    @property
    def lengths(self) -> list[int]:
        """The true length of every answer, in the order the requests come."""
        return [ask.length for ask in self.asks]

    @property
    def is_at_once(self) -> bool:
        """Whether everything is asked at the very start."""
        return not any(ask.at or ask.after for ask in self.asks)

    def max_tokens(self, ask: Ask) -> int:
        """What the scheduler is told: never more than it may know."""
        return ask.length if self.lengths_are_known else self.cap

    def within(self, vocab_size: int) -> Mix:
        """The same for a vocabulary that may be smaller."""

        def narrow(asks: list[Ask]) -> list[Ask]:
            return [replace(ask, prompt=[token % vocab_size for token in ask.prompt]) for ask in asks]

        return replace(self, asks=narrow(self.asks), rehearsal=narrow(self.rehearsal))


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a named mix is drawn, and how large it is unless someone says otherwise."""

    draw: Callable[[int, random.Random], list[Ask]]
    requests: int = 64
    lengths_are_known: bool = False
    seats: int = SEATS


def halves(n: int, r: random.Random) -> list[Ask]:
    """Half of the answers are short, half are long: what static batching is worst at."""
    lengths = [r.randint(2, 9) if i % 2 else r.randint(501, 600) for i in range(n)]
    r.shuffle(lengths)
    return [Ask(tokens(r, 8, 24), length, kind="short" if length < 10 else "long") for length in lengths]


def lognormal12(n: int, r: random.Random) -> list[Ask]:
    """Many short and a few very long, as chats are."""
    return [Ask(tokens(r, 16, 64), lognormal(r, 64, SIGMA, 1024)) for _ in range(n)]


def homogeneous(n: int, r: random.Random) -> list[Ask]:
    """All alike: the one case in which static batching loses nothing."""
    return [Ask(tokens(r, 32, 32), 128) for _ in range(n)]


def tenants(n: int, r: random.Random) -> list[Ask]:
    """Lengths that depend on who asks and on the prompt's first tokens; a predictor has to find that out."""
    prefixes = {kind: tokens(r, 32, 32) for kind in KINDS}
    asks = []
    for _ in range(n):
        tenant, kind = r.choice(list(TENANTS)), r.choice(list(KINDS))
        middle, endpoint = KINDS[kind]
        length = lognormal(r, middle * TENANTS[tenant], WITHIN, 1024)
        asks.append(Ask(prefixes[kind] + tokens(r, 4, 32), length, tenant=tenant, kind=kind, endpoint=endpoint))
    return asks


def flood(n: int, r: random.Random) -> list[Ask]:
    """One tenant asks a hundred times as often as the other, whose few, on long texts, come in between."""
    quiet = max(1, n // (FLOOD + 1))
    places = {(2 * i + 1) * n // (2 * quiet) for i in range(quiet)}
    return [
        Ask(tokens(r, 1000, 1500), r.randint(16, 32), tenant="quiet")
        if place in places
        else Ask(tokens(r, 16, 64), r.randint(16, 32), tenant="loud")
        for place in range(n)
    ]


def priorities(n: int, r: random.Random) -> list[Ask]:
    """One in eight is urgent."""
    urgent = set(r.sample(range(n), max(1, n // 8)))
    return [
        Ask(tokens(r, 16, 64), lognormal(r, 32, 0.8, 256), kind=kind, priority=int(kind == "urgent"))
        for kind in ("urgent" if place in urgent else "ordinary" for place in range(n))
    ]


def deadlines(n: int, r: random.Random) -> list[Ask]:
    """First tokens are due soon for some and much later for others."""
    return [
        Ask(tokens(r, 16, 64), lognormal(r, 32, 0.8, 256), kind=f"{tightness:g}x", deadline=tightness)
        for tightness in (r.choice(TIGHTNESS) for _ in range(n))
    ]


def longprompt(n: int, r: random.Random) -> list[Ask]:
    """Sixteen answers are being written when a prompt of 2,000 tokens joins: how long do they stall?"""
    decodes = [Ask(tokens(r, 16, 16), 128, kind="decode") for _ in range(max(1, n - 1))]
    return [*decodes, Ask(tokens(r, 2000, 2000), 16, after=32 * len(decodes), kind="newcomer")]


MIXES: dict[str, Recipe] = {
    "halves": Recipe(halves, lengths_are_known=True),
    "lognormal12": Recipe(lognormal12, lengths_are_known=True),
    "homogeneous": Recipe(homogeneous, lengths_are_known=True),
    "tenants": Recipe(tenants, requests=128),
    "flood": Recipe(flood, requests=5 * (FLOOD + 1)),
    "priorities": Recipe(priorities),
    "deadlines": Recipe(deadlines),
    "longprompt": Recipe(longprompt, requests=17, seats=17),
}


def make(
    demand: Demand,
    encode: Callable[[str], Ids],
    *,
    deadline: float = 1.0,
    cap: int | None = None,
    lengths_are_known: bool | None = None,
    rehearse: int = 0,
    only: str | None = None,
) -> Mix:
    """A mix by its name, or any other workload or recording; `deadline` is the tightest one, in seconds."""
    recipe = None if is_recorded(demand) else MIXES.get(demand.workload)
    if recipe is None:
        asks = demanded(demand, encode)
    else:
        asks = recipe.draw(rehearse + (demand.requests or recipe.requests), random.Random(demand.seed))
        asks = [ask if ask.deadline is None else replace(ask, deadline=ask.deadline * deadline) for ask in asks]
        asks = arriving(asks, demand)
    if only is not None:  # at the moments they have among the others
        known = sorted({ask.tenant for ask in asks})
        asks = [ask for ask in asks if ask.tenant == only]
        if not asks:
            raise ChairliftError(f"no request is by {only!r}: the tenants are {', '.join(known) or 'none'}")
    rehearsal, asks = asks[:rehearse], asks[rehearse:]
    if not asks:
        raise ChairliftError("no request is left to run: give a longer --duration or more --requests")
    longest = max(ask.length for ask in (*rehearsal, *asks))
    asks = [replace(ask, at=ask.at - asks[0].at) for ask in asks]
    if cap is not None and cap < longest:
        raise ChairliftError(f"max_tokens is {cap}, less than the longest answer of {longest} tokens: use that or more")
    return Mix(
        Path(demand.arrivals).name if is_recorded(demand) else Path(demand.workload).name,
        asks,
        cap or 1 << longest.bit_length(),
        (recipe is not None and recipe.lengths_are_known) if lengths_are_known is None else lengths_are_known,
        recipe.seats if recipe else SEATS,
        rehearsal,
    )


def is_recorded(demand: Demand) -> bool:
    """Whether the requests come from a recording, which has its own lengths and moments."""
    return demand.arrivals not in arrivals.KINDS and Path(demand.arrivals).is_file()


def arriving(asks: Iterable[Ask], demand: Demand) -> list[Ask]:
    """The same at the moments that were asked for; all at once, unless there is a rate."""
    rate = math.inf if demand.rate is None else demand.rate
    times = moments(demand.arrivals, rate, demand.burstiness, demand.seed)
    timed = [replace(ask, at=at) for ask, at in zip(asks, times, strict=False)]
    return [ask for ask in timed if demand.duration is None or ask.at < demand.duration]


def demanded(demand: Demand, encode: Callable[[str], Ids]) -> list[Ask]:
    """The workloads and recordings that `chairlift bench` knows."""
    known = [*MIXES, *NAMED, *GENERIC]
    if not is_recorded(demand) and demand.workload not in known and not Path(demand.workload).is_file():
        raise ChairliftError(f"there is no workload {demand.workload!r}: use {', '.join(known)}, or a JSONL file")
    r = random.Random(demand.seed)
    asks = []
    for query in demand.queries():
        prompt = query.tokens(r, VOCABULARY)
        asks.append(Ask(encode(prompt) if isinstance(prompt, str) else prompt, query.output_tokens, query.at))
    return asks


def tokens(r: random.Random, low: int, high: int) -> Ids:
    """A prompt of a length between the two."""
    return r.choices(range(VOCABULARY), k=r.randint(low, high))


def lognormal(r: random.Random, middle: float, sigma: float, longest: int) -> int:
    """A length around the middle one, as often longer as shorter."""
    return max(1, min(longest, round(middle * r.lognormvariate(0, sigma))))
