"""Forward: one request on its way to a server and its reply on the way back.

Until the reply's first byte the request can be sent to another server; nothing of it has reached the client. A
server's queue may be full, its engine may be down, or the server itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from chairlift.apis.front import Front, named_events, sse
from chairlift.gateway.asks import Read
from chairlift.gateway.backend import Backend
from chairlift.gateway.exchange import Exchange, Headers, Lost
from chairlift.gateway.pool import Pool
from chairlift.routing.router import End, Route
from chairlift.serving.admission import Admitted
from chairlift.serving.failures import Failure, unavailable
from chairlift.serving.replying import until_disconnected
from chairlift.serving.sending import PROOF, SEND_TO, proof_of

log = logging.getLogger("chairlift")

# Servers that may be lost under one request: a request that ends servers must not end them all.
_LOSSES = 3
_BUSY = (429, 502, 503, 504)  # another server may take the request
_ERROR = 64 << 10  # bytes of an error's body
_EVENT = 1 << 20  # bytes of an event that are held back until it is complete
_BYTES_A_TOKEN = 4  # of a reply that is not streamed
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")  # servers other than ours may end lines with a carriage return
# A stream of responses has two events before its first text or error: they may repeat 64 KiB of the request each.
_CREATED, _BEFORE_TEXT = b"event: response.created", 2
# How a stream begins that has an error as its first event: of chats and completions, messages, and responses.
_FAILED_STREAMS = (b'data: {"error"', b"event: error", _CREATED)
# Paths with prompts that another server may compute; other paths, such as /tokenize, only count or split them.
_GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_UNAVAILABLE = (b"service_unavailable", b"overloaded_error")
_NO_MODEL = (b'"model_not_found"', b'"not_found_error"')
# Headers of one connection, not of the request; and those that are written again.
_OWN = {
    *(b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"expect"),
    *(b"proxy-connection", b"proxy-authorization", b"proxy-authenticate", b"host", b"date", b"server"),
}


@dataclass(slots=True)
class Answer:
    """A reply with the first bytes of its body, with which text or an error begins, or an error with its whole body."""

    backend: Backend
    route: Route
    exchange: Exchange
    first: bytes
    is_whole: bool = False  # whether `first` is the whole body

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.exchange.status

    def header(self, name: bytes) -> bytes:
        """Return a header's value, or b""."""
        return next((value for each, value in self.exchange.headers if each.lower() == name), b"")

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers for the client."""
        found = passed_on(self.exchange.headers)
        if not self.is_whole:
            return found
        length = (b"content-length", b"%d" % len(self.first))
        return [*(pair for pair in found if pair[0].lower() != b"content-length"), length]

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of events."""
        return self.header(b"content-type").startswith(b"text/event-stream")

    @property
    def is_open(self) -> bool:
        """Whether no text or error has arrived yet, in a stream with first events that only mark its beginning."""
        first = self.first
        if not self.is_stream or first[: len(_CREATED)] != _CREATED[: len(first)] or len(first) >= _EVENT:
            return False
        return sum(map(first.count, _EVENT_ENDS)) <= _BEFORE_TEXT

    @property
    def retry_after(self) -> float:
        """Seconds of the server's Retry-After header."""
        value = self.header(b"retry-after")
        return float(value) if value.isdigit() else 1.0


class Body:
    """A request's body, counted while it is in memory: until its reply begins."""

    def __init__(self, count: Callable[[int], None]) -> None:
        self.raw = b""
        self._count = count
        self._held = 0

    def hold(self, size: int) -> None:
        """Count bytes that have arrived."""
        self._held += size
        self._count(size)

    def free(self) -> None:
        """Free the bytes; a second call does nothing."""
        self.raw = b""
        self.hold(-self._held)


class Forward:
    """Sends one request on, and its reply back."""

    def __init__(self, pool: Pool, http: HttpRequest, front: Front, read: Read, admitted: Admitted, body: Body) -> None:
        self._pool, self._http, self._front, self._read, self._admitted = pool, http, front, read, admitted
        self._body = body
        self._answer: Answer | None = None
        path = http.scope.get("raw_path") or http.url.path.encode()
        query = http.scope["query_string"]
        self._target = (path.partition(b"?")[0] + (b"?" + query if query else b"")).decode("latin-1")
        self._headers = passed_on(http.headers.raw, {b"content-length", SEND_TO.encode(), PROOF.encode()})
        self._events = 0  # of the reply's stream that were passed on
        self._is_in_event = False  # whether the client has the beginning of an event alone

    async def run(self, send: Any) -> int:
        """Send the request and pass the reply on; return its status."""
        disconnect = asyncio.create_task(until_disconnected(self._http.receive))
        working = asyncio.create_task(self._work(send))
        try:
            await asyncio.wait({disconnect, working}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientDisconnect
            return await working
        finally:
            for task in (disconnect, working):
                task.cancel()
            if not working.done():
                await asyncio.wait({working})
            if (answer := self._answer) is not None:  # else it has ended
                answer.route.end("aborted")
                answer.backend.release(answer.exchange)

    async def _work(self, send: Any) -> int:
        answer = await self._find()
        self._body.free()
        self._admitted.started(time.monotonic())
        answer.route.started()
        await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers()})
        try:
            await self._pass_on(answer, send)
            answer.route.end("finished" if answer.status < 400 else "rejected")
        except Lost as error:
            answer.route.end("failed")
            log.warning("%s was lost in the middle of a reply: %s", answer.backend.name, error)
            await self._break_off(answer, send)
        answer.backend.release(answer.exchange)
        self._answer = None
        return answer.status

    # ---- until the first byte

    async def _find(self) -> Answer:
        """Send the request to one server after the other until one replies; raise a Failure if none does."""
        pool, model = self._pool, self._read.model
        tried: list[str] = []
        busy: list[Answer] = []
        lost: list[str] = []
        while len(lost) < _LOSSES:
            route = pool.pools.decoding(self._read.ask, pool.router, {*tried, *pool.lacking(model)})
            if route is None:
                break
            if tried:
                pool.moved[tried[-1]] += 1
            tried.append(route.name)
            backend = pool.backends[route.name]
            try:
                await self._prefill(backend, route)
                answer = await self._attempt(backend, route)
            except Lost as error:
                route.end("failed")
                lost.append(f"{backend.name}: {error}")
                pool.suspect(backend)
                continue
            except BaseException:  # the client has disconnected, also while another server computed its prompt
                route.end("aborted")
                raise
            if not self._is_refusal(answer):
                self._answer = answer
                return answer
            route.end("rejected")
            backend.release(answer.exchange)
            busy.append(answer)
        return self._refuse(busy, lost)

    async def _prefill(self, backend: Backend, decoding: Route) -> None:
        """Let another server compute the prompt and send its KV to the one that decodes it, if that is of use.

        Whatever comes of it, the request can go on: the server that decodes it computes what it lacks.
        """
        pool, address = self._pool, backend.receives_at
        if pool.cluster_key is None or not address or self._http.scope["path"] not in _GENERATING:
            return
        lacking = {*pool.lacking(self._read.model)}
        route = pool.pools.prefilling(self._read.ask, pool.router, decoding, lacking)
        if route is None:
            return
        other, exchange = pool.backends[route.name], None
        how: End = "aborted"
        headers = [(SEND_TO.encode(), address.encode()), (PROOF.encode(), proof_of(pool.cluster_key, address).encode())]
        try:
            exchange = await other.send(self._http.method, self._target, [*self._headers, *headers], self._body.raw)
            await exchange.read_all(_ERROR)
            how = "finished" if exchange.status < 400 else "rejected"
        except Lost as error:
            how = "failed"
            log.warning("%s was lost while it computed a prompt: %s", other.name, error)
            pool.suspect(other)
        finally:
            if exchange is not None:
                other.release(exchange)
            route.end(how)

    async def _attempt(self, backend: Backend, route: Route) -> Answer:
        exchange = None
        try:
            exchange = await backend.send(self._http.method, self._target, self._headers, self._body.raw)
            first = await (exchange.read_all(_ERROR) if exchange.status >= 400 else exchange.read())
            answer = Answer(backend, route, exchange, first)
            while answer.is_open and (part := await exchange.read()):
                answer.first += part
        except BaseException:
            if exchange is not None:
                backend.release(exchange)
            raise
        return answer

    def _is_refusal(self, answer: Answer) -> bool:
        """Whether another server may answer better."""
        if answer.status == 404 and (_has(_NO_MODEL, answer.first) or self._http.method == "GET"):
            if self._read.model:
                self._pool.lacks(self._read.model, answer.backend.name)
            return True
        return answer.status in _BUSY or self._is_failed_stream(answer)

    def _is_failed_stream(self, answer: Answer) -> bool:
        """Whether a stream has an error and no text: its engine ended before the first token."""
        first = answer.first
        if not answer.is_stream or not first.startswith(_FAILED_STREAMS) or not _has(_UNAVAILABLE, first):
            return False
        return b"event: response.created" not in first or b"\nevent: error" in first

    def _refuse(self, busy: list[Answer], lost: list[str]) -> Answer:
        """Return the reply that says most: the soonest retry of full servers, or the last refusal."""
        full = [answer for answer in busy if answer.status == 429]
        if full:
            chosen = min(full, key=lambda answer: answer.retry_after)
        elif busy:
            chosen = busy[-1]
        else:
            reason = self._pool.trouble or "; ".join(lost) or "no server takes requests"
            raise unavailable(f"no server can answer: {reason}", 1.0)
        chosen.is_whole = True
        return chosen

    # ---- from the first byte on

    async def _pass_on(self, answer: Answer, send: Any) -> None:
        """Pass the body on as the client reads it; of a stream, only whole events."""
        part, rest = answer.first, b""
        while part:
            if answer.is_stream:
                part, rest = whole_events(rest + part)
            if part:
                events = sum(map(part.count, _EVENT_ENDS))
                self._events += events
                self._is_in_event = not part.endswith(_EVENT_ENDS)
                self._admitted.count(events if answer.is_stream else len(part) // _BYTES_A_TOKEN)
                await send({"type": "http.response.body", "body": part, "more_body": True})
            part = b"" if answer.is_whole else await answer.exchange.read()
        await send({"type": "http.response.body", "body": rest, "more_body": False})

    async def _break_off(self, answer: Answer, send: Any) -> None:
        """End a reply that cannot be completed: a stream with an error event, any other by closing the connection."""
        if not answer.is_stream:
            connection = self._http.scope.get("state", {}).get("connection")
            if connection is not None:
                connection.wire.abort()
            return
        failure = unavailable("the server ended in the middle of the answer")
        events = b"\n\n" * self._is_in_event + error_events(self._front, failure, self._events)
        await send({"type": "http.response.body", "body": events, "more_body": False})


def passed_on(headers: Headers, more: Collection[bytes] = ()) -> list[tuple[bytes, bytes]]:
    """Return the headers for the next hop, without those of this connection, which its own header names, and `more`."""
    named = b",".join(value for name, value in headers if name.lower() == b"connection")
    dropped = {*_OWN, *more, *(each.strip().lower() for each in named.split(b","))}
    return [pair for pair in headers if pair[0].lower() not in dropped]


def _has(words: Iterable[bytes], text: bytes) -> bool:
    return any(word in text for word in words)


def whole_events(data: bytes) -> tuple[bytes, bytes]:
    """Split into whole events and the beginning of the next; a very long event is not held back.

    >>> whole_events(b"data: 1\\n\\ndata: 2")
    (b'data: 1\\n\\n', b'data: 2')
    """
    end = max((data.rfind(line) + len(line) for line in _EVENT_ENDS if line in data), default=0)
    return (data[:end], data[end:]) if len(data) - end < _EVENT else (data, b"")


def error_events(front: Front, failure: Failure, number: int) -> bytes:
    """Return the last events of a stream that failed after `number` events, in the shape of its API."""
    error = failure.error
    if front.name == "messages":
        return named_events([{"type": "error", **front.error(error, failure.status, "")}])
    if front.name == "responses":
        shown = {name: error[name] for name in ("code", "message", "param")}
        return named_events([{"type": "error", **shown, "sequence_number": number}])
    return sse({"error": error}) + b"data: [DONE]\n\n"
