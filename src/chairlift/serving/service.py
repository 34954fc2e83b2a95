"""Service: the state that all routes share; Call: one HTTP request, from its body to its reply."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from chairlift.apis.front import Front
from chairlift.openai.chunks import ChatChunks, Chunks, TextChunks
from chairlift.openai.options import Options, check_stream, read_options
from chairlift.openai.params import set_aside_unknown
from chairlift.openai.replies import usage
from chairlift.serving.admission import Admission, Refused, Ticket
from chairlift.serving.asking import Reader
from chairlift.serving.backlog import Backlog
from chairlift.serving.body import read_object
from chairlift.serving.engine_client import EngineClient
from chairlift.serving.failures import Failure, invalid, unavailable
from chairlift.serving.generation import Answering, Asked, Terms
from chairlift.serving.keys import Keyring, Tenant
from chairlift.serving.messages import Hello
from chairlift.serving.metrics import Metrics
from chairlift.serving.pieces_response import PiecesResponse, pieces_of
from chairlift.serving.reply_jobs import Reply
from chairlift.serving.scores import ScoreBudget, count_scores, with_room
from chairlift.serving.text_jobs import Job
from chairlift.serving.traces import Traces
from chairlift.text.outputs import RequestOutput

log = logging.getLogger("chairlift")
Message = MutableMapping[str, Any]
T = TypeVar("T")
Send = Callable[[Message], Awaitable[None]]
_LARGE_BODY = 20_000  # bytes of JSON above which parsing runs in a thread, to keep the event loop free
_ITEMS = 400_000  # of all lists and objects in a body: enough for a very long prompt in token ids
_BODY_SECONDS = 60.0  # for a client to send its body
_BODIES = 256 << 20  # bytes of bodies in memory before admission, in all
CLIENT_DISCONNECTED = 499  # never sent: for logs and metrics


@dataclass(slots=True, eq=False)
class Service:
    """The state that the routes of one HTTP process share."""

    model: str
    client: EngineClient
    reader: Reader
    metrics: Metrics
    admission: Admission
    keyring: Keyring | None
    traces: Traces | None = None
    timeout: float | None = None  # seconds, for requests without their own
    max_body: int = 8 << 20
    started: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False
    scores: ScoreBudget = field(default_factory=ScoreBudget)
    held_bytes: int = 0  # of bodies before admission

    @property
    def hello(self) -> Hello:
        """The engine's limits; raise a Failure while draining or if the engine is not running."""
        if self.is_draining:
            self.metrics.refused("draining")
            raise unavailable("the server is shutting down: try another, or again in a moment", 5.0)
        if (trouble := self.client.trouble) is not None:
            self.metrics.refused("engine_down")
            raise unavailable(trouble, 2.0)
        assert self.client.hello is not None
        return self.client.hello


@dataclass(slots=True, eq=False)
class Call:
    """One HTTP request."""

    service: Service
    http: HttpRequest
    tenant: Tenant | None
    id: str
    body_bytes: int = 0
    ignored: list[str] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)  # for traces
    scores: int = 0  # log-probabilities held in the budget, until closed
    answering: Answering | None = None
    repeated: dict[str, Any] = field(default_factory=dict)  # fields of the body that the reply repeats
    _held: int = 0  # bytes of its body that are counted in held_bytes

    @property
    def backlog(self) -> Backlog:
        """The backlog of its connection."""
        connection = self.http.scope.get("state", {}).get("connection")
        return Backlog() if connection is None else connection.backlog

    def close(self) -> None:
        """Release its bytes, log-probabilities and tickets."""
        self._hold(-self._held)
        self.service.scores.release(self.scores)
        self.scores = 0
        if self.answering is not None:
            self.answering.close()

    async def body(self) -> dict[str, Any]:
        """Receive and parse the JSON body, within bounds."""
        return await self.read_body(lambda body: body)

    async def read_body(self, read: Callable[[dict[str, Any]], T]) -> T:
        """Receive and parse the JSON body, and return what `read` makes of it; a large one in a thread."""
        most = self.service.max_body
        too_large = invalid(f"the body is larger than {most:,} bytes: send less", status=413, code="body_too_large")
        declared = self.http.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > most:
            raise too_large
        raw = bytearray()
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for part in self.http.stream():
                    raw += part
                    self._hold(len(part))
                    if len(raw) > most:
                        raise too_large
                    if self.service.held_bytes > _BODIES:
                        message = f"the server holds {self.service.held_bytes:,} bytes of bodies: try again in 1 s"
                        raise Failure(message, 429, "rate_limit_error", "too_many_bodies", retry_after=1.0)
        except TimeoutError:
            raise invalid(f"the body did not arrive within {_BODY_SECONDS:.0f} s", status=408, code="timeout") from None
        self.body_bytes = len(raw)

        def parse() -> T:
            return read(read_object(bytes(raw), max_items=_ITEMS))

        return parse() if len(raw) <= _LARGE_BODY else await asyncio.to_thread(parse)

    async def attended(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work; cancel it if the client disconnects."""
        task = asyncio.create_task(work)
        disconnect = asyncio.create_task(until_disconnected(self.http.receive))
        try:
            await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnect
            return await task
        finally:
            task.cancel()
            disconnect.cancel()

    async def written(self, job: Job, size: int) -> Response:
        """Return the reply that a job writes."""
        pieces = await self.service.reader.do(job, size, self.attended)
        assert isinstance(pieces, list)
        return PiecesResponse(pieces)

    def _hold(self, size: int) -> None:
        self._held += size
        self.service.held_bytes += size

    # ---- generating

    async def generate(self, front: Front) -> Response:
        """Serve a request of an API that generates, streamed or not."""
        service = self.service
        options, asked = await self._read(front)  # the body is freed before the request waits
        timeout = options.timeout if options.timeout is not None else service.timeout
        terms = self._terms(options, "chat" if front.is_chat else "completions")
        tokenizer, backlog = service.reader.tokenizer, self.backlog
        answering = Answering(service.client, service.metrics, tokenizer, terms, timeout, options.stream, backlog)
        self.answering = answering
        answering.start(asked, self._admit)
        self._hold(-self._held)  # from here on, admission counts its bytes
        self.outputs = answering.outputs
        if answering.failure is not None:  # the engine has just ended: even a stream can still get an error status
            raise answering.failure
        if options.stream:
            return EventStream(answering, self._chunks(answering, options, front), options, self, front)
        return await self._whole(answering, options, front)

    async def _read(self, front: Front) -> tuple[Options, list[Asked]]:
        """Read the body: options, and prompts ready for the engine."""
        service, chat = self.service, front.is_chat
        raw, self.repeated = await self.read_body(front.read)
        hello = service.hello
        body, self.ignored = set_aside_unknown(raw, chat=chat)
        check_model(body.get("model"), service.model)
        options = read_options(body)
        self.id = options.request_id or self.id
        self._check_priority(options)
        asked = await (service.reader.chat if chat else service.reader.completion)(body, hello, self.attended)
        if options.stream:
            check_stream(asked[0].params)
        else:
            asked = [with_room(each, hello.max_length) for each in asked]
        scores = count_scores(asked, options, hello.max_length, chat=chat)
        service.scores.hold(scores)
        self.scores = scores
        return options, asked

    def _terms(self, options: Options, endpoint: str) -> Terms:
        tenant = self.tenant or Tenant("")
        ttft = tenant.ttft if options.ttft is None else options.ttft
        salt = salt_of(tenant.name, options.cache_salt)
        return Terms(self.id, endpoint, tenant.name, tenant.weight, options.priority, ttft, salt)

    def _admit(self, asked: list[Asked]) -> list[Ticket]:
        service, prompts = self.service, [len(each.prompt) for each in asked]
        outputs = sum(each.params.width * (each.params.max_tokens or 0) for each in asked)
        try:
            ticket = service.admission.admit(
                self.tenant,
                sum(prompts),
                outputs,
                time.monotonic(),
                requests=len(asked),
                body_bytes=self.body_bytes,
            )
            return ticket.split(prompts)
        except Refused as error:
            refusal = error.refusal
            service.metrics.refused(refusal.reason)
            kind = "rate_limit_error" if refusal.status == 429 else "invalid_request_error"
            raise Failure(
                refusal.message, refusal.status, kind, refusal.reason, retry_after=refusal.retry_after
            ) from None

    def _shows_ids(self, options: Options) -> bool:
        """Whether the reply has token ids: on request, and always if there is no tokenizer."""
        return options.return_token_ids or self.service.reader.tokenizer is None

    def _check_priority(self, options: Options) -> None:
        most = None if self.tenant is None else self.tenant.max_priority
        if most is not None and options.priority > most:
            raise Failure(
                f"priority is {options.priority}, and this key may use up to {most}",
                403,
                "permission_error",
                "priority_too_high",
                "priority",
            )

    async def _whole(self, answering: Answering, options: Options, front: Front) -> Response:
        """Wait for all answers and return the reply; abort if the client disconnects."""
        try:
            await self.attended(answering.finish())
        finally:
            answering.abort()
        reply = Reply(
            front.prefix + self.id,
            self.service.model,
            front.is_chat,
            answering.generations[0].asked.params.logprobs,
            [generation.part() for generation in answering.generations],
            self._shows_ids(options),
            options.echo,
            options.no_output,
            answering.generations[0].asked.form,
            answering.generations[0].asked.thinking,
            front.name,
            self.repeated,
        )
        return await self.written(reply, reply.weight)

    def _chunks(self, answering: Answering, options: Options, front: Front) -> Chunks:
        prompts = [output for output in answering.outputs for _ in output.outputs]
        common = (front.prefix + self.id, self.service.model, self.service.reader.tokenizer, prompts)
        shown = {"usage": options.include_usage, "token_ids": self._shows_ids(options)}
        if front.is_chat:
            asked = answering.generations[0].asked
            return ChatChunks(*common, top=asked.params.logprobs or 0, form=asked.form, **shown)
        return TextChunks(*common, echo=options.echo, no_output=options.no_output, **shown)


class EventStream(Response):
    """A streamed reply: it ends with the last answer, or when the client disconnects."""

    def __init__(self, answering: Answering, chunks: Chunks, options: Options, call: Call, front: Front) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._answering, self._chunks, self._options, self._id = answering, chunks, options, call.id
        self._writer = front.events(chunks.common, call.repeated, self._used)

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        """Send the stream."""
        disconnect = asyncio.create_task(until_disconnected(receive))
        writing = asyncio.create_task(self._write(send))
        try:
            await asyncio.wait({disconnect, writing}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                await writing
        finally:
            for task in (disconnect, writing):
                task.cancel()
            self._answering.close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events():
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Failure as failure:
            log.warning("a request failed after its stream began: %s", failure, extra={"request_id": self._id})
            await send(
                {
                    "type": "http.response.body",
                    "body": self._writer.fail(failure.error, failure.status),
                    "more_body": True,
                }
            )
        await until_read(send)
        self._answering.release()
        await send({"type": "http.response.body", "body": self._writer.last, "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        async for pieces in self._answering.pieces():
            found = [chunk for piece in pieces for chunk in self._chunks.of(piece)]
            if self._options.continuous_usage:
                used = self._used()
                found = [{**chunk, "usage": used} for chunk in found]
            if found:
                yield self._writer.write(found)
        if self._options.include_usage:
            yield self._writer.write([self._chunks.usage(self._used())])

    def _used(self) -> dict[str, Any]:
        """Return the usage so far: tokens of all prompts and answers."""
        used = usage(self._answering.outputs)
        if self._options.no_output:
            used |= {"completion_tokens": 0, "total_tokens": used["prompt_tokens"]}
        return used


def salt_of(tenant: str, cache_salt: str | None) -> str:
    """Return the salt of a request's prefixes. A tenant's name has no slash, so salts of two tenants always differ.

    >>> salt_of("alice", "mine"), salt_of("", None)
    ('alice/mine', '')
    """
    return f"{tenant}/{cache_salt or ''}" if tenant or cache_salt else ""


async def until_disconnected(receive: Callable[[], Awaitable[Message]]) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_read(send: Send) -> None:
    """Wait until the client has read all but the socket's buffer: sending an empty part waits for that."""
    await send({"type": "http.response.body", "body": b"", "more_body": True})


async def send_reply(call: Call, response: Response, send: Send) -> None:
    """Send a reply in pieces; the call is closed when all but the last have been read."""
    pieces, backlog = pieces_of(response), call.backlog
    backlog.size += sum(map(len, pieces))
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    while len(pieces) > 1:
        await send({"type": "http.response.body", "body": pieces[0], "more_body": True})
        backlog.size -= len(pieces.popleft())
        await until_read(send)
    last = pieces.popleft() if pieces else b""
    backlog.size -= len(last)
    call.close()
    await send({"type": "http.response.body", "body": last, "more_body": False})


def check_model(asked: object, served: str) -> None:
    """Reject a request for another model; a missing name means the served model."""
    if asked is not None and not isinstance(asked, str):
        raise invalid(f"model is {asked!r}: use a string", param="model")
    if asked not in (None, "", served):
        raise Failure(
            f"there is no model {asked!r} here: use {served!r}, the model that is served",
            404,
            "invalid_request_error",
            "model_not_found",
            "model",
        )


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response, encoded by msgspec."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")
