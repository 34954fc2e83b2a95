"""Which replicas on Ray are started, started again and ended, with actors that only pretend; no cluster."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'chairlift[ray]'")

import msgspec
import ray

from chairlift.cluster.ray import replicas as module
from chairlift.cluster.ray.replica import Ended
from chairlift.cluster.ray.replicas import Need, Replicas, names_of
from chairlift.core.errors import ChairliftError
from chairlift.gateway.pool import Pool

pytestmark = pytest.mark.long  # importing ray takes seconds


class Remote:
    """A method of an actor."""

    def __init__(self, call: Any) -> None:
        self.remote = call


class Actor:
    """A replica of which a test says when it starts and ends."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[str] = loop.create_future()
        self.ended: asyncio.Future[bytes] = loop.create_future()
        self.start, self.wait, self.stop = Remote(self._start), Remote(self._wait), Remote(self._stop)

    async def _start(self, *given: Any) -> str:
        return await self.started

    async def _wait(self) -> bytes:
        return await self.ended

    async def _stop(self) -> None:
        self.end()

    def end(self) -> None:
        """End it, whatever it does."""
        if not self.started.done():
            self.started.set_result("http://127.0.0.1:9")
        if not self.ended.done():
            self.ended.set_result(msgspec.json.encode(Ended("gone")))


class Made(Need):
    """Makes actors; `actors` are all that were made."""

    actors: list[Actor] = []  # noqa: RUF012

    def make(self) -> Any:
        """Make one."""
        self.actors.append(actor := Actor())

        class Own:
            replica, ranks = actor, ()

            def kill(self) -> None:
                actor.end()

        return Own()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Made, "actors", [])
    monkeypatch.setattr(ray, "kill", lambda actor: actor.end())
    monkeypatch.setattr(module, "_POLL", 0.01)


def replicas_of(count: int) -> tuple[Pool, Replicas]:
    pool = Pool([], "round-robin", names=names_of(count))
    return pool, Replicas(pool, b"", Made({"CPU": 1.0}), 5.0)


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


def test_the_replica_that_does_not_work_is_ended_before_one_that_does() -> None:
    """replica-0 was lost, and waits for a place that the cluster does not have while replica-1 runs."""

    async def run() -> None:
        pool, replicas = replicas_of(2)
        replicas.scale_to(2)
        await until(lambda: len(Made.actors) == 2)
        lost, working = Made.actors
        working.started.set_result("http://127.0.0.1:9")
        await until(lambda: "replica-1" in pool.backends)
        pool.mark(pool.backends["replica-1"], None)
        replicas.scale_to(1)
        await until(lost.started.done)
        assert [each.name for each in pool.working] == ["replica-1"] and not working.ended.done()
        await replicas.close()

    asyncio.run(run())


def test_a_replica_that_is_lost_while_it_drains_is_ended_once_and_its_name_is_free() -> None:
    async def run() -> None:
        errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        pool, replicas = replicas_of(1)
        replicas.scale_to(1)
        await until(lambda: len(Made.actors) == 1)
        Made.actors[0].started.set_result("http://127.0.0.1:9")
        await until(lambda: "replica-0" in pool.backends)
        pool.router.counts["replica-0"].sent = 1
        replicas.scale_to(0)
        Made.actors[0].end()
        await until(lambda: "replica-0" not in pool.backends)
        replicas.scale_to(1)
        assert replicas.count == 0, "its requests have not ended, and the next replica would be ended with them"
        pool.router.counts["replica-0"].aborted = 1
        async with asyncio.timeout(5):
            while replicas.count == 0:
                replicas.scale_to(1)
                await asyncio.sleep(0.01)
        await until(lambda: len(Made.actors) == 2)
        await asyncio.sleep(0.05)
        assert not Made.actors[1].ended.done() and not errors
        await replicas.close()

    asyncio.run(run())


def test_a_replica_that_has_served_and_now_ends_at_once_is_started_again_ever_more_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    async def run() -> None:
        pool, replicas = replicas_of(1)
        sleep = asyncio.sleep

        async def pause(seconds: float) -> None:
            if seconds == 77:  # of the checks of servers
                await sleep(3600)
            pauses.append(seconds)
            await sleep(0)

        monkeypatch.setattr("chairlift.gateway.pool.PROBE_EVERY", 77)
        monkeypatch.setattr(asyncio, "sleep", pause)
        replicas.scale_to(1)
        for count in range(1, 6):
            while len(Made.actors) < count:
                await sleep(0)
            Made.actors[-1].started.set_result("http://127.0.0.1:9")
            while "replica-0" not in pool.backends:
                await sleep(0)
            if count == 1:
                pool.router.counts["replica-0"].finished = 1
            Made.actors[-1].end()
        while len(pauses) < 5:
            await sleep(0)
        monkeypatch.undo()
        await replicas.close()

    asyncio.run(run())
    assert pauses[:5] == [0.0, 1.0, 3.0, 7.0, 15.0]


def test_a_replica_is_restarted_after_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises errors of many types while its control service is down: as actors are made, used and killed."""

    async def run() -> None:
        pool, replicas = replicas_of(1)
        make, attempts = Made.make, 0

        def failing(self: Made) -> Any:
            nonlocal attempts
            attempts += 1
            if attempts == 1:
                raise ConnectionError("no control service")
            return make(self)

        monkeypatch.setattr(Made, "make", failing)
        monkeypatch.setattr(module, "_LONGEST_PAUSE", 0.01)
        replicas.scale_to(1)
        await until(lambda: len(Made.actors) == 1)
        Made.actors[0].started.set_result("no URL")
        await until(lambda: len(Made.actors) == 2)
        Made.actors[1].started.set_exception(ValueError("an unknown message"))
        await until(lambda: len(Made.actors) == 3)
        Made.actors[2].started.set_result("http://127.0.0.1:9")
        await until(lambda: "replica-0" in pool.backends)
        await replicas.close()

    asyncio.run(run())


def test_a_replica_ends_although_it_cannot_be_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        _, replicas = replicas_of(1)
        replicas.scale_to(1)
        await until(lambda: len(Made.actors) == 1)

        async def stop() -> None:
            raise ConnectionError("no control service")

        Made.actors[0].stop = Remote(stop)
        async with asyncio.timeout(5):
            await replicas.close()
        assert Made.actors[0].ended.done() and not replicas._tasks

    asyncio.run(run())


def test_a_refusal_of_one_node_does_not_end_what_others_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node must refuse once a replica has worked; a refusal from before that counts for nothing."""
    monkeypatch.setattr(module, "_LONGEST_PAUSE", 0.01)
    refused = msgspec.json.encode(Ended("no such model", is_refusal=True))

    async def ends(actor: Actor, how: bytes) -> None:
        """Let an actor start and end, and wait for the next."""
        count = len(Made.actors)
        actor.started.set_result("http://127.0.0.1:9")
        actor.ended.set_result(how)
        await until(lambda: len(Made.actors) > count)

    async def run() -> None:
        pool, replicas = replicas_of(2)
        replicas.scale_to(2)
        await until(lambda: len(Made.actors) == 2)
        bad, good = Made.actors
        good.started.set_result("http://127.0.0.1:9")
        await until(lambda: "replica-1" in pool.backends)
        pool.mark(pool.backends["replica-1"], None)
        await replicas.wait()
        await ends(bad, refused)
        good.ended.set_result(msgspec.json.encode(Ended("gone")))
        await until(lambda: len(Made.actors) == 4)
        waiting = asyncio.create_task(replicas.wait())
        await asyncio.sleep(0.05)
        assert not waiting.done(), "the refusal is older than the replica that has worked"
        await ends(Made.actors[2], refused)
        await asyncio.sleep(0.05)
        assert not waiting.done(), "only one node refuses"
        await ends(Made.actors[3], refused)
        with pytest.raises(ChairliftError, match="no such model"):
            await waiting
        await replicas.close()

    asyncio.run(run())
