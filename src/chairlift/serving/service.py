"""Service: the models and the state that all routes share; Call: one HTTP request, from its body to its reply."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from chairlift.apis.front import Front
from chairlift.openai.chunks import ChatChunks, Chunks, TextChunks
from chairlift.openai.options import Options, check_stream, read_options
from chairlift.openai.params import set_aside_unknown
from chairlift.serving.admission import Admitted, Refused
from chairlift.serving.backlog import Backlog
from chairlift.serving.body import read_object
from chairlift.serving.failures import Failure, invalid, unavailable
from chairlift.serving.families import Families
from chairlift.serving.generation import Answering, CallFields, EncodedPrompt
from chairlift.serving.keys import Keyring, Tenant
from chairlift.serving.messages import Hello
from chairlift.serving.pace import Pace
from chairlift.serving.page import Page
from chairlift.serving.pieces_response import PiecesResponse
from chairlift.serving.recording import Recording
from chairlift.serving.reply_jobs import Reply
from chairlift.serving.replying import EventStream, until_disconnected
from chairlift.serving.scores import ScoreBudget, count_scores, with_room
from chairlift.serving.sending import send_prompt, target_of
from chairlift.serving.served import ServedModel
from chairlift.serving.text_jobs import Job
from chairlift.serving.traces import Traces
from chairlift.text.outputs import RequestOutput

T = TypeVar("T")
_LARGE_BODY = 20_000  # bytes of JSON above which parsing runs in a thread, to keep the event loop free
_ITEMS = 400_000  # of all lists and objects in a body: enough for a very long prompt in token ids
_BODY_SECONDS = 60.0  # for a client to send its body
_BODIES = 256 << 20  # bytes of bodies in memory before admission, in all
CLIENT_DISCONNECTED = 499  # never sent: for logs and metrics


@dataclass(slots=True, eq=False)
class Service:
    """The models and the state that the routes of one HTTP process share."""

    models: dict[str, ServedModel]  # by name; the first serves requests that name none
    families: Families
    keyring: Keyring | None
    traces: Traces | None = None
    page: Page | None = None  # the live page, if it is served
    recording: Recording | None = None  # of the requests, if they are recorded
    timeout: float | None = None  # seconds, for requests without their own
    max_body: int = 8 << 20
    started: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False
    scores: ScoreBudget = field(default_factory=ScoreBudget)
    held_bytes: int = 0  # of bodies before admission
    pace: Pace = field(default_factory=Pace)  # of answers while no engine is running
    role: str = "both"  # for a router in front of it
    receives_at: str = ""  # where its engine receives KV blocks from other hosts
    cluster_key: bytes | None = None
    tells_load: bool = False

    @property
    def first(self) -> ServedModel:
        """The model of requests that name none."""
        return next(iter(self.models.values()))

    @property
    def trouble(self) -> str | None:
        """The reason why a model cannot be served now, or None."""
        for model in self.models.values():
            if (trouble := model.fleet.trouble) is not None:
                return trouble if len(self.models) == 1 else f"{model.name}: {trouble}"
        return None

    def find(self, name: object) -> ServedModel:
        """Return the model that a request names; a missing name means the first."""
        if name is not None and not isinstance(name, str):
            raise invalid(f"model is {name!r}: use a string", param="model")
        if not name:
            return self.first
        if name in self.models:
            return self.models[name]
        served = list(map(repr, self.models))
        use = f"{served[0]}, the model that is served" if len(served) == 1 else f"one of {', '.join(served)}"
        raise Failure(
            f"there is no model {name!r} here: use {use}", 404, "invalid_request_error", "model_not_found", "model"
        )

    def hello_of(self, model: ServedModel) -> Hello:
        """Return the limits of a model's engines; raise a Failure while draining or if no engine is running."""
        if self.is_draining:
            model.metrics.refused("draining")
            raise unavailable("the server is shutting down: try another, or again in a moment", 5.0)
        trouble, hello = model.fleet.trouble, model.fleet.hello
        if trouble is not None or hello is None:
            model.metrics.refused("engine_down")
            failure = unavailable(trouble or "the engine is not running", 2.0)
            failure.is_paced = True
            raise failure
        return hello


@dataclass(slots=True, eq=False)
class Call:
    """One HTTP request."""

    service: Service
    http: HttpRequest
    tenant: Tenant | None
    id: str
    model: ServedModel = field(init=False)
    body_bytes: int = 0
    ignored: list[str] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)  # for traces
    scores: int = 0  # log-probabilities held in the budget, until closed
    answering: Answering | None = None
    repeated: dict[str, Any] = field(default_factory=dict)  # fields of the body that the reply repeats
    _held: int = 0  # bytes of its body that are counted in held_bytes

    def __post_init__(self) -> None:
        self.model = self.service.first

    def choose(self, name: object) -> Hello:
        """Choose the model that the request names and return the limits of its engines."""
        self.model = self.service.find(name)
        return self.service.hello_of(self.model)

    @property
    def backlog(self) -> Backlog:
        """The backlog of its connection."""
        connection = self.http.scope.get("state", {}).get("connection")
        return Backlog() if connection is None else connection.backlog

    def close(self) -> None:
        """Release its bytes, log-probabilities and what admission counts for it."""
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
        pieces = await self.model.reader.do(job, size, self.attended)
        assert isinstance(pieces, list)
        return PiecesResponse(pieces)

    def _hold(self, size: int) -> None:
        self._held += size
        self.service.held_bytes += size

    # ---- generating

    async def generate(self, front: Front) -> Response:
        """Serve a request of an API that generates, streamed or not."""
        options, encoded, session = await self._read(front)  # the body is freed before the request waits
        if (target := target_of(self.http.headers, self.service.cluster_key)) is not None:
            return await self._send_prompts(front, options, encoded, target)
        timeout = options.timeout if options.timeout is not None else self.service.timeout
        call = self._call_fields(options, "chat" if front.is_chat else "completions", session)
        model, backlog = self.model, self.backlog
        tokenizer = model.reader.tokenizer
        answering = Answering(
            model.fleet, model.metrics, tokenizer, call, timeout, options.stream, backlog, self.service.recording
        )
        self.answering = answering
        answering.start(encoded, self._admit)
        self._hold(-self._held)  # from here on, admission counts its bytes
        self.outputs = answering.outputs
        if answering.failure is not None:  # the engine has just ended: even a stream can still get an error status
            raise answering.failure
        if options.stream:
            chunks = self._chunks(answering, options, front)
            return EventStream(answering, chunks, options, front, self.id, self.repeated)
        return await self._whole(answering, options, front)

    async def _send_prompts(
        self, front: Front, options: Options, encoded: list[EncodedPrompt], target: str
    ) -> Response:
        """Compute the prompts for a server that decodes them; the reply says whether it has their blocks."""
        call = self._call_fields(options, "chat" if front.is_chat else "completions", "")
        admitted = self._admit(encoded)
        try:
            sent = [await self.attended(send_prompt(self.model.fleet, each, call, target)) for each in encoded]
        finally:
            for each in admitted:
                each.release(time.monotonic())
        return Response(b'{"sent": %s}' % str(all(sent)).lower().encode(), media_type="application/json")

    async def _read(self, front: Front) -> tuple[Options, list[EncodedPrompt], str]:
        """Read the body: options, prompts ready for the engine, and the session."""
        service, chat = self.service, front.is_chat
        raw, self.repeated = await self.read_body(front.read)
        hello = self.choose(raw.get("model"))
        body, self.ignored = set_aside_unknown(raw, chat=chat)
        options = read_options(body)
        self.id = options.request_id or self.id
        self._check_priority(options)
        reader = self.model.reader
        encoded = await (reader.chat if chat else reader.completion)(body, hello, self.attended)
        if options.stream:
            check_stream(encoded[0].params)
        else:
            encoded = [with_room(each, hello.max_length) for each in encoded]
        scores = count_scores(encoded, options, hello.max_length, chat=chat)
        service.scores.hold(scores)
        self.scores = scores
        return options, encoded, session_of(raw, self.http.headers.get("x-session-id"))

    def _call_fields(self, options: Options, endpoint: str, session: str) -> CallFields:
        tenant = self.tenant or Tenant("")
        ttft = tenant.ttft if options.ttft is None else options.ttft
        salt = salt_of(tenant.name, options.cache_salt)
        return CallFields(self.id, endpoint, tenant.name, tenant.weight, options.priority, ttft, salt, session)

    def _admit(self, encoded: list[EncodedPrompt]) -> list[Admitted]:
        model, prompts = self.model, [len(each.prompt) for each in encoded]
        outputs = sum(each.params.width * (each.params.max_tokens or 0) for each in encoded)
        try:
            admitted = model.admission.admit(
                self.tenant,
                sum(prompts),
                outputs,
                time.monotonic(),
                requests=len(encoded),
                body_bytes=self.body_bytes,
            )
            return admitted.split(prompts)
        except Refused as error:
            refusal = error.refusal
            model.metrics.refused(refusal.reason)
            kind = "rate_limit_error" if refusal.status == 429 else "invalid_request_error"
            raise Failure(
                refusal.message, refusal.status, kind, refusal.reason, retry_after=refusal.retry_after
            ) from None

    def _shows_ids(self, options: Options) -> bool:
        """Whether the reply has token ids: on request, and always if there is no tokenizer."""
        return options.return_token_ids or self.model.reader.tokenizer is None

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
            self.model.name,
            front.is_chat,
            answering.generations[0].encoded.params.logprobs,
            [generation.part() for generation in answering.generations],
            self._shows_ids(options),
            options.echo,
            options.no_output,
            answering.generations[0].encoded.form,
            answering.generations[0].encoded.thinking,
            front.name,
            self.repeated,
        )
        return await self.written(reply, reply.weight)

    def _chunks(self, answering: Answering, options: Options, front: Front) -> Chunks:
        prompts = [output for output in answering.outputs for _ in output.outputs]
        common = (front.prefix + self.id, self.model.name, self.model.reader.tokenizer, prompts)
        shown = {"usage": options.include_usage, "token_ids": self._shows_ids(options)}
        if front.is_chat:
            encoded = answering.generations[0].encoded
            return ChatChunks(*common, top=encoded.params.logprobs or 0, form=encoded.form, **shown)
        return TextChunks(*common, echo=options.echo, no_output=options.no_output, **shown)


def salt_of(tenant: str, cache_salt: str | None) -> str:
    """Return the salt of a request's prefixes. A tenant's name has no slash, so salts of two tenants always differ.

    >>> salt_of("alice", "mine"), salt_of("", None)
    ('alice/mine', '')
    """
    return f"{tenant}/{cache_salt or ''}" if tenant or cache_salt else ""


def session_of(body: dict[str, Any], header: str | None) -> str:
    """Return the session of a request, for routing: the header X-Session-Id, prompt_cache_key or user."""
    given = (header, body.get("prompt_cache_key"), body.get("user"))
    return next((text[:256] for text in given if isinstance(text, str) and text), "")
