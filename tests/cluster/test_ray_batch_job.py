"""One line of `chairlift batch --on ray`: what is sent to a replica, and what becomes of its answers; no cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'chairlift[ray]'")

from chairlift.cluster.ray import batch
from chairlift.cluster.ray.replicas import Replicas
from chairlift.gateway.pool import Pool
from chairlift.offline.batch_output import BatchOutput

pytestmark = pytest.mark.long  # importing ray takes seconds
COMPLETION = "/v1/completions"
ANSWER = {"choices": [], "usage": {"completion_tokens": 1}}


class Working(Replicas):
    """Replicas of which some always work."""

    def __init__(self) -> None:
        pass

    async def wait(self) -> None:
        """Wait for none."""


@asynccontextmanager
async def servers(*statuses: list[int]) -> AsyncIterator[tuple[Pool, list[bytes]]]:
    """Servers that answer with these statuses one after the other, the last for ever; and the bodies that they got."""
    received: list[bytes] = []
    listening = []
    for own in statuses:

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, own: list[int] = own) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            status, content = 200, ANSWER
            body = await reader.readexactly(size)
            if b" /ready " not in head:
                received.append(body)
                status = own.pop(0) if len(own) > 1 else own[0]
                content = ANSWER if status == 200 else {"error": {"message": "an engine has ended", "code": "odd"}}
            raw = json.dumps(content).encode()
            writer.write(b"HTTP/1.1 %d Odd\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (status, len(raw)))
            writer.write(raw)
            writer.close()

        listening.append(await asyncio.start_server(serve, "127.0.0.1", 0))
    pool = Pool([f"http://127.0.0.1:{each.sockets[0].getsockname()[1]}" for each in listening], "round-robin")
    await pool.open()
    yield pool, received
    await pool.close()
    for each in listening:
        each.close()


def answered(body: dict[str, Any], folder: Path, *statuses: list[int]) -> tuple[dict[str, Any], list[bytes]]:
    """The output line of a request, and what the servers were sent."""

    async def run() -> list[bytes]:
        async with servers(*statuses) as (pool, received), asyncio.timeout(30):
            with BatchOutput(folder / "out.jsonl", lambda _: None) as output:
                await batch.Job(pool, Working(), output, {"tiny"}, "key").answer(1, "a", COMPLETION, body)
            assert pool.live == 0
            return received

    received = asyncio.run(run())
    [line] = (folder / "out.jsonl").read_text().splitlines()
    return json.loads(line), received


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_RETRY_SECONDS", 0.01)


def test_a_request_that_ends_every_engine_fails_after_the_third(tmp_path: Path) -> None:
    found, received = answered({"prompt": "Hi"}, tmp_path, [503], [503])
    assert found["error"]["code"] == "server_error" and "an engine has ended" in found["error"]["message"]
    assert len(received) == 3


def test_a_request_waits_for_a_full_replica_and_survives_the_end_of_two_engines(tmp_path: Path) -> None:
    found, received = answered({"prompt": "Hi"}, tmp_path, [503, 429, 429, 429, 503, 429, 200])
    assert found["error"] is None and len(received) == 7


def test_what_no_replica_can_read_ends_no_job_and_is_not_made_readable(tmp_path: Path) -> None:
    line = rb'{"prompt": "\ud800", "temperature": NaN, "seed": 1e999, "n": ' + b"9" * 40 + b"}"
    body = json.loads(line)
    found, received = answered(body, tmp_path, [200])
    assert found["error"] is None and json.loads(received[0]).keys() == body.keys()
    assert b"null" not in received[0], "NaN stays what it is: a server refuses it"

    for _ in range(50_000):  # deeper than any line that can be read
        body = {"prompt": body}
    (tmp_path / "out.jsonl").unlink()
    found, received = answered(body, tmp_path, [200])
    assert found["error"]["code"] == "invalid_request" and not received
