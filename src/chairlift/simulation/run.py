"""Run a trace on simulated replicas: requests are routed when they arrive, and each replica steps on its own clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from chairlift.core.plan import StepPlan
from chairlift.core.settings import Settings
from chairlift.engine.record_file import RecordFile
from chairlift.routing.policies import Ask
from chairlift.routing.router import Route, Router
from chairlift.simulation.replica import Hardware, Life, Replica
from chairlift.simulation.statistics import Histogram, Series
from chairlift.traffic.query import Query
from chairlift.traffic.traces import BLOCK_TOKENS

TARGETS = ("ttft", "tpot", "e2e")
_TELL = 256  # requests between progress updates
SERIES = ("running", "waiting", "kv", "prompt_tokens", "decodes")


@dataclass(slots=True)
class Outlook:
    """What a simulation has seen."""

    requests: int = 0
    finished: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    seconds: float = 0.0  # from the first arrival to the last token
    busy: float = 0.0  # seconds of steps, of all replicas
    good: int = 0  # requests within every target
    missed: Counter[str] = field(default_factory=Counter)  # requests beyond each target
    is_broken_off: bool = False  # it ended early, since too many requests missed a target
    times: dict[str, Histogram] = field(default_factory=lambda: {name: Histogram() for name in (*TARGETS, "step")})
    series: list[Series] = field(default_factory=list)  # of each replica

    def summary(self) -> dict[str, Any]:
        """Return all numbers; latencies in milliseconds."""
        seconds = self.seconds or inf
        return {
            "requests": {"finished": self.finished, "rejected": self.rejected},
            "seconds": self.seconds,
            "requests_s": self.finished / seconds,
            "output_tok_s": self.output_tokens / seconds,
            "total_tok_s": (self.output_tokens + self.prompt_tokens) / seconds,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "steps": self.steps,
            "preemptions": self.preemptions,
            "busy": self.busy / seconds / max(1, len(self.series)),
            "good": self.good / max(1, self.finished + self.rejected),
            "ms": {name: found.summary(1000) for name, found in self.times.items() if found.count},
        }


class Simulation:
    """Replicas of one model with a router in front of them."""

    def __init__(
        self,
        hardware: Hardware,
        settings: Settings,
        *,
        replicas: int = 1,
        routing: str = "cache-aware",
        targets: Mapping[str, float] | None = None,  # seconds, by name in TARGETS
    ) -> None:
        self.outlook = Outlook(series=[Series(SERIES) for _ in range(replicas)])
        self.replicas = [Replica(hardware, settings, self._end) for _ in range(replicas)]
        names = [str(number) for number in range(replicas)]
        self._router = Router(names, routing) if replicas > 1 else None
        self._routes: dict[int, Route] = {}
        self._recordings: list[Callable[[], None]] = []  # to be ended with the run
        self._targets = dict(targets or {})
        self.most_missed: float = inf  # end the simulation when more requests miss a target
        for replica, series in zip(self.replicas, self.outlook.series, strict=True):
            replica.on_step = self._watch(replica, series)

    def record(self, file: RecordFile, model: str) -> None:
        """Write the replicas' steps to a file, for the live page."""
        single = len(self.replicas) == 1
        for number, replica in enumerate(self.replicas):
            self._recordings.append(file.record(replica.engine, model, None if single else number))

    def run(self, queries: Iterable[Query], advance: Callable[[int], None] = lambda _: None) -> Outlook:
        """Run requests, ordered by their times, to their ends; `advance` counts those that have arrived."""
        arrivals = iter(enumerate(queries))
        number, query = next(arrivals, (0, None))
        while not self.outlook.is_broken_off:
            replica = min(self.replicas, key=lambda each: each.ready_at) if len(self.replicas) > 1 else self.replicas[0]
            moment = replica.ready_at
            if query is not None and query.at <= moment:
                self._submit(number, query)
                if number % _TELL == _TELL - 1:
                    advance(_TELL)
                number, query = next(arrivals, (number + 1, None))
            elif moment < inf:
                replica.step()
            elif query is None and any(each.has_work for each in self.replicas):
                for each in self.replicas:  # no request follows: a gate need not wait for more
                    each.engine.end_input()
            else:
                break
        advance(number % _TELL)
        self._close()
        return self.outlook

    def _submit(self, number: int, query: Query) -> None:
        """Send a request to a replica."""
        self.outlook.requests += 1
        if self._router is None:
            self.replicas[0].submit(number, query)
            return
        chain = query.blocks or (-number,)
        route = self._router.route(Ask(query.prompt_tokens, chain, query.tenant, BLOCK_TOKENS))
        assert route is not None, "no simulated replica is ejected"
        self._routes[id(query)] = route
        self.replicas[int(route.name)].submit(number, query)

    def _watch(self, replica: Replica, series: Series) -> Callable[[StepPlan, float, float], None]:
        scheduler, times, found = replica.engine.scheduler, self.outlook.times["step"], self.outlook
        pool = scheduler.pool

        def see(plan: StepPlan, begun: float, seconds: float) -> None:
            found.steps += 1
            found.preemptions += len(plan.preempted)
            samples = len(plan.samples)
            times.add(seconds, samples or 1)
            owned = 1 - pool.available / pool.total
            prompts = plan.tokens - plan.counts.count(1) if plan.tokens != len(plan.counts) else 0
            values = (len(scheduler.running), len(scheduler.waiting), owned, prompts, samples)
            series.add(replica.clock.now(), values)

        return see

    def _end(self, life: Life) -> None:
        """Count a request that has ended."""
        found = self.outlook
        route = self._routes.pop(id(life.query), None)
        if route is not None:
            route.end("rejected" if life.error is not None else "finished")
        if life.error is not None:
            found.rejected += 1
            return
        found.finished += 1
        found.prompt_tokens += life.query.prompt_tokens
        found.output_tokens += life.tokens
        found.seconds = max(found.seconds, life.end)
        own = {"ttft": life.first - life.sent, "e2e": life.end - life.sent}
        if life.tokens > 1:
            own["tpot"] = (life.end - life.first) / (life.tokens - 1)
        for name, value in own.items():
            found.times[name].add(value)
        missed = [name for name, limit in self._targets.items() if own.get(name, 0.0) > limit]
        found.good += not missed
        found.missed.update(missed)
        found.is_broken_off = any(found.missed[name] > self.most_missed for name in missed)

    def _close(self) -> None:
        for end in self._recordings:
            end()
        for replica in self.replicas:
            self.outlook.busy += replica.device.busy
            self.outlook.cached_tokens += replica.engine.scheduler.counters.cached_tokens
