"""The planner: the cheapest configurations that hold latency targets on a trace, found by simulating them.

Candidates are tried on the trace's busiest part first, where targets break, with as many replicas as they need there.
The cheapest are then simulated on the whole trace. What does not hold is reported with the target that breaks first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from chairlift.core.errors import ChairliftError
from chairlift.core.settings import Settings
from chairlift.costs.hardware import Shape, chip, kv_tokens
from chairlift.routing.pools import Role
from chairlift.simulation.replica import Hardware
from chairlift.simulation.run import Outlook, Simulation
from chairlift.traffic.query import Query

MOST_REPLICAS = 64
_WINDOW = 500  # requests of the busiest part
_FINALISTS = 4  # configurations that are simulated on the whole trace
ROLES = ((1, 1), (1, 2), (2, 1), (1, 3))  # numbers of prefill and of decode replicas in a group
SCALES = (0.25, 0.5, 0.7, 0.85, 1.0, 1.15, 1.3, 1.6, 2.0, 3.0)  # of the rate, for the capacity curve
Targets = Mapping[str, float]  # seconds at the 99th percentile, by name: ttft, tpot, e2e


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration."""

    hardware: str
    ranks: int
    bits: int  # of a weight
    kv_dtype: str
    settings: tuple[tuple[str, Any], ...] = ()
    replicas: int = 1  # or groups of prefill and decode replicas, with `role_split`
    role_split: tuple[int, int] | None = None  # prefill and decode replicas of a group; None: all compute both

    @property
    def roles(self) -> list[Role]:
        """The role of each replica."""
        counts: list[tuple[Role, int]] = [("both", 1)]
        if self.role_split is not None:
            counts = [("prefill", self.role_split[0]), ("decode", self.role_split[1])]
        return [role for role, count in counts for _ in range(count * self.replicas)]

    @property
    def devices(self) -> int:
        """The number of devices that it needs."""
        return self.ranks * len(self.roles)

    def command(self, model: str) -> str:
        """Return the command that serves it."""
        parts = [f"chairlift serve {model}"]
        if self.role_split is not None:
            prefill, decode = (self.replicas * count for count in self.role_split)
            parts.append(f"--role prefill={prefill},decode={decode}")
        elif self.replicas > 1:
            parts.append(f"--replicas {self.replicas}")
        if self.ranks > 1:
            parts.append(f"--tensor-parallel {self.ranks}")
        if self.bits < 16:
            parts.append(f"--quantization {'fp8' if self.bits == 8 else 'int4'}")
        if self.kv_dtype != "auto":
            parts.append(f"--kv-dtype {self.kv_dtype}")
        parts += [f"--{name.replace('_', '-')} {value}" for name, value in self.settings]
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a candidate did: each target's 99th percentile as a multiple of the target."""

    candidate: Candidate
    strain: dict[str, float]
    summary: dict[str, Any]

    @property
    def holds(self) -> bool:
        """Whether every target holds."""
        return all(share <= 1 for share in self.strain.values())

    @property
    def breaks_first(self) -> str:
        """The target that is exceeded most."""
        return max(self.strain, key=lambda name: self.strain[name])


def variants(targets: Targets) -> list[tuple[tuple[str, Any], ...]]:
    """Return the schedulings to try: the default first."""
    found: list[tuple[tuple[str, Any], ...]] = [()]
    if "tpot" in targets:
        found.append((("target_tpot", round(0.8 * targets["tpot"], 4)),))
    found += [(("step_tokens", size),) for size in (512, 1024, 2048)]
    found += [(("prefill", mode),) for mode in ("splitfuse", "prefill-first")]
    found += [(("policy", policy),) for policy in ("sjf", "longest-prefix")]
    return found


def candidates(
    shapes: Mapping[tuple[int, str], Shape], hardware: Sequence[str], ranks: Sequence[int]
) -> Iterator[Candidate]:
    """Yield the ways to place a model, by bits of weights and KV dtype, in which it fits."""
    for name in hardware:
        on = chip(name)
        for count in ranks:
            for (bits, kv_dtype), shape in shapes.items():
                try:
                    kv_tokens(shape, on, count)
                except ChairliftError:
                    continue
                yield Candidate(name, count, bits, kv_dtype)


def busiest(queries: Sequence[Query], count: int = _WINDOW) -> list[Query]:
    """Return the `count` consecutive requests that arrive in the shortest time, with times from 0."""
    if len(queries) <= count:
        return list(queries)
    first = min(range(len(queries) - count + 1), key=lambda at: queries[at + count - 1].at - queries[at].at)
    begun = queries[first].at
    return [replace(each, at=each.at - begun) for each in queries[first : first + count]]


def judge(
    shapes: Mapping[tuple[int, str], Shape],
    targets: Targets,
    queries: Sequence[Query],
    each: Candidate,
    *,
    to_the_end: bool = False,
) -> Verdict:
    """Simulate a candidate, until it has failed or, if asked, to the end."""
    settings = Settings.of(kv_dtype=each.kv_dtype, **dict(each.settings))
    hardware = Hardware.of(shapes[each.bits, each.kv_dtype], chip(each.hardware), settings, each.ranks)
    simulation = Simulation(hardware, settings, roles=each.roles, targets=targets)
    if not to_the_end:
        simulation.most_missed = len(queries) // 100  # more cannot hold: the rest need not be simulated
    outlook = simulation.run(queries)
    return Verdict(each, strain(outlook, targets), outlook.summary())


def faster(queries: Sequence[Query], scale: float) -> Sequence[Query]:
    """Return the requests at a multiple of their rate."""
    return queries if scale == 1 else [replace(each, at=each.at / scale) for each in queries]


def strain(outlook: Outlook, targets: Targets) -> dict[str, float]:
    """Return the 99th percentile of each target as a multiple of it; a rejected request breaks all."""
    if outlook.rejected > 0.01 * outlook.requests:
        return dict.fromkeys(targets, float("inf"))
    found = {name: outlook.times[name].percentile(99) / limit for name, limit in targets.items()}
    if outlook.is_broken_off:
        worst = max(found, key=lambda name: outlook.missed[name])
        found[worst] = max(found[worst], 1.01)
    return found


def replicas_needed(check: Callable[[Candidate], Verdict], each: Candidate, most: int = MOST_REPLICAS) -> Verdict:
    """Return the verdict with the fewest replicas that hold the targets, or with the most if none does."""
    failed, count = 0, 1
    while True:
        verdict = check(replace(each, replicas=count))
        if verdict.holds or count >= most:
            break
        failed, count = count, min(most, 2 * count)
    if not verdict.holds:
        return verdict
    while count - failed > 1:
        middle = (failed + count) // 2
        tried = check(replace(each, replicas=middle))
        if tried.holds:
            verdict, count = tried, middle
        else:
            failed = middle
    return verdict


@dataclass(frozen=True, slots=True)
class Plan:
    """What holds, the cheapest first, and what does not."""

    holding: list[Verdict]  # simulated on the whole trace
    failing: list[Verdict]
    variants: list[Verdict]  # other schedulings and roles of the cheaper placements, at the busiest time


def search(
    found: Sequence[Candidate],
    check: Callable[[bool, Candidate], Verdict],
    price: Callable[[Candidate], float],
    targets: Targets,
    workers: Executor,
    advance: Callable[[int], None] = lambda _: None,
) -> Plan:
    """Find the cheapest of the candidates, each with its best scheduling; `check` simulates one, on the trace if True.

    First each placement alone, by the replicas it needs at the busiest time. Then the cheaper half with every
    scheduling, and with prompts and answers apart. Then the finalists on the whole trace, with a replica more where the
    whole trace needs it.
    """
    on_part = partial(check, False)
    verdicts = []
    for verdict in workers.map(partial(replicas_needed, on_part), found):
        verdicts.append(verdict)
        advance(1)
    failing = [each for each in verdicts if not each.holds]
    kept = sorted((each for each in verdicts if each.holds), key=lambda each: price(each.candidate))
    half = kept[: max(1, -(-len(kept) // 2))]
    tried = [
        replace(each.candidate, settings=settings, replicas=1) for each in half for settings in variants(targets)[1:]
    ]
    tried += [
        replace(each.candidate, role_split=split, replicas=1)
        for each in half
        for split in ROLES
        if each.candidate.replicas > 1
    ]
    others = list(workers.map(partial(replicas_needed, on_part), tried))
    kept = half + [each for each in others if each.holds]
    kept.sort(key=lambda each: (price(each.candidate), len(each.candidate.settings), max(each.strain.values())))
    finalists = [each.candidate for each in kept[:_FINALISTS]]
    whole = list(workers.map(partial(grown, partial(check, True)), finalists))
    advance(len(found))
    holding = sorted((each for each in whole if each.holds), key=lambda each: price(each.candidate))
    failing += [each for each in (*others, *whole) if not each.holds]
    return Plan(holding, failing, others)


def grown(check: Callable[[Candidate], Verdict], each: Candidate) -> Verdict:
    """Return the verdict on the whole trace, with up to a quarter more replicas than its busiest part needs."""
    most = each.replicas + max(1, each.replicas // 4)
    for count in range(each.replicas, most + 1):
        verdict = check(replace(each, replicas=count))
        if verdict.holds:
            break
    return verdict


@dataclass(frozen=True, slots=True)
class Point:
    """A configuration at one rate: requests a second, and the 99th percentiles in milliseconds by target."""

    rate: float
    ms: dict[str, float]


def capacity_curve(
    check: Callable[[float, Candidate], Verdict], each: Candidate, rate: float, targets: Targets, workers: Executor
) -> list[Point]:
    """Return what a configuration does at rates around the busiest one; `check` simulates it at a multiple of that."""
    verdicts = workers.map(lambda scale: check(scale, each), SCALES)
    found = []
    for scale, verdict in zip(SCALES, verdicts, strict=True):
        times = verdict.summary["ms"]
        found.append(Point(scale * rate, {name: times[name]["p99"] for name in targets if name in times}))
    return found


def rate_of(queries: Sequence[Query]) -> float:
    """Return requests a second; 0 if all arrive at once."""
    span = queries[-1].at - queries[0].at if queries else 0.0
    return (len(queries) - 1) / span if span else 0.0
