"""The line to the engine, with a real socket at each end: what is sent to no engine, or understood by none, is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from chairlift.core.params import SamplingParams
from chairlift.serving import messages
from chairlift.serving.beat import Beat
from chairlift.serving.engine_client import EngineClient
from chairlift.serving.messages import Abort, AnswerUpdate, Hello, StepReport

HELLO = Hello("m", "cpu", "float32", 4, 64, 128, 320, 16, 512, "512 tokens", [1])


class Listener:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def take(self, update: AnswerUpdate) -> None:
        self.told.append(("take", update.token))

    def lose(self, message: str) -> None:
        self.told.append(("lose", message))

    def fail(self, message: str) -> None:
        self.told.append(("fail", message))


class Engine:
    """The other end: it says what a test has it say."""

    def __init__(self, address: str) -> None:
        self.socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    async def say(self, report: messages.Report) -> None:
        await self.socket.send(messages.encode(report))

    def die(self) -> None:
        self.socket.close()


@asynccontextmanager
async def line(tmp_path: Path) -> AsyncIterator[tuple[EngineClient, Engine]]:
    beat = Beat()
    beat.touch(1e12, 4.0)
    client = EngineClient(f"ipc://{tmp_path}/line", beat)
    await client.open()
    engine = Engine(f"ipc://{tmp_path}/line")
    await engine.say(HELLO)
    await until(lambda: client.hello is not None)
    try:
        yield client, engine
    finally:
        await client.close()
        engine.socket.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def order(key: int) -> messages.Submit:
    return messages.Submit(key, "r", [5], SamplingParams(max_tokens=4))


def test_a_request_for_an_engine_that_has_ended_is_lost_at_once_and_said_to_be(tmp_path: Path) -> None:
    async def go() -> None:
        async with line(tmp_path) as (client, engine):
            engine.die()
            await until(lambda: client.hello is None)
            listener = Listener()
            client.submit(order(client.new_key()), listener)
            assert [what for what, _ in listener.told] == ["lose"]
            assert client.live == 0
            assert await client.explain("r", None) is None

    asyncio.run(go())


def test_an_order_that_the_engine_cannot_decode_fails_its_own_request_alone(tmp_path: Path) -> None:
    async def go() -> None:
        async with line(tmp_path) as (client, engine):
            first, second = Listener(), Listener()
            client.submit(order(1), first)
            client.submit(order(2), second)
            await engine.say(messages.Unreadable(1, "not understood"))
            await engine.say(StepReport([AnswerUpdate(2, 0, 7)]))
            await until(lambda: second.told)
            assert first.told == [("fail", "not understood")]
            assert second.told == [("take", 7)]

    asyncio.run(go())


def test_an_engine_process_tells_the_sender_of_an_order_that_it_cannot_decode(tmp_path: Path) -> None:
    from chairlift.serving.link import Link

    context: zmq.Context[Any] = zmq.Context()
    server = context.socket(zmq.DEALER)
    server.bind(f"ipc://{tmp_path}/line")
    link = Link(context, f"ipc://{tmp_path}/line")
    broken = list(msgspec.msgpack.decode(messages.encode(order(77))))
    broken[3] = "no token ids"
    server.send(msgspec.msgpack.encode(broken))
    server.send(b"\xc1 not MessagePack at all")
    server.send(messages.encode(Abort(5)))
    received: list[messages.Order] = []
    while not received:
        received += link.receive()
    assert received == [Abort(5)]
    assert server.poll(5000)
    told = messages.decode_report(server.recv())
    assert isinstance(told, messages.Unreadable) and told.key == 77
    assert not server.poll(50), "no call waits for an order without a key"
    link.close()
    server.close(0)
    context.term()


def test_a_report_that_cannot_be_decoded_fails_all_requests_since_their_tokens_may_be_in_it(tmp_path: Path) -> None:
    async def go() -> None:
        async with line(tmp_path) as (client, engine):
            listener = Listener()
            client.submit(order(1), listener)
            await engine.socket.send(b"\xc1")
            await until(lambda: listener.told)
            assert listener.told[0][0] == "fail"

    asyncio.run(go())


def test_an_engine_that_is_replaced_before_its_end_is_seen_leaves_the_new_one_in_place(tmp_path: Path) -> None:
    async def go() -> None:
        async with line(tmp_path) as (client, engine):
            listener = Listener()
            client.submit(order(1), listener)
            another = Engine(f"ipc://{tmp_path}/line")
            await another.say(HELLO)
            await until(lambda: listener.told)
            assert listener.told[0][0] == "lose"
            engine.die()
            await another.say(StepReport([]))
            await asyncio.sleep(0.2)  # the disconnection has come by now, and must not count
            assert client.hello is not None
            another.socket.close()
            await until(lambda: client.hello is None)

    asyncio.run(go())
