"""What may go wrong around a server, done to it on purpose: clients that leave, engines that die, steps that hang."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from running import Running, running

from chairlift.engine.engine import MAX_FAILED_STEPS
from chairlift.serving.pace import AT_ONCE, EVERY, LONGEST
from mostly_long import TIMES, mostly_long
from tiny import make_tiny_model

CHAT = "/v1/chat/completions"


def asks(tokens: int, *, stream: bool, n: int = 1) -> dict[str, Any]:
    messages = [{"role": "user", "content": "the question is what the answer was " * random.randint(1, 8)}]
    return {"messages": messages, "max_tokens": tokens, "ignore_eos": True, "stream": stream, "n": n}


class Client:
    """One raw connection."""

    def __init__(self, server: Running) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self._address = host, int(port)

    async def send(self, body: dict[str, Any], *, share: float = 1.0, path: str = CHAT) -> None:
        """A request, or the first part of one."""
        self.reader, self.writer = await asyncio.open_connection(*self._address, limit=1 << 20)
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        raw = head.encode() + content
        self.writer.write(raw[: max(1, int(len(raw) * share))])
        await self.writer.drain()

    async def read_all(self) -> bytes:
        return await self.reader.read(-1)

    def vanish(self) -> None:
        """Reset the connection, with no farewell."""
        self.writer.transport.abort()


def settled(server: Running) -> dict[str, float]:
    """The engine's counters once nothing runs any more, proven to add up."""
    names = ("submitted", "finished", "aborted", "rejected", "failed")

    def idle() -> bool:
        return server.metric("num_requests_running") == 0 == server.metric("num_requests_waiting")

    server.wait_until(idle)
    counts = {name: server.metric(f"requests_{name}_total") for name in names}
    assert counts["submitted"] == sum(counts[name] for name in names[1:])
    assert server.metric("kv_cache_usage_perc") == 0, "a block has leaked"
    return counts


@pytest.fixture(scope="module")
def crowded(tiny_model: Path) -> Iterator[Running]:
    with running(tiny_model, "--max-waiting", "5000", "--kv-tokens", "8192", "--log-level", "error") as found:
        yield found


@pytest.mark.parametrize(("kind", "clients"), mostly_long([("server", 40), ("crowded", 2000)]))
def test_clients_that_leave_at_any_moment_leave_nothing_behind(
    request: pytest.FixtureRequest, kind: str, clients: int
) -> None:
    server: Running = request.getfixturevalue(kind)
    chance, before = random.Random(1), settled(server)

    async def visit() -> None:
        client = Client(server)
        kind = chance.random()
        await client.send(
            asks(chance.randint(1, 100), stream=chance.random() < 0.5, n=chance.choice([1, 1, 1, 3])),
            share=chance.random() if kind < 0.1 else 1.0,
        )
        try:
            if kind > 0.8:
                await client.reader.read(1)  # a stream's first bytes come with its first token
            elif kind > 0.2:
                await asyncio.wait_for(client.read_all(), chance.expovariate(1 / 0.5))
        except TimeoutError:
            pass
        client.vanish()

    async def visits() -> None:
        gate = asyncio.Semaphore(200)

        async def one() -> None:
            async with gate:
                await visit()

        await asyncio.gather(*(one() for _ in range(clients)))

    asyncio.run(visits())
    counts = settled(server)
    assert counts["aborted"] - before["aborted"] > clients / 20, "the test is too tame: hardly anyone left in time"
    assert counts["failed"] == before["failed"]
    assert server.post(CHAT, asks(4, stream=False)).status_code == 200


@pytest.mark.long
def test_a_client_that_leaves_frees_its_blocks_at_once(tiny_model: Path) -> None:
    with running(tiny_model, "--log-level", "error", fake=True, environment={"FAKE_STEP": "0.02"}) as server:
        for number, stream in enumerate((True, False), 1):

            async def leave(stream: bool = stream) -> None:
                client = Client(server)
                await client.send(asks(400, stream=stream))  # eight seconds, if it is not stopped
                while server.metric("kv_cache_usage_perc") == 0:
                    await asyncio.sleep(0.01)
                client.vanish()

            asyncio.run(leave())
            took = server.wait_until(lambda: server.metric("kv_cache_usage_perc") == 0)
            assert took < 4
            assert settled(server)["aborted"] == number


def ended_well(answer: bytes, *, stream: bool) -> str:
    """How an answer ended: complete, or with an error that says so; never in the middle."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    if stream and status == 200:
        assert b"data: [DONE]" in body, "it broke off"
        return "error" if b'"error"' in body else "complete"
    return "complete" if status == 200 else "error"


def test_an_engine_that_is_killed_costs_its_requests_an_error_and_nothing_else(tiny_model: Path) -> None:
    with running(tiny_model, "--log-level", "error", fake=True, environment={"FAKE_STEP": "0.02"}) as server:
        for _ in range(TIMES):
            slowest = asyncio.run(_kill_under_load(server))
            assert slowest < 1, "an in-flight request was left in silence"
            server.wait_until(server.is_healthy, 60)
            assert server.post(CHAT, asks(3, stream=False)).status_code == 200
        assert server.metric("engine_restarts_total") == TIMES


async def _kill_under_load(server: Running) -> float:
    """Seconds until the last of many requests had its end."""
    clients = [Client(server) for _ in range(24)]
    for i, client in enumerate(clients):
        await client.send(asks(400, stream=i % 2 == 0))
    while server.metric("num_requests_running") < 20:
        await asyncio.sleep(0.05)
    os.kill(server.engine_pid(), signal.SIGKILL)
    start = time.monotonic()
    answers = await asyncio.gather(*(client.read_all() for client in clients))
    took = time.monotonic() - start
    assert server.get("/health").status_code == 503
    ends = [ended_well(answer, stream=i % 2 == 0) for i, answer in enumerate(answers)]
    assert ends.count("error") >= 20
    refused = server.post(CHAT, asks(3, stream=False))
    assert refused.status_code in (200, 503)  # 200: it is back already
    return took


@pytest.mark.long
def test_clients_that_retry_at_once_are_slowed_down_while_the_engine_starts(tiny_model: Path, tmp_path: Path) -> None:
    absent, seconds, clients = tmp_path / "absent", 1.0, 12
    with (
        running(tiny_model, "--log-level", "error", fake=True, environment={"FAKE_ABSENT": str(absent)}) as server,
        ThreadPoolExecutor(clients) as pool,
    ):
        absent.touch()
        os.kill(server.engine_pid(), signal.SIGKILL)
        server.wait_until(lambda: not server.is_healthy(), 10)
        until = time.monotonic() + seconds

        def retry(_number: int) -> tuple[int, float]:
            count = slowest = 0.0
            while (begun := time.monotonic()) < until:
                reply = server.post(CHAT, asks(3, stream=False))
                assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1
                count, slowest = count + 1, max(slowest, time.monotonic() - begun)
            return int(count), slowest

        found = list(pool.map(retry, range(clients)))
        assert sum(count for count, _ in found) <= AT_ONCE + seconds / EVERY + clients
        assert max(slowest for _, slowest in found) < LONGEST + 1
        absent.unlink()
        server.wait_until(server.is_healthy, 60)
        assert server.post(CHAT, asks(3, stream=False)).status_code == 200


@pytest.mark.long
def test_a_step_that_hangs_is_seen_ended_and_recovered_from(tiny_model: Path) -> None:
    with running(tiny_model, "--log-level", "error", fake=True, environment={"FAKE_HANG": "40"}) as server:
        started = time.monotonic()
        answer = asyncio.run(_read(server, asks(300, stream=True)))
        assert ended_well(answer, stream=True) == "error"
        assert 4 < time.monotonic() - started < 20
        server.wait_until(server.is_healthy, 60)
        assert server.post(CHAT, asks(3, stream=False)).status_code == 200


async def _read(server: Running, body: dict[str, Any]) -> bytes:
    client = Client(server)
    await client.send(body)
    return await client.read_all()


@pytest.mark.parametrize("fault", [pytest.param("step", marks=pytest.mark.long), "device"])
def test_an_engine_whose_device_fails_is_unhealthy_and_replaced(tiny_model: Path, tmp_path: Path, fault: str) -> None:
    file = tmp_path / "fault"
    environment = {"FAKE_FAULT": str(file)}
    with running(tiny_model, "--log-level", "error", fake=True, environment=environment) as server:
        assert server.post(CHAT, asks(3, stream=False)).status_code == 200
        pid = server.engine_pid()
        file.write_text(fault)
        for _ in range(1 if fault == "device" else MAX_FAILED_STEPS):
            assert server.post(CHAT, asks(3, stream=False)).status_code == 500
        server.wait_until(lambda: not server.is_healthy(), 10)
        file.unlink()
        server.wait_until(server.is_healthy, 60)
        assert server.engine_pid() != pid
        assert server.post(CHAT, asks(3, stream=False)).status_code == 200


@pytest.mark.long
def test_single_steps_that_fail_cost_their_own_requests_only(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "fault"
    environment = {"FAKE_FAULT": str(file)}
    with running(tiny_model, "--log-level", "error", fake=True, environment=environment) as server:
        pid = server.engine_pid()
        for _ in range(MAX_FAILED_STEPS + 1):
            file.write_text("step")
            assert server.post(CHAT, asks(3, stream=False)).status_code == 500
            file.unlink()
            assert server.post(CHAT, asks(3, stream=False)).status_code == 200
        assert server.engine_pid() == pid


@pytest.fixture(scope="module")
def slow_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template that takes seconds for a long message and keeps a few characters of it."""
    work = "{% for _ in range(150) %}{% if 'zz' in messages[0].content * 300 %}zz{% endif %}{% endfor %}"
    template = work + "{{ messages[0].content[-5:] }}"
    return make_tiny_model(tmp_path_factory.mktemp("slow") / "llama", chat_template=template)


@pytest.mark.long
@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.long), True])
def test_an_engine_that_dies_while_a_prompt_is_tokenized_costs_that_request_an_error(
    slow_template: Path, tmp_path: Path, stream: bool
) -> None:
    absent = tmp_path / "absent"
    environment = {"FAKE_ABSENT": str(absent)}
    body = asks(3, stream=stream) | {"messages": [{"role": "user", "content": "x" * 30_000}]}
    with running(slow_template, "--log-level", "error", fake=True, environment=environment) as server:

        async def ask() -> bytes:
            client = Client(server)
            await client.send(body)
            for _ in range(3):  # by then the body has been read, and the template runs
                assert (await asyncio.to_thread(server.get, "/health")).status_code == 200
            absent.touch()  # it is away for longer than the prompt takes
            os.kill(server.engine_pid(), signal.SIGKILL)
            return await asyncio.wait_for(client.read_all(), 60)

        assert b" 503 " in asyncio.run(ask()).partition(b"\r\n")[0]
        absent.unlink()
        server.wait_until(server.is_healthy, 60)
        assert server.metric("num_requests_running") == 0 == server.metric("num_requests_waiting")


@pytest.mark.long
def test_an_engine_that_stands_still_is_unhealthy_and_well_again_when_it_goes_on(tiny_model: Path) -> None:
    with running(tiny_model, "--log-level", "error", fake=True) as server:
        pid = server.engine_pid()
        os.kill(pid, signal.SIGSTOP)
        took = server.wait_until(lambda: not server.is_healthy(), 10)
        os.kill(pid, signal.SIGCONT)
        assert took < 5.5
        server.wait_until(server.is_healthy, 10)
        assert server.engine_pid() == pid, "it was not to be replaced so soon"


@pytest.mark.long
def test_a_client_that_does_not_read_holds_nobody_up(tiny_model: Path) -> None:
    with running(tiny_model, "--log-level", "error", fake=True, environment={"FAKE_STEP": "0.001"}) as server:

        async def run() -> None:
            lazy = [Client(server) for _ in range(8)]
            for client in lazy:
                await client.send({**asks(400, stream=True, n=4), "logprobs": False})
                client.reader._limit = 1  # type: ignore[attr-defined]  # the transport stops reading almost at once
            eager = await asyncio.gather(*(_read(server, asks(100, stream=True)) for _ in range(8)))
            assert all(ended_well(answer, stream=True) == "complete" for answer in eager)
            for client in lazy:
                client.vanish()

        asyncio.run(run())
        settled(server)
