"""`chairlift batch --on ray`: one file of requests over all replicas of a cluster."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Set
from pathlib import Path
from typing import Any

import msgspec

from chairlift.cluster.ray.connect import connected
from chairlift.cluster.ray.replicas import Replicas, names_of
from chairlift.cluster.ray.serve import RayPlan, host_of, make, room_for
from chairlift.core.errors import RequestError
from chairlift.gateway.asks import read_ask
from chairlift.gateway.exchange import Lost
from chairlift.gateway.pool import Pool
from chairlift.offline.batch import WrongModelError, check_model, check_whole, retry_failures, unanswered
from chairlift.offline.batch_output import BatchOutput, Report, Tally
from chairlift.serving import logs
from chairlift.serving.keys import Keyring, digest_of
from chairlift.serving.plan import Plan

_AHEAD = 2  # requests sent to a replica for each row of its batch, so that no row waits for this process
_REPLY = 64 << 20  # bytes of a reply
_LOSSES = 3  # replicas that may end under one request, or lose their engines: it may be what ends them
_FULL, _LOST = 429, (502, 503, 504)
_RETRY_SECONDS = 1.0


def run(plan: Plan, on: RayPlan, source: Path, target: Path, names: Set[str], report: Report) -> Tally:
    """Answer every line of `source` without an answer in `target`, on `on.most` replicas.

    With 0, there are as many replicas as the cluster has room for. A line may name the model by one of `names`.
    """
    logs.set_up(plan.log_format, plan.log_level)
    with connected() as address, BatchOutput(target, report) as output:
        retry_failures(source, output)
        count = on.most or room_for(plan, on)
        on = msgspec.structs.replace(on, least=count, most=count)
        asyncio.run(_run(plan, on, host_of(address), source, output, names))
        return output.tally


async def _run(plan: Plan, on: RayPlan, host: str | None, source: Path, output: BatchOutput, names: Set[str]) -> None:
    pool = Pool([], plan.routing, names=names_of(on.most))
    key = secrets.token_hex()  # nothing but this job may use its replicas, which listen on their nodes' addresses
    replicas = make(plan, on, pool, host, Keyring.read(None, {}, digest_of(key)))
    job, running = Job(pool, replicas, output, names, key), set[asyncio.Task[None]]()
    try:
        replicas.scale_to(on.most)
        await replicas.wait()
        with source.open("rb") as lines:
            for number, custom_id, url, body in unanswered(lines, output):
                while len(running) >= _AHEAD * sum(backend.max_sequences for backend in pool.working) and running:
                    running = await _settle(running)
                running.add(asyncio.create_task(job.answer(number, custom_id, url, body)))
        while running:
            running = await _settle(running)
    finally:
        for task in running:
            task.cancel()
        await replicas.close()
        await pool.close()


async def _settle(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Wait until a request has ended; return the others. An error ends the job."""
    done, rest = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return rest


class Job:
    """Sends lines to replicas, and writes their answers."""

    def __init__(self, pool: Pool, replicas: Replicas, output: BatchOutput, names: Set[str], key: str) -> None:
        self._pool, self._replicas, self._output, self._names = pool, replicas, output, names
        self._headers = ((b"content-type", b"application/json"), (b"authorization", f"Bearer {key}".encode()))

    async def answer(self, number: int, custom_id: str, url: str, body: dict[str, Any]) -> None:
        """Answer a line."""
        output = self._output
        try:
            check_model(body.get("model"), self._names)
            check_whole(body)
            raw = encoded(body)
        except WrongModelError as error:
            return output.refuse(number, custom_id, str(error), 404, "model_not_found")
        except RequestError as error:
            return output.refuse(number, custom_id, str(error))
        try:
            status, reply = await self._send(url, raw)
        except Lost as error:
            return output.fail(number, custom_id, str(error))
        if status == 200:
            return output.answer(custom_id, reply)
        message = message_of(reply)
        if status < 500 and message:
            return output.refuse(number, custom_id, message, status, reply["error"].get("code") or "invalid_request")
        return output.fail(number, custom_id, message or f"the replica answered with status {status}")

    async def _send(self, url: str, raw: bytes) -> tuple[int, Any]:
        """Send a request to one replica after the other until one answers; raise Lost if it ends them."""
        pool, ask, losses = self._pool, read_ask(raw, "", None).ask, 0
        tried: set[str] = set()
        while True:
            route = pool.router.route(ask, tried)
            if route is None:
                tried.clear()
                await asyncio.sleep(_RETRY_SECONDS)
                await self._replicas.wait()
                continue
            backend, exchange = pool.backends[route.name], None
            try:
                exchange = await backend.send("POST", url, self._headers, raw)
                found = await exchange.read_all(_REPLY)
                if not exchange.has_ended:
                    raise Lost(f"the reply has more than {_REPLY:,} bytes")
                reply = msgspec.json.decode(found)
                if exchange.status in _LOST:
                    raise Lost(f"{backend.name} answered with status {exchange.status}: {message_of(reply)}")
            except (Lost, msgspec.DecodeError) as error:
                losses += 1
                route.end("failed")
                pool.suspect(backend)
                if losses == _LOSSES:
                    raise Lost(
                        f"{losses} replicas were lost while they answered it, the last because {error}"
                    ) from None
                tried.add(route.name)
                continue
            else:
                route.end("finished" if exchange.status < 400 else "rejected")
            finally:
                route.end("aborted")  # the job was interrupted; otherwise it has ended already
                if exchange is not None:
                    backend.release(exchange)
            if exchange.status != _FULL:
                return exchange.status, reply
            tried.add(route.name)


def encoded(body: dict[str, Any]) -> bytes:
    """Return a body without its model as the line has it, so that the replica refuses what is wrong in it.

    >>> encoded({"model": "tiny", "prompt": "\\ud800", "temperature": float("nan")})
    b'{"prompt": "\\\\ud800", "temperature": NaN}'
    """
    try:
        return json.dumps({name: value for name, value in body.items() if name != "model"}).encode()
    except RecursionError:
        raise RequestError("the body is nested too deeply: send a flatter one") from None


def message_of(reply: Any) -> str:
    """Return the message of an error object; an empty one if there is none."""
    match reply:
        case {"error": {"message": str() as message}}:
            return message
    return ""
