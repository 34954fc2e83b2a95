"""Replicas: starts the actors, adds their servers to the gateway's pool, and restarts replicas that end."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from chairlift import __version__
from chairlift.cluster.ray.ranks import RankHolder, in_bundle, place
from chairlift.cluster.ray.replica import Ended, Replica
from chairlift.core.errors import ChairliftError
from chairlift.core.words import counted
from chairlift.gateway.backend import Backend
from chairlift.gateway.pool import Pool
from chairlift.routing.scaling import Load

log = logging.getLogger("chairlift")

_POLL = 0.1  # seconds between two looks at whether a replica works
_PATIENCE = 15.0  # seconds after which a replica that Ray has not placed is worth a warning
_STOP = 15.0  # seconds for a replica to end by itself
_LONGEST_PAUSE = 30.0  # seconds between two starts of a replica that ends at once


def names_of(count: int) -> list[str]:
    """Return the names of replicas.

    >>> names_of(2)
    ['replica-0', 'replica-1']
    """
    return [f"replica-{place}" for place in range(count)]


@dataclass(frozen=True, slots=True)
class Actors:
    """The actors of one replica, and their placement group."""

    replica: Any
    ranks: list[Any]  # 1 and up, if they have actors of their own
    group: PlacementGroup | None

    def kill(self) -> None:
        """End the actors and free their resources; an error at one of them does not keep the others."""
        with ExitStack() as steps:
            if self.group is not None:
                steps.callback(remove_placement_group, self.group)
            for each in (self.replica, *self.ranks):
                steps.callback(ray.kill, each)


@dataclass(frozen=True, slots=True)
class Need:
    """The resources of the cluster that one replica needs."""

    resources: dict[str, float]  # of an actor: CPU, GPU
    ranks: int = 1  # actors
    placement: str = "pack"  # of several ranks
    cpus: float | None = None  # of an actor, for its threads; None: it has GPUs
    host: str | None = None  # address to listen on; None: the node's

    def make(self) -> Actors:
        """Ask for the actors of one replica; Ray places them when there is room."""
        # Without num_cpus=0, Ray would place an actor only where a CPU is free.
        options = {"num_cpus": self.resources.get("CPU", 0), "num_gpus": self.resources.get("GPU", 0)}
        if self.ranks == 1:
            return Actors(ray.remote(scheduling_strategy="SPREAD", **options)(Replica).remote(), [], None)
        group = place(self.ranks, self.resources, self.placement)
        made = [
            ray.remote(**options, **in_bundle(group, rank))(RankHolder if rank else Replica).remote()
            for rank in range(self.ranks)
        ]
        return Actors(made[0], made[1:], group)


class Replicas:
    """The replicas of a pool, by name; their number is that of the last call of `scale_to`."""

    def __init__(self, pool: Pool, job: bytes, need: Need, grace: float) -> None:
        self._pool, self._job, self._need, self._grace = pool, job, need, grace
        self._wanted: list[str] = []
        self._actors: dict[str, Any] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self._refusals: Counter[str] = Counter()  # by name
        self._has_worked = False  # any replica, so that the settings can

    @property
    def count(self) -> int:
        """The number of replicas that should run."""
        return len(self._wanted)

    def load(self) -> Load:
        """Return the load of the replicas that work."""
        working = self._pool.working
        queued = sum(backend.queued_tokens for backend in working)
        return Load(len(working), queued, self._pool.live, max((each.max_sequences for each in working), default=0))

    async def wait(self) -> None:
        """Wait until a replica works; raise a ChairliftError if the settings or the model cannot.

        At the start one refusal shows that. Later it may be the fault of one node: all replicas must refuse meanwhile.
        """
        before = Counter(self._refusals)
        while not self._pool.working:
            refusing = sum(self._refusals[name] > before[name] for name in self._wanted)
            if refusing and (refusing == self.count or not self._has_worked):
                raise ChairliftError(self._reason)
            await asyncio.sleep(_POLL)
        self._has_worked = True

    def scale_to(self, count: int) -> None:
        """Start or end replicas. One that is still ending keeps its name: it may take another call to reach `count`."""
        if count != self.count:
            log.info("scaling to %s from %d", counted(count, "replica"), self.count)
        names = (name for name in self._pool.router.names if name not in self._tasks)
        while self.count < count and (name := next(names, None)) is not None:
            self._wanted.append(name)
            self._tasks[name] = asyncio.create_task(self._keep(name))
        while self.count > count:
            task = asyncio.create_task(self._retire(self._take_off()))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    def _take_off(self) -> str:
        """Remove a name from those that should run: the last that does not work, or else the last."""
        working = {backend.name for backend in self._pool.working}
        name = next((each for each in reversed(self._wanted) if each not in working), self._wanted[-1])
        self._wanted.remove(name)
        return name

    async def close(self) -> None:
        """End all replicas."""
        self._grace = 0.0  # the gateway has drained
        self.scale_to(0)
        while self._retiring:
            await asyncio.wait(self._retiring)

    async def _keep(self, name: str) -> None:
        """Run a replica, and restart it while it is wanted; `_retire` cancels this."""
        failures, counts = 0, self._pool.router.counts[name]  # of all replicas that have had the name
        while name in self._wanted:
            before = counts.finished
            try:
                ended = await self._run(name)
            except RayError as error:
                ended = Ended(_cause(error))
            except Exception as error:  # no error may end the restarts, such as one of Ray's while its head is down
                log.error("%s has ended with an unexpected error", name, exc_info=error)
                ended = Ended(f"{type(error).__name__}: {error}")
            has_worked = counts.finished > before
            if name not in self._wanted:
                break
            failures = 0 if has_worked else failures + 1
            if ended.is_refusal:
                self._refusals[name] += 1
                self._reason = ended.reason
            log.error("%s has ended and is restarted: %s", name, ended.reason)
            await asyncio.sleep(min(_LONGEST_PAUSE, 2.0**failures - 1))

    async def _run(self, name: str) -> Ended:
        """Run a replica until it ends; return how it ended."""
        actors = self._need.make()
        self._actors[name] = actors.replica
        starting = asyncio.ensure_future(self._start(actors))
        try:
            done, _ = await asyncio.wait([starting], timeout=_PATIENCE)
            if not done:
                log.warning("the cluster has no room for %s yet: `ray status` shows what it lacks", name)
            self._pool.add(Backend(await starting, name))
            return await _first_end(actors)
        finally:
            starting.cancel()
            del self._actors[name]
            self._pool.remove(name)
            actors.kill()

    async def _start(self, actors: Actors) -> str:
        """Start the ranks other than rank 0, then the server; return its URL."""
        key, need = secrets.token_hex(), self._need
        starts = (each.start.remote(__version__, key, need.host, need.cpus) for each in actors.ranks)
        ranks = await asyncio.gather(*starts)
        return str(await actors.replica.start.remote(__version__, self._job, ranks, key))

    async def _retire(self, name: str) -> None:
        """End a replica when its requests have ended, or after the grace time."""
        self._pool.drain(name)
        try:
            async with asyncio.timeout(self._grace):
                while self._pool.router.counts[name].live:
                    await asyncio.sleep(_POLL)
        except TimeoutError:
            log.warning("%s is stopped although some of its requests have not ended within the grace time", name)
        if (actor := self._actors.get(name)) is not None:
            with suppress(Exception):  # it may have ended, or Ray's head is down
                async with asyncio.timeout(_STOP):
                    await actor.stop.remote()
        task = self._tasks[name]
        task.cancel()  # which kills its actors
        await asyncio.wait([task])
        del self._tasks[name]  # from here on another replica may have its name


async def _first_end(actors: Actors) -> Ended:
    """Wait until the server ends; RayError if an actor does."""
    server = asyncio.ensure_future(actors.replica.wait.remote())
    others = [asyncio.ensure_future(each.wait.remote()) for each in actors.ranks]
    try:
        done, _ = await asyncio.wait([server, *others], return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
        return msgspec.json.decode(server.result(), type=Ended)
    finally:
        for each in (server, *others):
            each.cancel()


def _cause(error: RayError) -> str:
    """Return the last line of an error, which has its reason; an actor's error comes with its traceback."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
