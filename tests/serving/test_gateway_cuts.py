"""The gateway before servers that answer oddly: streams that are cut, errors of each API, clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from chairlift.gateway.app import Gateway
from chairlift.gateway.pool import Pool

READY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
Script = Callable[[str, asyncio.StreamWriter], Coroutine[Any, Any, None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def reply(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d Odd\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


async def send(writer: asyncio.StreamWriter, *parts: bytes) -> None:
    """Write each part only when the one before it has left: each arrives alone."""
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.02)


@asynccontextmanager
async def behind(*scripts: Script, key: bytes | None = None) -> AsyncIterator[tuple[Gateway, Pool, httpx.AsyncClient]]:
    """A gateway in this process before servers that answer requests as their scripts say."""
    servers = []
    for script in scripts:

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, script: Script = script) -> None:
            try:
                while head := await reader.readuntil(b"\r\n\r\n"):
                    size = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
                    await reader.readexactly(int(size or 0))
                    path = head.split()[1].decode()
                    if path == "/ready":
                        writer.write(READY)
                        return
                    await script(head.decode(), writer)
                    await writer.drain()
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        servers.append(await asyncio.start_server(serve, "127.0.0.1", 0))
    pool = Pool([f"http://127.0.0.1:{each.sockets[0].getsockname()[1]}" for each in servers], "round-robin", key)
    await pool.open()
    gateway = Gateway(pool, None, 1 << 20)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(gateway), base_url="http://gateway", timeout=60
    ) as client:
        yield gateway, pool, client
    await pool.close()
    for each in servers:
        each.close()


@pytest.mark.parametrize("line", [b"\n", b"\r\n"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_stream_that_is_cut_within_an_event_ends_with_whole_events_and_an_error(line: bytes, is_first: bool) -> None:
    whole = b'data: {"text": "one"}' + 2 * line

    async def cut(head: str, writer: asyncio.StreamWriter) -> None:
        await send(writer, STREAM, *([] if is_first else [chunk(whole)]), chunk(b'data: {"text": "tw'))
        writer.transport.abort()

    async def run() -> None:
        async with behind(cut) as (_, _, client):
            found = (await client.post("/v1/completions", json={"prompt": "Hello", "stream": True})).content
            expected = b"" if is_first else whole
            assert found.startswith(expected + b'data: {"error"') and b'"tw' not in found

    asyncio.run(run())


def test_an_event_of_megabytes_that_is_cut_is_ended_before_the_error() -> None:
    async def cut(head: str, writer: asyncio.StreamWriter) -> None:
        await send(writer, STREAM, chunk(b"data: " + b"x" * (3 << 20)))
        writer.transport.abort()

    async def run() -> None:
        async with behind(cut) as (_, _, client):
            found = (await client.post("/v1/completions", json={"prompt": "Hello", "stream": True})).content
            assert b'\n\ndata: {"error"' in found

    asyncio.run(run())


def test_the_error_of_a_cut_stream_of_responses_is_one_of_their_events() -> None:
    begun = b'event: response.created\ndata: {"type":"response.created","sequence_number":0}\n\n'

    async def cut(head: str, writer: asyncio.StreamWriter) -> None:
        await send(writer, STREAM, *(chunk(begun.replace(b":0}", b":%d}" % number)) for number in range(3)))
        writer.transport.abort()

    async def run() -> None:
        async with behind(cut) as (_, _, client):
            found = (await client.post("/v1/responses", json={"input": "Hello", "stream": True})).text
            last = found.split("\n\n")[-2]
            assert last.startswith('event: error\ndata: {"type":"error",')
            assert '"sequence_number":3' in last and '"code":"service_unavailable"' in last

    asyncio.run(run())


LOST = {
    "/v1/messages": b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"gone"}}\n\n',
    "/v1/responses": (
        b'event: response.created\ndata: {"type":"response.created"}\n\n'
        b'event: error\ndata: {"type":"error","code":"service_unavailable","message":"gone"}\n\n'
        b'event: response.failed\ndata: {"type":"response.failed"}\n\n'
    ),
    "/v1/completions": b'data: {"error":{"code":"service_unavailable","message":"gone"}}\n\ndata: [DONE]\n\n',
}
UNKNOWN = {
    "/v1/messages": b'{"type":"error","error":{"type":"not_found_error","message":"there is no model here"}}',
    "/v1/responses": b'{"error":{"code":"model_not_found","message":"there is no model here"}}',
    "/v1/completions": b'{"error":{"code":"model_not_found","message":"there is no model here"}}',
}


@pytest.mark.parametrize("path", LOST)
@pytest.mark.parametrize("what", ["an engine that ended before a token", "a model that it lacks"])
def test_a_request_goes_to_the_other_server_from_one_with(what: str, path: str) -> None:
    asked = []

    async def answers(head: str, writer: asyncio.StreamWriter) -> None:
        asked.append("answers")
        writer.write(reply(200, b'{"fine": true}'))

    async def refuses(head: str, writer: asyncio.StreamWriter) -> None:
        asked.append("refuses")
        if what == "a model that it lacks":
            writer.write(reply(404, UNKNOWN[path]))
        else:
            writer.write(STREAM + chunk(LOST[path]) + b"0\r\n\r\n")

    async def run() -> None:
        async with behind(refuses, answers) as (_, pool, client):
            for _ in range(2):  # by round-robin, one of them is sent to the server that refuses
                found = await client.post(path, json={"model": "large", "stream": True})
                assert found.status_code == 200 and found.json() == {"fine": True}
            assert "refuses" in asked and pool.live == 0

    asyncio.run(run())


@pytest.mark.parametrize("end", ["an error", "the end of the server"])
def test_a_response_without_text_goes_to_the_other_server_however_long_its_first_events_are(end: str) -> None:
    """They repeat the request's instructions and tools."""
    asked = []
    begun = [
        b'event: response.%s\ndata: {"instructions":"%s"}\n\n' % (name, b"x" * 60_000) for name in (b"created", b"x")
    ]
    failed = LOST["/v1/responses"].partition(b"\n\n")[2]

    async def answers(head: str, writer: asyncio.StreamWriter) -> None:
        asked.append("answers")
        writer.write(reply(200, b'{"fine": true}'))

    async def fails(head: str, writer: asyncio.StreamWriter) -> None:
        asked.append("fails")
        await send(writer, STREAM, *map(chunk, begun))
        if end == "an error":
            writer.write(chunk(failed) + b"0\r\n\r\n")
        else:
            writer.transport.abort()

    async def run() -> None:
        async with behind(fails, answers) as (_, pool, client):
            for _ in range(2):
                found = await client.post("/v1/responses", json={"input": "Hello", "stream": True})
                assert found.json() == {"fine": True}
            assert "fails" in asked and pool.live == 0

    asyncio.run(run())


def test_a_client_that_leaves_while_its_prompt_is_computed_is_counted_nowhere() -> None:
    """One server computes prompts and another decodes; the client leaves before the first has answered."""
    begun = asyncio.Event()

    async def computes(head: str, writer: asyncio.StreamWriter) -> None:
        begun.set()
        await asyncio.sleep(3600)

    async def decodes(head: str, writer: asyncio.StreamWriter) -> None:
        raise AssertionError("the prompt is not computed yet")

    async def run() -> None:
        async with behind(computes, decodes, key=b"a key of the whole cluster") as (_, pool, client):
            first, second = pool.backends.values()
            second.receives_at = "tcp:127.0.0.1:9"
            pool.roles.update({first.name: "prefill", second.name: "decode"})
            asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "many words " * 500}))
            async with asyncio.timeout(60):
                await begun.wait()
            assert pool.live == 2
            asking.cancel()
            async with asyncio.timeout(60):
                while pool.live:
                    await asyncio.sleep(0.01)

    asyncio.run(run())


def test_an_error_page_of_any_size_is_passed_on_whole() -> None:
    page = bytes(range(65, 91)) * 10_000

    async def fails(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(500, page))

    async def run() -> None:
        async with behind(fails) as (_, _, client):
            assert (await client.post("/v1/completions", json={"prompt": "Hello"})).content == page

    asyncio.run(run())


def test_headers_that_a_connection_header_names_are_not_passed_on() -> None:
    heads = []

    async def listens(head: str, writer: asyncio.StreamWriter) -> None:
        heads.append(head.lower())
        body = b"{}"
        named = b"Connection: X-Of-This-Hop\r\nX-Of-This-Hop: 1\r\nX-Of-The-Reply: 2\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s\r\n%s" % (len(body), named, body))

    async def run() -> None:
        headers = {"Connection": "keep-alive, X-Mine", "X-Mine": "1", "X-Request-Id": "kept"}
        async with behind(listens) as (_, _, client):
            found = await client.post("/v1/completions", json={"prompt": "Hello"}, headers=headers)
            assert "x-of-this-hop" not in found.headers and found.headers["x-of-the-reply"] == "2"
            assert "x-mine" not in heads[0] and "x-request-id: kept" in heads[0]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/models"), ("POST", "/reset_prefix_cache")], ids=["models", "reset"]
)
@pytest.mark.parametrize("body", [b"[]", b"7", b'{"data": [1, null], "blocks": "many"}', b'{"data": 3}', b"{"])
def test_a_server_that_answers_with_something_else_costs_no_500(method: str, path: str, body: bytes) -> None:
    async def odd(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(200, body))

    async def run() -> None:
        async with behind(odd) as (_, _, client):
            found = await client.request(method, path)
            assert found.status_code in (200, 502) and found.json()

    asyncio.run(run())


def test_a_refusal_is_passed_on_that_comes_before_the_server_has_read_the_body() -> None:
    """As our server does: it refuses by the head, reads 1 MiB of the body for the client's sake, and closes."""
    refusal = reply(413, b'{"error": "too large"}').replace(b"\r\n", b"\r\nConnection: close\r\n", 1)

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_check = b" /ready " in await reader.readuntil(b"\r\n\r\n")
        writer.write(READY if is_check else refusal)
        writer.write_eof()
        left = 1 << 20
        while left > 0 and (part := await reader.read(1 << 16)):
            left -= len(part)
        writer.transport.abort()

    async def run() -> None:
        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        pool = Pool([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"], "round-robin")
        await pool.open()
        transport = httpx.ASGITransport(Gateway(pool, None, 16 << 20))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60) as client:
            for _ in range(3):
                found = await client.post("/v1/completions", content=b'{"prompt": "' + b"x" * (12 << 20) + b'"}')
                assert (found.status_code, found.json()) == (413, {"error": "too large"})
            assert not pool.trouble and pool.live == 0
        await pool.close()
        server.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "is_generated"),
    [("/v1/completions", True), ("/v1/messages", True), ("/tokenize", False), ("/v1/messages/count_tokens", False)],
)
def test_only_prompts_that_are_decoded_are_computed_by_another_server(path: str, is_generated: bool) -> None:
    sent: list[int] = []

    def answers(place: int) -> Script:
        async def script(head: str, writer: asyncio.StreamWriter) -> None:
            sent.append(place)
            writer.write(reply(200, b"{}"))

        return script

    async def run() -> None:
        async with behind(answers(0), answers(1), key=b"a key of the cluster") as (_, pool, client):
            first, second = pool.backends.values()
            second.receives_at = "tcp:127.0.0.1:9"
            pool.roles |= {first.name: "prefill", second.name: "decode"}
            await client.post(path, json={"prompt": "a long prompt " * 100})

    asyncio.run(run())
    assert sent == ([0, 1] if is_generated else [1])
