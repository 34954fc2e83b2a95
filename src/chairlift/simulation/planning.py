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
from chairlift.simulation.replica import Hardware
from chairlift.simulation.run import Outlook, Simulation
from chairlift.traffic.query import Query

MOST_REPLICAS = 64
_WINDOW = 500  # requests of the busiest part
_FINALISTS = 4  # configurations that are simulated on the whole trace
Targets = Mapping[str, float]  # seconds at the 99th percentile, by name: ttft, tpot, e2e


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration."""

    hardware: str
    ranks: int
    bits: int  # of a weight
    kv_dtype: str
    settings: tuple[tuple[str, Any], ...] = ()
    replicas: int = 1

    @property
    def devices(self) -> int:
        """The number of devices that it needs."""
        return self.ranks * self.replicas

    def command(self, model: str) -> str:
        """Return the line that serves it."""
        parts = [f"chairlift serve {model}"]
        if self.replicas > 1:
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
    found += [(("step_tokens", 2048),), (("prefill", "splitfuse"),), (("policy", "sjf"),)]
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
    shapes: Mapping[tuple[int, str], Shape], targets: Targets, queries: Sequence[Query], each: Candidate
) -> Verdict:
    """Simulate a candidate."""
    settings = Settings.of(kv_dtype=each.kv_dtype, **dict(each.settings))
    hardware = Hardware.of(shapes[each.bits, each.kv_dtype], chip(each.hardware), settings, each.ranks)
    simulation = Simulation(hardware, settings, replicas=each.replicas, targets=targets)
    simulation.most_missed = len(queries) // 100  # more cannot hold: the rest need not be simulated
    outlook = simulation.run(queries)
    return Verdict(each, strain(outlook, targets), outlook.summary())


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
    scheduling. Then the finalists on the whole trace, with a replica more where the whole trace needs it.
    """
    on_part = partial(check, False)
    verdicts = []
    for verdict in workers.map(partial(replicas_needed, on_part), found):
        verdicts.append(verdict)
        advance(1)
    failing = [each for each in verdicts if not each.holds]
    kept = sorted((each for each in verdicts if each.holds), key=lambda each: price(each.candidate))
    half = kept[: max(1, len(kept) // 2)]
    tried = [
        replace(each.candidate, settings=settings, replicas=1) for each in half for settings in variants(targets)[1:]
    ]
    kept = half + [each for each in workers.map(partial(replicas_needed, on_part), tried) if each.holds]
    kept.sort(key=lambda each: (price(each.candidate), len(each.candidate.settings), max(each.strain.values())))
    finalists = [each.candidate for each in kept[:_FINALISTS]]
    whole = list(workers.map(partial(grown, partial(check, True)), finalists))
    advance(len(found))
    holding = sorted((each for each in whole if each.holds), key=lambda each: price(each.candidate))
    return Plan(holding, failing + [each for each in whole if not each.holds])


def grown(check: Callable[[Candidate], Verdict], each: Candidate) -> Verdict:
    """Return the verdict on the whole trace, with up to a quarter more replicas than its busiest part needs."""
    most = each.replicas + max(1, each.replicas // 4)
    for count in range(each.replicas, most + 1):
        verdict = check(replace(each, replicas=count))
        if verdict.holds:
            break
    return verdict
