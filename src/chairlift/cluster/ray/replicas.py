"""Replicas: starts the actors, gives their servers to the gateway's pool, and starts again those that end."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from chairlift import __version__
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
_LONGEST_PAUSE = 30.0  # seconds between two attempts to start a replica that ends at once


def names_of(count: int) -> list[str]:
    """Return the names of replicas.

    >>> names_of(2)
    ['replica-0', 'replica-1']
    """
    return [f"replica-{place}" for place in range(count)]


class Replicas:
    """The replicas of a pool, by name: as many as `scale_to` has said last."""

    def __init__(self, pool: Pool, job: bytes, options: dict[str, Any], grace: float) -> None:
        self._pool, self._job, self._grace = pool, job, grace
        self._actor = ray.remote(**options)(Replica)
        self._wanted: list[str] = []
        self._actors: dict[str, Any] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self._refusal: str | None = None

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
        """Wait until a replica works; raise a ChairliftError if the settings or the model cannot."""
        while not self._pool.working:
            if self._refusal is not None:
                raise ChairliftError(self._refusal)
            await asyncio.sleep(_POLL)

    def scale_to(self, count: int) -> None:
        """Start or end replicas. One that is still ending keeps its name: it may take another call to reach `count`."""
        if count != self.count:
            log.info("%s: there were %d", counted(count, "replica"), self.count)
        names = (name for name in self._pool.router.names if name not in self._tasks)
        while self.count < count and (name := next(names, None)) is not None:
            self._wanted.append(name)
            self._tasks[name] = asyncio.create_task(self._keep(name))
        while self.count > count:
            task = asyncio.create_task(self._retire(self._wanted.pop()))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    async def close(self) -> None:
        """End all replicas."""
        self._grace = 0.0  # the gateway has drained
        self.scale_to(0)
        while self._retiring:
            await asyncio.wait(self._retiring)

    async def _keep(self, name: str) -> None:
        """Run a replica, again and again while it is wanted."""
        failures = 0
        while name in self._wanted:
            ended, has_worked = await self._run(name)
            if name not in self._wanted:
                break
            failures = 0 if has_worked else failures + 1
            if ended.is_refusal:
                self._refusal = ended.reason
            log.error("%s has ended and is started again: %s", name, ended.reason)
            await asyncio.sleep(min(_LONGEST_PAUSE, 2.0**failures - 1))
        del self._tasks[name]

    async def _run(self, name: str) -> tuple[Ended, bool]:
        """Run a replica until it ends; return how it ended, and whether it has served."""
        actor = self._actors[name] = self._actor.remote()
        backend: Backend | None = None
        try:
            starting = asyncio.ensure_future(actor.start.remote(__version__, self._job))
            done, _ = await asyncio.wait([starting], timeout=_PATIENCE)
            if not done:
                log.warning("%s waits for a place: `ray status` shows what the cluster lacks", name)
            backend = Backend(await starting, name)
            self._pool.add(backend)
            ended = msgspec.json.decode(await actor.wait.remote(), type=Ended)
        except RayError as error:
            ended = Ended(_cause(error))
        finally:
            del self._actors[name]
            self._pool.remove(name)
            ray.kill(actor)
        return ended, backend is not None and self._pool.router.counts[name].finished > 0

    async def _retire(self, name: str) -> None:
        """End a replica when its requests have ended, or after the grace time."""
        self._pool.drain(name)
        try:
            async with asyncio.timeout(self._grace):
                while self._pool.router.counts[name].live:
                    await asyncio.sleep(_POLL)
        except TimeoutError:
            log.warning("%s is ended with requests that did not end within the grace time", name)
        task, actor = self._tasks[name], self._actors.get(name)
        if actor is None:  # between two attempts
            task.cancel()
        else:
            try:
                async with asyncio.timeout(_STOP):
                    await actor.stop.remote()
            except (RayError, TimeoutError):
                pass
            ray.kill(actor)
        await asyncio.wait([task])
        self._tasks.pop(name, None)


def _cause(error: RayError) -> str:
    """Return the last line of an error, which has its reason; an actor's error comes with its traceback."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
