"""How near a simulation is: measure the steps of the real engine, fit the cost model, and simulate what it ran."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from chairlift.bench.drive import Driver, MixResult
from chairlift.core.budget import work_of
from chairlift.core.cost import Cost
from chairlift.core.plan import StepPlan
from chairlift.core.settings import Settings
from chairlift.core.words import counted
from chairlift.costs.fit import Fit, MeasuredStep, fit
from chairlift.engine.engine import Engine
from chairlift.execution.build import Built, Loaded, assemble
from chairlift.report.numbers import percentile
from chairlift.simulation.replica import Hardware
from chairlift.simulation.run import Simulation
from chairlift.traffic.mixes import Mix
from chairlift.traffic.query import Query

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512)  # requests of a wave
_LONE = 16  # requests that find the engine idle
_LONE_TOKENS = 32
_LONE_GAP = 20  # times the seconds that one takes
_ANSWER = 24  # tokens
_PAUSE = 0.3  # of a step's seconds: after a longer pause the engine was idle, not slow
METRICS = ("ttft", "tpot")
SHARES = (50, 99)


class StepRecorder(Driver):
    """Runs a mix and records the work of each step, and the seconds from the end of the one before it."""

    def __init__(self, engine: Engine, mix: Mix, steps: list[MeasuredStep]) -> None:
        super().__init__(engine, mix)
        self._measured = steps
        self._ended = 0.0

    def _step(self, plan: StepPlan, began: float, seconds: float) -> None:
        end = began + seconds
        pause = began - self._ended
        # The host's work between two steps is part of a step's cost; a wait for requests is not.
        interval = end - self._ended if 0 <= pause < _PAUSE * seconds else seconds
        if plan.tokens:
            self._measured.append(MeasuredStep(work_of(plan), interval))
        self._ended = end


def waves(built: Built, seed: int = 0) -> list[Mix]:
    """Return the requests to calibrate with: waves of 1, 2, 3, 4, 6, ... requests, half of which join later."""
    limits, r = built.limits, random.Random(seed)
    found = []
    for size in _SIZES:
        if size > limits.max_sequences:
            break
        longest = min(
            limits.max_length - _ANSWER - 1, limits.step_tokens, max(32, built.capacity.tokens // size - _ANSWER)
        )
        queries = []
        for number in range(size):
            length = int(16 * (longest / 16) ** r.random()) if longest > 16 else longest
            later = r.randrange(size * _ANSWER // 2) if number % 2 else 0
            ids = [r.randrange(built.config.vocab_size) for _ in range(max(1, length))]
            queries.append(Query(ids, _ANSWER, after_tokens=later))
        queries.sort(key=lambda query: query.after_tokens)
        found.append(Mix(counted(size, "request"), queries, cap=_ANSWER, lengths_are_known=True))
    return found


def calibrate(built: Built, notice: Callable[[str], None] = lambda _: None) -> Fit:
    """Measure steps of many compositions and fit the cost model."""
    steps: list[MeasuredStep] = []
    mixes = waves(built)
    for number, mix in enumerate(mixes):
        notice(f"steps of {mix.name}, {number + 1} of {len(mixes)}")
        StepRecorder(built.engine, mix, []).run()  # compiles, captures and warms up
        built.engine.clear_prefix_cache()
        StepRecorder(built.engine, mix, steps).run()
        built.engine.clear_prefix_cache()
    found = fit(steps)
    notice("requests that find the engine idle")
    return replace(found, wake=wake_of(built, found.cost))


def wake_of(built: Built, cost: Cost, seed: int = 0) -> float:
    """Return the seconds from an arrival at an idle engine to its first token, beyond those of its step.

    The driver's sleep and the submission are in it, and caches, threads and clocks that must wake up.
    """
    length = min(_LONE_TOKENS, built.limits.max_length - 2, built.limits.step_tokens)
    expected = cost.prompt_seconds(length) + cost.sample
    r = random.Random(seed)
    gap = max(0.05, _LONE_GAP * expected)
    ids = [[r.randrange(built.config.vocab_size) for _ in range(length)] for _ in range(_LONE)]
    queries = [Query(prompt, 1, at=gap * number) for number, prompt in enumerate(ids, 1)]
    result = Driver(built.engine, Mix("lone requests", queries, cap=1, lengths_are_known=True)).run()
    built.engine.clear_prefix_cache()
    return max(0.0, median(record.ttft for record in result.records) - expected)


def hardware_of(built: Built, found: Fit) -> Hardware:
    """Return this machine for a simulation: the measured cost, and the limits and the capacity of the real engine."""
    return Hardware(
        found.cost,
        built.limits,
        built.capacity.kv_tokens,
        built.capacity.block_size,
        built.engine.overlap,
        kv_bytes=built.capacity.bytes_per_token,
        wake=found.wake,
    )


@dataclass(frozen=True, slots=True)
class Compared:
    """A quantity of the real run and of the simulated one."""

    name: str
    real: float
    simulated: float

    @property
    def error(self) -> float:
        """The relative error of the simulation."""
        return self.simulated / self.real - 1 if self.real else 0.0


def online(queries: Sequence[Query]) -> Mix:
    """Return the mix of a real run: requests at their times, with the answers' lengths known."""
    return Mix("the workload", list(queries), cap=0, lengths_are_known=True)


def run_real(loaded: Loaded, settings: Mapping[str, Any], queries: Sequence[Query]) -> MixResult:
    """Run requests at their times on a new engine."""
    built = assemble(loaded, Settings.of(**settings), progress=False)
    mix = online(queries)
    try:
        warm = replace(mix, queries=[replace(query, at=0.0) for query in queries[:4]])
        Driver(built.engine, warm).run()
        built.engine.clear_prefix_cache()
        return Driver(built.engine, mix).run()
    finally:
        del built
        gc.collect()


def compare(real: MixResult, hardware: Hardware, settings: Mapping[str, Any]) -> list[Compared]:
    """Simulate the requests of a real run, and return throughput and latencies of both."""
    queries = [record.query for record in real.records]
    simulation = Simulation(hardware, Settings.of(**settings))
    outlook = simulation.run(queries)
    tokens = sum(record.tokens for record in real.records)
    found = [Compared("output tok/s", tokens / real.seconds, outlook.output_tokens / outlook.seconds)]
    for name in METRICS:
        values = [value for record in real.records if (value := getattr(record, name)) is not None]
        if not values:  # answers of one token have no TPOT
            continue
        found += [
            Compared(
                f"{name.upper()} p{share}, ms",
                1e3 * percentile(values, share),
                1e3 * outlook.times[name].percentile(share),
            )
            for share in SHARES
        ]
    return found


def capacity(hardware: Hardware, settings: Mapping[str, Any], queries: Sequence[Query]) -> float:
    """Return the requests a second of a simulated run of all requests at once."""
    at_once = [replace(query, at=0.0) for query in queries]
    outlook = Simulation(hardware, Settings.of(**settings)).run(at_once)
    return outlook.finished / outlook.seconds
