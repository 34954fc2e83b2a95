"""The load test against a small real server on a loopback socket, with a scripted reply in each test."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from chairlift.bench import http
from chairlift.bench.http import Chunks, Exchange, Reply, Server
from chairlift.bench.serve import LoadPlan, LoadResult, Progress, Reader, Record, run_serve
from chairlift.bench.serve_report import is_good, read_targets, summarize, times
from chairlift.core.errors import ChairliftError
from chairlift.traffic.query import Query

Send = Callable[[bytes], Awaitable[None]]
Answer = Callable[[dict[str, Any], Send], Awaitable[None]]
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
MODELS = b'{"object": "list", "data": [{"id": "tiny"}, {"id": "other"}]}'


def whole(status: str, body: bytes, kind: str = "application/json") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def event(value: object) -> bytes:
    """Return an event as one chunk."""
    data = b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def text(new: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": new, "finish_reason": finish}], "usage": None}


def usage(prompt: int, output: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}}


def answer_events(prompt: int, output: int) -> list[object]:
    words = [text("w", "length" if i == output - 1 else None) for i in range(output)]
    return [*words, usage(prompt, output), b"[DONE]"]


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Run a server; yield its URL and the list of request bodies that it receives."""
    seen: list[dict[str, Any]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def send(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lines = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
            if head.startswith("GET /v1/models "):
                await send(whole("200 OK", MODELS))
                return
            body = json.loads(await reader.readexactly(int(lines["Content-Length"])))
            seen.append({**body, "path": head.split()[1], "key": lines.get("Authorization")})
            await answer(body, send)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # a client that only tested the connection, or that has closed it
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=2048)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen


async def plain(body: dict[str, Any], send: Send) -> None:
    """Stream an answer of the requested length."""
    await send(STREAM)
    for each in answer_events(len(body["prompt"]), body["max_tokens"]):
        await send(event(each))
    await send(END)


def ask(answer: Answer, queries: list[Query], **options: Any) -> tuple[LoadResult, list[dict[str, Any]]]:
    async def go() -> tuple[LoadResult, list[dict[str, Any]]]:
        async with serving(answer) as (url, seen):
            return await run_serve(LoadPlan(url, queries, **options)), seen

    return asyncio.run(go())


def one(answer: Answer, **options: Any) -> Record:
    outcome, _ = ask(answer, [Query([1, 2, 3], 4)], **options)
    [record] = outcome.records
    return record


def replying(*parts: bytes) -> Answer:
    async def answer(_body: dict[str, Any], send: Send) -> None:
        for part in parts:
            await send(part)

    return answer


def test_answers_are_counted_and_timed() -> None:
    async def slow(body: dict[str, Any], send: Send) -> None:
        await send(STREAM)
        await asyncio.sleep(0.1)
        for each in answer_events(len(body["prompt"]), body["max_tokens"]):
            await send(event(each))
            await asyncio.sleep(0.01)
        await send(END)

    queries = [Query([1] * (i + 1), i + 1, at=0.01 * i) for i in range(8)]
    outcome, seen = ask(slow, queries, api_key="secret")
    found = summarize(outcome, {"ttft": 60_000.0})
    assert found["requests"] == {"ok": 8, "failed": 0, "refused": 0, "unfinished": 0}
    assert (found["prompt_tokens"], found["output_tokens"], found["asked_output_tokens"]) == (36, 36, 36)
    assert found["status"] == {"200": 8} and found["errors"] == {} and found["model"] == "tiny"
    assert found["goodput"]["share"] == 1 and found["goodput"]["requests_s"] == pytest.approx(found["requests_s"])
    assert found["output_tok_s"] == pytest.approx(36 / found["seconds"])
    assert 2 <= found["peak_concurrency"] <= 8
    assert 100 <= found["ms"]["ttft"]["p50"] <= found["ms"]["ttft"]["max"] <= found["ms"]["e2e"]["max"] < 30_000
    assert found["ms"]["tpot"]["p50"] > 1 and found["ms"]["itl"]["mean"] > 1
    for record, query in zip(outcome.records, queries, strict=True):
        assert len(record.chunks) == query.output_tokens and record.planned == query.at
        assert record.sent is not None and record.end is not None
        assert query.at <= record.sent <= record.chunks[0] <= record.end
    json.dumps(found)
    assert {each["key"] for each in seen} == {"Bearer secret"}
    wanted = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0.0}
    longest = max(seen, key=lambda each: each["max_tokens"])
    assert wanted.items() <= longest.items() and longest["path"] == "/v1/completions"
    assert (longest["prompt"], longest["max_tokens"], longest["min_tokens"]) == ([1] * 8, 8, 8)


def test_requests_are_sent_whether_or_not_earlier_ones_are_answered() -> None:
    waiting = 0
    all_sent = asyncio.Event()

    async def together(body: dict[str, Any], send: Send) -> None:
        nonlocal waiting
        waiting += 1
        if waiting == 20:
            all_sent.set()
        await all_sent.wait()
        await plain(body, send)

    outcome, _ = ask(together, [Query([1], 2, at=0.001 * i) for i in range(20)], timeout=30)
    assert outcome.peak_concurrency == 20 and {each.state for each in outcome.records} == {"ok"}


def test_the_wait_of_a_held_request_counts_in_its_latency() -> None:
    async def slow(body: dict[str, Any], send: Send) -> None:
        await asyncio.sleep(0.05)
        await plain(body, send)

    outcome, _ = ask(slow, [Query([1], 2) for _ in range(6)], max_concurrency=2)
    assert outcome.peak_concurrency == 2
    assert max(times(each)["ttft"] for each in outcome.records) >= 149, "three times 50 ms, two of them waiting"


def test_a_chat_is_sent_as_text_and_its_role_is_not_a_token() -> None:
    async def chat(_body: dict[str, Any], send: Send) -> None:
        def delta(finish: str | None = None, **new: str) -> dict[str, Any]:
            return {"choices": [{"index": 0, "delta": new, "finish_reason": finish}]}

        await send(STREAM + event(delta(role="assistant", content="")))
        await asyncio.sleep(0.1)
        for each in (delta(content="a"), delta(content='"role": "x"'), delta("stop"), usage(31, 2), b"[DONE]"):
            await send(event(each))
        await send(END)

    outcome, [seen] = ask(chat, [Query(25, 9)], endpoint="chat", model="mine")
    [record] = outcome.records
    assert (record.prompt_tokens, record.output_tokens, len(record.chunks)) == (31, 2, 2)
    assert times(record)["ttft"] >= 100
    assert seen["path"] == "/v1/chat/completions" and seen["model"] == "mine"
    [message] = seen["messages"]
    assert message["role"] == "user" and len(message["content"].split()) == 25
    found = summarize(outcome)
    assert (found["output_tokens"], found["asked_output_tokens"]) == (2, 9)


def test_refusals_and_failures_are_counted_separately_and_the_run_goes_on() -> None:
    async def moody(body: dict[str, Any], send: Send) -> None:
        match body["max_tokens"]:
            case 1:
                await send(whole("429 Too Many Requests", b'{"error": {"message": "try\\nlater"}}'))
            case 2:
                await send(whole("500 Oh", b"it broke", "text/plain"))
            case 3:
                await send(STREAM + event(text("a")) + event({"error": {"message": "out of memory"}}))
                await asyncio.sleep(0.05)
            case 4:
                await send(STREAM + event(text("a")))  # then the connection ends
            case 5:
                pass
            case 6:
                await send(whole("200 OK", b'{"choices": []}'))
            case 7:
                await send(b"SSH-2.0-OpenSSH\r\n\r\n")
            case 8:
                await send(STREAM + event(text("a")) + END)
            case 9:
                await send(STREAM + event(b'{"usage": {'))
            case 10:
                await send(STREAM + b"zz\r\n")
            case _:
                await plain(body, send)

    outcome, _ = ask(moody, [Query([1], i) for i in range(1, 13)])
    assert [each.state for each in outcome.records] == ["refused", *["failed"] * 9, "ok", "ok"]
    assert [each.error for each in outcome.records] == [
        "HTTP 429: try later",
        "HTTP 500: it broke",
        "out of memory",
        "the connection was closed in the middle of the reply",
        "the connection was closed before a reply",
        "the server did not stream: it sent application/json",
        "the reply is not HTTP/1.1: it begins with 'SSH-2.0-OpenSSH'",
        "the stream ended before the answer did",
        "an event is not JSON: b'{\"usage\": {'",
        "the reply is not HTTP: b'zz' is not a chunk's size",
        None,
        None,
    ]
    found = summarize(outcome, {"e2e": 60_000.0})
    assert found["requests"] == {"ok": 2, "failed": 9, "refused": 1, "unfinished": 0}
    assert found["status"] == {"200": 8, "no reply": 2, "429": 1, "500": 1}
    assert found["goodput"]["share"] == pytest.approx(2 / 12) and found["output_tokens"] == 23


def test_an_answer_that_takes_too_long_has_failed() -> None:
    async def endless(_body: dict[str, Any], send: Send) -> None:
        await send(STREAM)
        while True:
            await send(event(text("a")))
            await asyncio.sleep(0.01)

    record = one(endless, timeout=0.2)
    assert record.error == "not finished within 0.2 s" and record.status == 200 and record.chunks


def test_other_ends_of_a_stream_are_understood() -> None:
    unframed = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    done = b"data: [DONE]"  # without a newline
    word, last = b"data:" + json.dumps(text("a")).encode(), b"data:" + json.dumps(text("a", "stop")).encode()
    until_closed = one(replying(unframed, b": hello\r\n\r\n" + word + b"\r\n\r\n", last + b"\n\n" + done))
    assert (until_closed.state, until_closed.output_tokens, until_closed.is_counted) == ("ok", 2, False)
    without_done = one(replying(b"HTTP/1.1 100 Continue\r\n\r\n" + STREAM, event(text("a", "stop")), END))
    assert (without_done.state, without_done.output_tokens) == ("ok", 1)
    counted = one(replying(STREAM, event(text("", "length")), event(usage(3, 1)), event(b"[DONE]")))
    assert (counted.state, len(counted.chunks)) == ("ok", 1), "a token without text has a time too"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 16, 61, 10_000])
def test_a_body_split_anywhere_is_read_the_same(size: int) -> None:
    events = b"".join(map(event, answer_events(3, 4)))
    trailed = b"5;name=value\r\n: hi\n\r\n" + events + b"0\r\nTrailer: x\r\n\r\n"
    stream = STREAM + trailed

    async def go() -> Record:
        record = Record(0, 4, 3)
        reader = Reader(record, 0)
        exchange = Exchange(b"", Reply(), reader.take)
        for at in range(0, len(stream), size):
            exchange.data_received(stream[at : at + size])
        await exchange.done
        reader.close(1)
        return record

    record = asyncio.run(go())
    assert (record.prompt_tokens, record.output_tokens, len(record.chunks)) == (3, 4, 4)
    chunks = Chunks()
    bodies = [chunks.feed(trailed[at : at + size]) for at in range(0, len(trailed), size)]
    assert chunks.ended and b"".join(bodies).count(b"data: ") == 6 and b"\r" not in b"".join(bodies)


def test_pages_are_fetched_and_sent() -> None:
    async def echo(body: dict[str, Any], send: Send) -> None:
        await send(whole("201 Created", json.dumps(body).encode()))

    async def go() -> None:
        async with serving(echo) as (url, _):
            server = await Server.parse(f"{url}/v1/").found()
            assert (await http.get(server, "/v1/models")).json() == json.loads(MODELS)
            reply = await http.post(server, "/echo", {"a": [1]})
            assert (reply.status, reply.json()) == (201, {"a": [1]})

    asyncio.run(go())


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://x", "http://", "http://x:99999", "http://x?a=b"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ChairliftError, match="is not a URL"):
        Server.parse(url)


def test_a_missing_or_refusing_server_is_a_one_line_error() -> None:
    async def gone() -> None:
        async with serving(plain) as (url, _):
            pass
        await run_serve(LoadPlan(url, [Query([1], 1)]))

    with pytest.raises(ChairliftError, match=r"no server answers at .* \(connection refused\): start it"):
        asyncio.run(gone())

    async def odd(page: bytes) -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(page)
            writer.close()

        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            await run_serve(LoadPlan(f"http://127.0.0.1:{port}", [Query([1], 1)]))

    for page, message in (
        (whole("401 Unauthorized", b""), "rejects the API key"),
        (whole("200 OK", b'{"data": []}'), "lists no model"),
        (whole("200 OK", b"<html>"), "lists no model"),
        (b"", "closed before a reply"),
    ):
        with pytest.raises(ChairliftError, match=message):
            asyncio.run(odd(page))


def test_progress_is_reported() -> None:
    told: list[Progress] = []

    async def go() -> None:
        async with serving(plain) as (url, _):
            await run_serve(LoadPlan(url, [Query([1], 5)] * 3), told.append)

    asyncio.run(go())
    assert (told[-1].done, told[-1].total, told[-1].tokens) == (3, 3, 15)


def test_hundreds_of_streams_at_once_are_all_read() -> None:
    outcome, _ = ask(plain, [Query([1, 2], 20)] * 500)
    found = summarize(outcome)
    assert found["requests"]["ok"] == 500 and found["output_tokens"] == 10_000


def test_goodput_needs_every_target() -> None:
    record = Record(planned=1.0, requested_tokens=3, prompt_tokens=1, output_tokens=3, sent=1.0, end=1.3)
    record.chunks.extend([1.1, 1.2, 1.3])
    assert times(record) == pytest.approx({"ttft": 100, "tpot": 100, "gap": 100, "e2e": 300, "late": 0})
    assert is_good(record, read_targets(["ttft:101", "tpot:101", "e2e:301"]))
    for missed in ("ttft:99", "tpot:99", "e2e:299"):
        assert not is_good(record, read_targets(["ttft:1000", missed]))
    record.error = "dropped"
    assert not is_good(record, {})
    for wrong in ("ttft", "ttft:x", "ttft:0", "itl:5", ":5"):
        with pytest.raises(ChairliftError, match="not a goodput target"):
            read_targets([wrong])


async def command(url: str, *options: str) -> asyncio.subprocess.Process:
    arguments = ("-m", "chairlift", "bench", "serve", "--url", url, *options)
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=pipe, stderr=pipe)


def test_the_command_prints_tables_and_writes_a_file(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    options = ["--requests", "7", "--prompt-tokens", "4", "--output-tokens", "3", "--rate", "200", "--json", str(file)]

    async def go() -> tuple[int | None, str, str]:
        async with serving(plain) as (url, _):
            process = await command(url, *options, "--goodput", "ttft:60000", "--goodput", "e2e:60000")
            out, err = await asyncio.wait_for(process.communicate(), 60)
            return process.returncode, out.decode(), err.decode()

    code, out, err = asyncio.run(go())
    assert (code, err) == (0, "")
    for label in ("requests/s", "output tok/s", "TTFT", "TPOT", "ITL", "end to end", "peak concurrency", "(100.0%)"):
        assert label in out
    found = json.loads(file.read_text())
    assert found["requests"]["ok"] == 7 and found["output_tokens"] == 21
    assert [len(each["chunks"]) for each in found["records"]] == [3] * 7


def test_an_interrupted_run_shows_its_results_so_far() -> None:
    async def go() -> tuple[int | None, str]:
        answered_at = 0

        async def first_alone(body: dict[str, Any], send: Send) -> None:
            nonlocal answered_at
            if len(seen) > 1:
                await asyncio.sleep(60)
            await plain(body, send)
            answered_at = len(seen)

        async with serving(first_alone) as (url, seen):
            options = ("--requests", "9", "--rate", "5", "--arrivals", "constant", "--prompt-tokens", "4")
            process = await command(url, *options, "--output-tokens", "3")
            while not answered_at or len(seen) < answered_at + 2:  # then the client has read the first answer
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGINT)
            out, _ = await asyncio.wait_for(process.communicate(), 60)
            return process.returncode, out.decode()

    code, out = asyncio.run(go())
    assert code == 130 and "1 ok" in out and "unfinished" in out and "of 9 planned" in out
