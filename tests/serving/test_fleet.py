"""A fleet of engines that say what a test has them say: where a request goes when its engine ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from test_engine_client import HELLO, Engine, Listener, order, until

from chairlift.serving import messages
from chairlift.serving.beat import Beat
from chairlift.serving.engine_client import EngineClient
from chairlift.serving.fleet import ATTEMPTS, Fleet
from chairlift.serving.messages import AnswerUpdate, StepReport


@asynccontextmanager
async def fleet_of(count: int, tmp_path: Path) -> AsyncIterator[tuple[Fleet, dict[str, Engine], list[str]]]:
    """A fleet, its engines by name, and the names of engines that requests have left."""
    beat = Beat()
    beat.touch(1e12, 4.0)
    left: list[str] = []
    clients = {name: EngineClient(f"ipc://{tmp_path}/{name}", beat) for name in map(str, range(count))}
    fleet = Fleet(clients, on_move=left.append)
    await fleet.open()
    engines = {name: Engine(f"ipc://{tmp_path}/{name}") for name in clients}
    for engine in engines.values():
        await engine.say(HELLO)
    await until(lambda: all(client.hello is not None for client in clients.values()))
    try:
        yield fleet, engines, left
    finally:
        await fleet.close()
        for engine in engines.values():
            engine.socket.close()


async def where(engines: dict[str, Engine]) -> str:
    """The engine that gets the next request."""
    async with asyncio.timeout(10):
        while True:
            for name, engine in engines.items():
                if engine.socket.closed or not await engine.socket.poll(5):
                    continue
                if isinstance(messages.decode_order(await engine.socket.recv()), messages.Submit):
                    return name


def test_a_request_without_a_token_moves_and_one_with_a_token_is_lost(tmp_path: Path) -> None:
    async def go() -> None:
        async with fleet_of(3, tmp_path) as (fleet, engines, left):
            listener = Listener()
            fleet.submit(order(key := fleet.new_key()), listener)
            first = await where(engines)
            engines[first].die()
            second = await where(engines)
            assert second != first and left == [first] and listener.told == []
            await engines[second].say(StepReport([AnswerUpdate(key, 0, 7)]))
            await until(lambda: listener.told)
            assert listener.told == [("take", 7)]
            engines[second].die()
            await until(lambda: len(listener.told) == 2)
            assert [what for what, _ in listener.told] == ["take", "lose"]
            assert left == [first], "a client may have read its token: it must not move"
            fleet.abort(key)
            assert fleet.live == 0 and all(fleet.router.loads.work(name) == 0 for name in engines)

    asyncio.run(go())


def test_a_request_that_ends_its_engines_does_not_end_them_all(tmp_path: Path) -> None:
    async def go() -> None:
        async with fleet_of(ATTEMPTS + 2, tmp_path) as (fleet, engines, left):
            listener = Listener()
            fleet.submit(order(fleet.new_key()), listener)
            for _ in range(ATTEMPTS):
                engines[await where(engines)].die()
            await until(lambda: listener.told)
            assert [what for what, _ in listener.told] == ["lose"]
            assert len(left) == ATTEMPTS - 1 and fleet.live == 0
            assert fleet.trouble is None, "the other engines go on"
            assert all(fleet.router.counts[name].live == 0 for name in engines)

    asyncio.run(go())


def test_a_cancelled_request_is_cancelled_where_it_moved_to(tmp_path: Path) -> None:
    async def go() -> None:
        async with fleet_of(2, tmp_path) as (fleet, engines, _):
            fleet.submit(order(key := fleet.new_key()), Listener())
            first = await where(engines)
            engines[first].die()
            second = await where(engines)
            fleet.abort(key)
            assert messages.decode_order(await engines[second].socket.recv()) == messages.Abort(key)
            assert fleet.live == 0

    asyncio.run(go())


def test_closing_a_fleet_moves_nothing(tmp_path: Path) -> None:
    async def go() -> None:
        async with fleet_of(2, tmp_path) as (fleet, engines, left):
            listener = Listener()
            fleet.submit(order(fleet.new_key()), listener)
            await where(engines)
            await fleet.close()
            assert [what for what, _ in listener.told] == ["lose"] and left == []

    asyncio.run(go())
