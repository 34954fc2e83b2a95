"""Pool: the servers behind the gateway, which of them work, and which lack a model."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from chairlift.core.errors import SettingsError
from chairlift.gateway.backend import PROBE_EVERY, Backend
from chairlift.routing.pools import Pools, Role
from chairlift.routing.router import Router

log = logging.getLogger("chairlift")

_MODELS = 1024  # names of models to remember; clients may send any


class Pool:
    """All servers, with the router that chooses among them.

    Besides those of `urls`, servers with one of `names` may be added and removed at any time.
    """

    def __init__(
        self, urls: Sequence[str], policy: str, cluster_key: bytes | None = None, names: Sequence[str] = ()
    ) -> None:
        self.backends = {backend.name: backend for backend in map(Backend, urls)}
        if len(self.backends) < len(urls):
            raise SettingsError("a server is given twice: give each URL once")
        names = [*self.backends, *names]
        self.router = Router(names, policy)
        self.cluster_key = cluster_key  # to let a server compute prompts for another one; None: they do not
        self.roles: dict[str, Role] = dict.fromkeys(names, "both")
        self.pools = Pools(self.roles)
        self.moved = dict.fromkeys(names, 0)
        self._lacking: OrderedDict[str, set[str]] = OrderedDict()  # servers without a model, by its name
        for name in names:
            self.router.eject(name)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._suspected: dict[str, asyncio.Task[None]] = {}

    async def open(self) -> None:
        """Check all servers once, then regularly."""
        for backend in self.backends.values():
            self.add(backend)
        await asyncio.gather(*map(self.check, self.backends.values()))

    async def close(self) -> None:
        """End the checks and all connections."""
        for task in self._tasks.values():
            task.cancel()
        for backend in self.backends.values():
            backend.close()

    def add(self, backend: Backend) -> None:
        """Add a server with one of the pool's names; it gets requests once it answers a check."""
        self.backends[backend.name] = backend
        self._tasks[backend.name] = asyncio.create_task(self._watch(backend))

    def drain(self, name: str) -> None:
        """Send no further requests to a server that will be removed."""
        if (task := self._tasks.pop(name, None)) is not None:
            task.cancel()
        if (backend := self.backends.get(name)) is not None:
            self.mark(backend, "it is draining")

    def remove(self, name: str) -> None:
        """Remove a server; its requests are lost."""
        self.drain(name)
        if (backend := self.backends.pop(name, None)) is not None:
            backend.close()

    async def _watch(self, backend: Backend) -> None:
        while True:
            await asyncio.sleep(PROBE_EVERY)
            await self.check(backend)

    async def check(self, backend: Backend) -> None:
        """Eject a server that is down or drains, readmit one that works."""
        try:
            trouble = await backend.probe()
        except Exception as error:  # no error may end the checks, or the server would never be readmitted
            trouble = f"it could not be checked: {error}"
        if backend.name in self._tasks and self.backends.get(backend.name) is backend:  # else it is being removed
            self.mark(backend, trouble)

    def suspect(self, backend: Backend) -> None:
        """Check a server now: a request has lost it."""
        if backend.name not in self._suspected:
            self._suspected[backend.name] = asyncio.create_task(self.check(backend))
            self._suspected[backend.name].add_done_callback(lambda _: self._suspected.pop(backend.name, None))

    def mark(self, backend: Backend, trouble: str | None) -> None:
        """Record that a server works, or why it does not."""
        before, backend.trouble = backend.trouble, trouble
        if trouble is not None:
            self.router.eject(backend.name)
            if before is None:
                log.warning("%s is ejected: %s", backend.name, trouble)
        elif before is not None:
            # It may have been restarted, with an empty cache and another model.
            self.router.forget(backend.name)
            self.roles[backend.name] = backend.role
            for lacking in self._lacking.values():
                lacking.discard(backend.name)
            self.router.readmit(backend.name)
            log.info("%s is admitted", backend.name)

    @property
    def trouble(self) -> str | None:
        """Why no server takes requests, or None."""
        if any(backend.trouble is None for backend in self.backends.values()):
            return None
        troubles = "; ".join(f"{backend.name}: {backend.trouble}" for backend in self.backends.values())
        return troubles or "no server runs yet"

    @property
    def live(self) -> int:
        """Requests at all servers."""
        return sum(counts.live for counts in self.router.counts.values())

    @property
    def working(self) -> list[Backend]:
        """The servers that take requests."""
        return [backend for backend in self.backends.values() if backend.trouble is None]

    # ---- models

    def lacking(self, model: str) -> Iterable[str]:
        """Return the servers that are known not to have a model; none if all lack it: one may have it by now."""
        found = self._lacking.get(model, set())
        return found if len(found) < len(self.working) else ()

    def lacks(self, model: str, name: str) -> None:
        """Record that a server does not have a model."""
        self._lacking.setdefault(model, set()).add(name)
        self._lacking.move_to_end(model)
        while len(self._lacking) > _MODELS:
            self._lacking.popitem(last=False)

    def render(self) -> bytes:
        """Return the metrics for Prometheus."""
        registry = CollectorRegistry()
        registry.register(_Page(self))
        return generate_latest(registry)


class _Page(Collector):
    """The metrics of all servers; computed at each scrape, so that they cost a request nothing."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        pool = self._pool
        up = GaugeMetricFamily("chairlift:replica_up", "1 while a server takes requests.", labels=["replica"])
        live = GaugeMetricFamily("chairlift:replica_requests", "Requests at a server now.", labels=["replica"])
        queued = GaugeMetricFamily(
            "chairlift:replica_queued_tokens",
            "Prompt tokens of requests without a first token, at servers that report their load.",
            labels=["replica"],
        )
        moved = CounterMetricFamily(
            "chairlift:router_requests_moved",
            "Requests sent from it to another server before a first byte.",
            labels=["replica"],
        )
        counts = CounterMetricFamily(
            "chairlift:router_requests",
            "Requests by what became of them; submitted is the sum of the others and of those that run.",
            labels=["replica", "state"],
        )
        working = {backend.name for backend in pool.working}
        for name, found in pool.router.counts.items():
            if not found.sent and name not in pool.backends:
                continue  # it has never run
            up.add_metric([name], float(name in working))
            live.add_metric([name], found.live)
            queued.add_metric([name], pool.backends[name].queued_tokens if name in pool.backends else 0)
            moved.add_metric([name], pool.moved[name])
            counts.add_metric([name, "submitted"], found.sent)
            for state in ("finished", "aborted", "rejected", "failed"):
                counts.add_metric([name, state], getattr(found, state))
        yield from (up, live, queued, moved, counts)
