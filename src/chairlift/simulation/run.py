"""Run a trace on simulated replicas: requests are routed when they arrive, and each replica steps on its own clock.

With roles, prompts and answers are computed by different replicas, chosen by the server's own pools.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import inf
from typing import Any

from chairlift.core.plan import StepPlan
from chairlift.core.settings import Settings
from chairlift.engine.record_file import RecordFile
from chairlift.routing.policies import Ask
from chairlift.routing.pools import Pools, Role
from chairlift.routing.prefixes import chain_of_tokens
from chairlift.routing.router import Route, Router
from chairlift.simulation.replica import Hardware, Life, Prompt, Replica
from chairlift.simulation.statistics import Histogram, Series
from chairlift.simulation.transfers import Moved, Transfers
from chairlift.traffic.query import Query

TARGETS = ("ttft", "tpot", "e2e")
_TELL = 256  # requests between progress updates
_NUMBER = re.compile(r"\d[\d,.]*")
SERIES = ("running", "waiting", "kv", "prompt_tokens", "decodes")


@dataclass(slots=True)
class Reason:
    """Why requests were rejected: the error of one of them, with its own numbers, and how many there are."""

    example: str
    requests: int = 0


@dataclass(slots=True)
class Outlook:
    """What a simulation has seen."""

    requests: int = 0
    finished: int = 0
    rejected: int = 0
    reasons: dict[str, Reason] = field(default_factory=dict)  # of rejections, by the error without its numbers
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    sent_bytes: int = 0  # of KV, from prefill to decode replicas
    peak: int = 0  # most requests that had arrived and not ended
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
            "rejections": [asdict(each) for each in self.reasons.values()],
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
            "peak_concurrency": self.peak,
            "sent_bytes": self.sent_bytes,
            "good_s": self.good / seconds,
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
        roles: Sequence[Role] = (),  # of each replica; none: all compute prompts and answers
        routing: str = "cache-aware",
        targets: Mapping[str, float] | None = None,  # seconds, by name in TARGETS
    ) -> None:
        self.roles = list(roles) or ["both"] * replicas
        self.outlook = Outlook(series=[Series(SERIES) for _ in self.roles])
        self.replicas = [Replica(hardware, settings, partial(self._end, number)) for number in range(len(self.roles))]
        names = [str(number) for number in range(len(self.roles))]
        self._router = Router(names, routing) if len(names) > 1 else None
        self._pools = Pools(dict(zip(names, self.roles, strict=True)))
        self._transfers = Transfers(hardware, len(names))
        self._routes: dict[int, Route] = {}
        self._recordings: list[Callable[[], None]] = []  # to be ended with the run
        self._targets = dict(targets or {})
        self._live = 0
        self.most_missed: float = inf  # end the simulation when more requests miss a target
        # Called after each step of a replica, and at each request's end.
        self.on_step: Callable[[int, StepPlan, float, float, dict[str, float]], None] | None = None
        self.on_end: Callable[[int, Life], None] | None = None
        for number, replica in enumerate(self.replicas):
            replica.on_step, replica.on_first = self._watch(number), self._start
            replica.on_idle = partial(self.outlook.series[number].add, values=(0,) * len(SERIES))

    def record(self, file: RecordFile, model: str) -> None:
        """Write the replicas' steps to a file, for the live page."""
        single = len(self.replicas) == 1
        for number, replica in enumerate(self.replicas):
            self._recordings.append(file.record(replica.engine, model, None if single else number))

    def run(self, queries: Iterable[Query], advance: Callable[[int], None] = lambda _: None) -> Outlook:
        """Run requests, ordered by their times, to their ends; `advance` counts those that have arrived."""
        arrivals, transfers = iter(enumerate(queries)), self._transfers
        number, query = next(arrivals, (0, None))
        is_single, replica, found = len(self.replicas) == 1, self.replicas[0], self.outlook
        while not found.is_broken_off:
            if not is_single:
                replica = min(self.replicas, key=_ready_at)
            moment = replica.ready_at
            if transfers.waiting and transfers.next_at <= min(moment, inf if query is None else query.at):
                transfers.deliver()
            elif query is not None and query.at <= moment:
                self._submit(number, query)
                if number % _TELL == _TELL - 1:
                    advance(_TELL)
                number, query = next(arrivals, (number + 1, None))
            elif moment < inf:
                replica.step(moment)
            elif query is None and any(each.has_work for each in self.replicas):
                for each in self.replicas:  # no request follows: a gate need not wait for more
                    each.engine.end_input()
            else:
                break
        advance(number % _TELL)
        self._close()
        return self.outlook

    def _submit(self, number: int, query: Query) -> None:
        """Send a request to a replica, or its prompt to another one first."""
        self.outlook.requests += 1
        self._live += 1
        self.outlook.peak = max(self.outlook.peak, self._live)
        if self._router is None:
            self.replicas[0].submit(number, query)
            return
        ask = _ask(number, query)
        route = self._pools.decoding(ask, self._router, ())
        assert route is not None, "no simulated replica is ejected"
        self._routes[number] = route
        prefill = self._pools.prefilling(ask, self._router, route, ())
        if prefill is None:
            self.replicas[int(route.name)].submit(number, query)
        else:
            self._send_prompt(number, query, prefill, self.replicas[int(route.name)])

    def _send_prompt(self, number: int, query: Query, prefill: Route, decoding: Replica) -> None:
        """Let one replica compute a prompt and another one decode it, when it has the prompt's blocks."""
        computing = self.replicas[int(prefill.name)]
        moved = Moved(self._transfers, int(prefill.name), computing, decoding, number, query)

        def done(was_computed: bool) -> None:
            def decode(now: float) -> None:
                prefill.end("finished")
                self.outlook.sent_bytes += moved.bytes
                decoding.receive(Life(number, query, query.at), now, query.prompt_tokens if was_computed else 0)

            moved.end(decode)

        computing.compute(Prompt(number, query, moved.computed, done))

    def _watch(self, number: int) -> Callable[[StepPlan, float, float], None]:
        replica, series = self.replicas[number], self.outlook.series[number]
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
            if self.on_step is not None:
                self.on_step(number, plan, begun, seconds, dict(zip(SERIES, values, strict=True)))

        return see

    def _start(self, life: Life) -> None:
        """Note a first token: the prompt is no work for its replica any more."""
        if (route := self._routes.get(life.number)) is not None:
            route.started()

    def _end(self, number: int, life: Life) -> None:
        """Count a request that has ended at a replica."""
        found = self.outlook
        self._live -= 1
        route = self._routes.pop(life.number, None)
        if route is not None:
            route.end("rejected" if life.error is not None else "finished")
        if life.error is not None:
            found.rejected += 1
            reason = found.reasons.setdefault(_NUMBER.sub("#", life.error), Reason(life.error))
            reason.requests += 1
            return
        if self.on_end is not None:
            self.on_end(number, life)
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
            # Overlapped, a step is on the device when the last token is known: it is no part of `seconds`.
            self.outlook.busy += replica.device.busy - max(0.0, replica.device.free_at - self.outlook.seconds)
            self.outlook.cached_tokens += replica.engine.scheduler.counters.cached_tokens


def _ask(number: int, query: Query) -> Ask:
    """Return a request as the server's router sees it."""
    if isinstance(query.prompt, list):
        return Ask(query.prompt_tokens, chain_of_tokens(query.prompt), query.tenant)
    return Ask(query.prompt_tokens, query.blocks or (-number,), query.tenant, query.block_tokens)


def _ready_at(replica: Replica) -> float:
    return replica.ready_at
