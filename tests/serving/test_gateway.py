"""`chairlift route` in front of real servers: what passes through it, and what clients see when a server goes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from openai import NotFoundError, OpenAI
from prometheus_client.parser import text_string_to_metric_families
from running import Running, keys_file, routed, running
from test_chaos import Client, asks, ended_well

from mostly_long import TIMES
from processes import megabytes

COMPLETION = "/v1/completions"
ENDS = ("finished", "aborted", "rejected", "failed")


def counts(router: Running) -> dict[str, dict[str, float]]:
    """What became of requests, by server."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(router.get("/metrics").text):
        for sample in family.samples:
            if sample.name == "chairlift:router_requests_total":
                found.setdefault(sample.labels["replica"], {})[sample.labels["state"]] = sample.value
    return found


def settled(router: Running) -> dict[str, float]:
    """The counts of all servers together once nothing runs, proven to add up for each of them."""

    def add_up() -> bool:
        return all(each["submitted"] == sum(each[end] for end in ENDS) for each in counts(router).values())

    router.wait_until(add_up)
    return {state: sum(each[state] for each in counts(router).values()) for state in ("submitted", *ENDS)}


def states(router: Running) -> list[str]:
    return list(router.get("/health").json()["servers"].values())


@pytest.fixture(scope="module")
def servers(tiny_model: Path) -> Iterator[list[Running]]:
    with ExitStack() as stack:
        flags = ("--served-model-name", "tiny", "--log-level", "error")
        yield [
            stack.enter_context(running(tiny_model, *flags, fake=True, environment={"FAKE_STEP": "0.02"}))
            for _ in range(2)
        ]


@pytest.fixture(scope="module")
def router(servers: list[Running]) -> Iterator[Running]:
    with routed(*servers, flags=("--log-level", "error")) as found:
        yield found
        settled(found)


# ---- what passes through


@contextmanager
def origin(reply: bytes, seed: int) -> Iterator[str]:
    """A server that sends fixed bytes in pieces of random sizes, for any request but a health check."""
    listener = socket.create_server(("127.0.0.1", 0))
    chance = random.Random(seed)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                head = connection.recv(1 << 16)
                if b" /ready " in head:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
                    continue
                connection.sendall(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
                rest = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in pieces(reply, chance)) + b"0\r\n\r\n"
                for part in pieces(rest, chance):
                    connection.sendall(part)
                    time.sleep(0.0005)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def pieces(data: bytes, chance: random.Random) -> Iterator[bytes]:
    start = 0
    while start < len(data):
        size = chance.choice([1, 2, 7, 40, 300, 5000])
        yield data[start : start + size]
        start += size


def test_a_stream_comes_through_byte_for_byte_however_it_is_cut() -> None:
    chance = random.Random(3)
    events = [b'data: {"text": "%s"}\n\n' % (b"x" * chance.choice([0, 1, 50, 3000])) for _ in range(120)]
    reply = b"".join([*events, b"data: [DONE]\n\n", b"and a rest that is no event"])
    with origin(reply, 5) as url, routed(url, flags=("--log-level", "error")) as router:
        for _ in range(3):
            found = router.post(COMPLETION, {"prompt": "Hello", "stream": True})
            assert found.content == reply
            assert found.headers["content-type"] == "text/event-stream"


@pytest.mark.long
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_each_api_answers_through_the_router_as_it_does_directly(
    router: Running, servers: list[Running], path: str
) -> None:
    """A stream ends as a direct one does, and the text of both is the same; ids and times are each reply's own."""
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "ignore_eos": True, "stream": True}
    field = "input" if path == "/v1/responses" else "messages"
    body |= {field: [{"role": "user", "content": "What is the answer?"}]}
    if path == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    through, direct = (server.post(path, body) for server in (router, servers[0]))
    assert through.status_code == direct.status_code == 200
    assert shape(through.text) == shape(direct.text)
    whole = [server.post(path, {**body, "stream": False}).json() for server in (router, servers[0])]
    assert whole[0].keys() == whole[1].keys()


def shape(stream: str) -> tuple[str, set[str]]:
    """The last event without ids, and all names of events."""
    events = [event for event in stream.split("\n\n") if event]
    names = {line for event in events for line in event.splitlines() if line.startswith("event: ")}
    return events[-1][:20], names


def test_official_clients_work_through_the_router(router: Running) -> None:
    client = OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)
    assert [each.id for each in client.models.list().data] == ["tiny"]
    messages: Any = [{"role": "user", "content": "Hello"}]
    streamed = client.chat.completions.create(model="tiny", messages=messages, max_tokens=6, stream=True)
    assert len([chunk for chunk in streamed if chunk.choices]) >= 2
    with pytest.raises(NotFoundError, match="no model 'other' here"):
        client.chat.completions.create(model="other", messages=messages)
    other = anthropic.Anthropic(base_url=router.url, api_key="none", max_retries=0)
    assert other.messages.create(model="tiny", messages=messages, max_tokens=4).content
    assert other.messages.count_tokens(model="tiny", messages=messages).input_tokens > 0
    tokens = router.post("/tokenize", {"prompt": "Hello"}).json()["tokens"]
    assert router.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "Hello"
    assert router.get("/tokenizer_info").status_code == 200
    assert router.post("/reset_prefix_cache").json()["blocks"] >= 0
    assert router.get("/nowhere").status_code == 404


def test_a_prefix_stays_at_its_server_and_another_goes_to_the_other(router: Running) -> None:
    def sent(words: str) -> list[float]:
        before = counts(router)
        for turn in range(1, 4):
            reply = router.post(COMPLETION, {"prompt": words * 25 + "and more " * turn, "max_tokens": 1})
            assert reply.status_code == 200
        after = counts(router)
        return [after[url]["submitted"] - before[url]["submitted"] for url in after]

    first, second = sent("the same words again "), sent("other words than before ")
    assert sorted(first) == sorted(second) == [0, 3] and first != second


def test_a_body_that_is_too_large_or_not_json_is_refused(router: Running) -> None:
    assert router.post(COMPLETION, b"{" * 100).status_code == 400
    assert router.post(COMPLETION, b" " * (9 << 20)).status_code == 413


class Endless(socketserver.BaseRequestHandler):
    """A server with streams of one event and no end."""

    def handle(self) -> None:
        received = self.request.recv(1 << 16)
        if b" /ready " in received:
            self.request.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
            return
        head, _, body = received.partition(b"\r\n\r\n")
        left = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]) - len(body)
        while left > 0:
            left -= len(self.request.recv(1 << 20))
        kind = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self.request.sendall(b"HTTP/1.1 200 OK\r\n" + kind + b"b\r\ndata: {}\n\n \r\n")
        self.request.recv(1)  # until the router closes


@pytest.mark.long
def test_the_bodies_of_running_streams_are_not_kept() -> None:
    body = b'{"prompt": "Hello", "stream": true' + b" " * (4 << 20) + b"}"
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Endless) as server, ExitStack() as stack:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        router = stack.enter_context(routed(f"http://127.0.0.1:{server.server_address[1]}"))
        client = stack.enter_context(httpx.Client(timeout=60))
        before, begun = 0, []  # an iterator that is dropped closes its stream
        for number in range(30):
            stream = stack.enter_context(client.stream("POST", router.url + COMPLETION, content=body))
            begun.append(stream.iter_raw())
            next(begun[-1])
            before = before or megabytes(router.process.pid, "VmRSS") * (number == 3)  # the first few grow its heap
        assert megabytes(router.process.pid, "VmRSS") - before < 50, "26 bodies of 4 MiB would be 104 MiB"


# ---- when servers are full, leave or die


@pytest.mark.long
def test_429_comes_only_when_all_servers_are_full_with_the_soonest_retry(tiny_model: Path) -> None:
    environment = {"FAKE_STEP": "0.3", "FAKE_SEQUENCES": "1"}
    with ExitStack() as stack:
        full = [
            stack.enter_context(
                running(tiny_model, "--max-waiting", "1", "--log-level", "error", fake=True, environment=environment)
            )
            for _ in range(2)
        ]
        router = stack.enter_context(routed(*full, flags=("--log-level", "error")))
        client = stack.enter_context(httpx.Client(timeout=60))
        body = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
        begun = []
        for server in full:  # one runs and one waits at each; a reply that has not begun would block here
            stream = stack.enter_context(client.stream("POST", server.url + COMPLETION, json=body))
            begun.append(stream.iter_raw())  # one that is dropped closes its stream
            next(begun[-1])
        waiting = stack.enter_context(client.stream("POST", full[0].url + COMPLETION, json=body))
        assert waiting.status_code == 200
        with ThreadPoolExecutor(1) as threads:
            taken = threads.submit(router.post, COMPLETION, {**body, "stream": False, "max_tokens": 1})
            router.wait_until(lambda: counts(router)[full[1].url]["submitted"] == 1)
            assert not taken.done(), "it waits at the server that has room"
            refused = router.post(COMPLETION, {**body, "stream": False})
            assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
            soonest = [
                int(server.post(COMPLETION, {**body, "stream": False}).headers["Retry-After"]) for server in full
            ]
            assert int(refused.headers["Retry-After"]) <= max(soonest) + 1
            assert {each["rejected"] >= 1 for each in counts(router).values()} == {True}, "it was offered to both"
            stack.close()  # the streams end, and the server with room serves the request or ends
            taken.exception()


def test_a_request_that_its_client_cancels_is_cancelled_at_the_server(router: Running, servers: list[Running]) -> None:
    before = sum(server.metric("requests_aborted_total") for server in servers)

    async def leave() -> None:
        clients = [Client(router) for _ in range(6)]
        for number, client in enumerate(clients):
            await client.send(asks(400, stream=number % 2 == 0))
        while sum(server.metric("num_requests_running") for server in servers) < 6:
            await asyncio.sleep(0.02)
        for client in clients:
            client.vanish()

    asyncio.run(leave())
    router.wait_until(lambda: sum(server.metric("requests_aborted_total") for server in servers) - before == 6)
    router.wait_until(lambda: all(server.is_idle() for server in servers))
    settled(router)


@pytest.mark.long
def test_a_killed_server_costs_only_the_requests_that_had_a_token(tiny_model: Path) -> None:
    """12 rows a server and 48 requests: half of them wait without a token when one of the two is killed."""
    environment = {"FAKE_STEP": "0.02", "FAKE_SEQUENCES": "12"}
    more: dict[str, Any] = {"fake": True, "environment": environment}
    with ExitStack() as stack:
        kept = stack.enter_context(running(tiny_model, "--log-level", "error", **more))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        router = stack.enter_context(routed(kept, f"http://127.0.0.1:{port}", flags=("--log-level", "error")))
        for _ in range(TIMES):
            with running(tiny_model, "--log-level", "error", port=port, **more) as doomed:
                router.wait_until(lambda: states(router) == ["ok", "ok"])
                answers = asyncio.run(kill_under_load(router, [kept, doomed], doomed))
                assert_clean(answers)
                router.wait_until(lambda: states(router)[1] != "ok")
                assert router.post(COMPLETION, {"prompt": "Hello", "max_tokens": 2}).status_code == 200
                found = settled(router)
                assert found["failed"] >= 12
                router.wait_until(kept.is_idle)


def assert_clean(answers: list[bytes]) -> None:
    ends = [ended_well(answer, stream=True) for answer in answers]
    assert all(b" 200 " in answer.partition(b"\r\n")[0] for answer in answers), "an error before the stream began"
    broken = [answer for answer, end in zip(answers, ends, strict=True) if end == "error"]
    assert 1 <= len(broken) <= 12, "only a batch of them had a token from the server that was killed"
    assert all(b'"text"' in answer for answer in broken), "a request without a token was not sent to the other"


async def kill_under_load(router: Running, servers: list[Running], doomed: Running) -> list[bytes]:
    clients = [Client(router) for _ in range(48)]
    for client in clients:
        body = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True, "stream": True}
        await client.send(body, path=COMPLETION)
    while sum(server.metric("num_requests_running") for server in servers) < 24:
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    engine = doomed.engine_pid()
    os.kill(doomed.process.pid, signal.SIGKILL)
    os.kill(engine, signal.SIGKILL)
    doomed.process.wait()
    return list(await asyncio.gather(*(client.read_all() for client in clients)))


@pytest.mark.long
def test_a_killed_router_leaves_nothing_at_the_servers(servers: list[Running]) -> None:
    for _ in range(TIMES):
        with routed(*servers, flags=("--log-level", "error")) as doomed:

            async def kill(doomed: Running = doomed) -> None:
                clients = [Client(doomed) for _ in range(16)]
                for number, client in enumerate(clients):
                    await client.send(asks(400, stream=number % 2 == 0))
                while sum(server.metric("num_requests_running") for server in servers) < 16:
                    await asyncio.sleep(0.02)
                os.kill(doomed.process.pid, signal.SIGKILL)
                doomed.process.wait()
                for client in clients:
                    with suppress(ConnectionError):
                        await asyncio.wait_for(client.read_all(), 10)

            asyncio.run(kill())
        for server in servers:
            server.wait_until(server.is_idle)


@pytest.mark.long
def test_a_server_that_drains_gets_no_new_request_and_the_router_drains_too(tiny_model: Path) -> None:
    more: dict[str, Any] = {"fake": True, "environment": {"FAKE_STEP": "0.03"}}
    with ExitStack() as stack:
        pair = [stack.enter_context(running(tiny_model, "--log-level", "error", **more)) for _ in range(2)]
        router = stack.enter_context(routed(*pair, flags=("--log-level", "error")))
        threads = stack.enter_context(ThreadPoolExecutor(8))
        body = {"prompt": "Hello", "max_tokens": 100, "ignore_eos": True}
        running_ones = [threads.submit(router.post, COMPLETION, body) for _ in range(8)]
        router.wait_until(lambda: all(each["submitted"] for each in counts(router).values()))
        pair[0].process.send_signal(signal.SIGTERM)
        router.wait_until(lambda: states(router)[0] != "ok")
        before = counts(router)[pair[0].url]["submitted"]
        assert [router.post(COMPLETION, {**body, "max_tokens": 1}).status_code for _ in range(4)] == [200] * 4
        assert counts(router)[pair[0].url]["submitted"] == before
        router.process.send_signal(signal.SIGTERM)
        router.wait_until(lambda: router.get("/ready").status_code == 503)
        assert router.post(COMPLETION, body).status_code == 503
        assert [each.result().status_code for each in running_ones] == [200] * 8


# ---- models, keys and limits


@pytest.mark.long
def test_models_on_different_servers_are_one_list_and_each_request_finds_its_own(tiny_model: Path) -> None:
    with ExitStack() as stack:
        pair = [
            stack.enter_context(running(tiny_model, "--served-model-name", name, "--log-level", "error", fake=True))
            for name in ("one", "two")
        ]
        router = stack.enter_context(routed(*pair, flags=("--log-level", "error")))
        assert [each["id"] for each in router.get("/v1/models").json()["data"]] == ["one", "two"]
        for name in ("one", "two", "two", "one", "two"):
            reply = router.post(COMPLETION, {"model": name, "prompt": "Hello", "max_tokens": 1})
            assert reply.status_code == 200 and reply.json()["model"] == name
        found = counts(router)
        assert sum(each["rejected"] for each in found.values()) <= 2, "it asks a server for each model once at most"
        unknown = router.post(COMPLETION, {"model": "three", "prompt": "Hello"})
        assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"


@pytest.mark.long
def test_keys_are_passed_on_and_tenants_limits_hold_for_all_servers_together(tiny_model: Path, tmp_path: Path) -> None:
    keys = keys_file(tmp_path, bob="max_concurrent = 3")
    flags = ("--api-keys", keys, "--log-level", "error")
    more: dict[str, Any] = {"fake": True, "environment": {"FAKE_STEP": "0.05"}}
    with ExitStack() as stack:
        pair = [stack.enter_context(running(tiny_model, *flags, **more)) for _ in range(2)]
        plain = stack.enter_context(routed(*pair, flags=("--log-level", "error")))
        router = stack.enter_context(routed(*pair, flags=flags))
        body = {"prompt": "Hello", "max_tokens": 60, "ignore_eos": True}
        bob = {"Authorization": "Bearer sk-key-of-bob"}
        one = {**body, "max_tokens": 1}
        assert plain.post(COMPLETION, one).status_code == router.post(COMPLETION, one).status_code == 401
        assert plain.post(COMPLETION, one, headers=bob).status_code == 200
        assert router.get("/metrics", headers=bob).status_code == 403
        with ThreadPoolExecutor(12) as threads:
            codes = list(threads.map(lambda _: router.post(COMPLETION, body, headers=bob).status_code, range(12)))
        assert codes.count(200) == 3 and codes.count(429) == 9
