"""Serving under load: requests leave for an OpenAI-compatible server when they are planned to, answered or not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import resource
import ssl
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from chairlift.bench import http
from chairlift.bench.http import Reply, ReplyError, Server, message_of, reason_of
from chairlift.core.errors import ChairliftError
from chairlift.traffic.query import VOCABULARY, Query

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
REFUSED = 429
TELL_EVERY = 0.2  # seconds between two looks at the progress
REACH_TIMEOUT = 30.0

# An event that does more than bring tokens: it ends or starts the answer, counts its tokens, or is an error.
TELLING = re.compile(
    rb'"(?:finish_reason"\s*:\s*"|usage"\s*:\s*\{|role"\s*:\s*"|error"\s*:\s*[^\sn]|choices"\s*:\s*\[\s*\])'
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which server is asked what, when and how."""

    url: str
    queries: Sequence[Query]
    model: str | None = None  # None: the first that the server lists
    api_key: str | None = field(default=None, repr=False)
    endpoint: Endpoint = "completions"
    temperature: float = 0.0
    max_concurrency: int | None = None
    timeout: float = 600.0  # seconds for one answer, from when its request may leave
    vocab_size: int | None = None
    seed: int = 0


@dataclass(slots=True, eq=False)
class Record:
    """What became of one request; times are seconds from the start of the run."""

    planned: float
    asked: int  # output tokens
    prompt_tokens: int
    output_tokens: int = 0
    sent: float | None = None
    chunks: array[float] = field(default_factory=lambda: array("d"))  # when each piece of the answer came
    end: float | None = None
    status: int | None = None
    error: str | None = None
    is_counted: bool = False  # by the server; otherwise a chunk is taken for a token

    @property
    def state(self) -> str:
        """Whether it is ok, refused, failed, or unfinished when the run was interrupted."""
        if self.end is None:
            return "unfinished"
        return "ok" if self.error is None else "refused" if self.status == REFUSED else "failed"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is."""

    done: int
    total: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run's records, whole or as far as it came."""

    url: str
    model: str
    endpoint: Endpoint
    records: list[Record]
    planned: int
    seconds: float
    peak_concurrency: int
    max_concurrency: int | None = None


class Reader:
    """Reads an answer's events: the time of each that brings tokens, and the JSON only of those that say more."""

    def __init__(self, record: Record, start: float) -> None:
        self.is_ended = False
        self._record = record
        self._start = start
        self._rest = b""
        self._finish: float | None = None

    def take(self, data: bytes) -> bool:
        """Take in a piece of the stream; True after its last event."""
        now = time.monotonic() - self._start
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            event = line[5:].strip()
            if event == b"[DONE]":
                self._record.end, self.is_ended = now, True
                return True
            if TELLING.search(event) is None or self._brings_tokens(event, now):
                self._record.chunks.append(now)
        return False

    def close(self, now: float) -> None:
        """The stream is over: a last line may lack its end, and some servers leave [DONE] out."""
        self.take(b"\n")
        if not self.is_ended:
            raise ReplyError("the stream ended before the answer did")
        record = self._record
        record.end = record.end or now
        if not record.is_counted:
            record.output_tokens = len(record.chunks)
        elif record.output_tokens and not record.chunks:  # a lone token without text came with the finish
            record.chunks.append(self._finish or record.end)

    def _brings_tokens(self, event: bytes, now: float) -> bool:
        """Read an event whole; an announcement, such as that of the role, brings no token and must not pass for one."""
        try:
            told = json.loads(event)
        except ValueError:
            raise ReplyError(f"an event is no JSON: {event[:80]!r}") from None
        if not isinstance(told, dict):
            raise ReplyError(f"an event is no object: {event[:80]!r}")
        if told.get("error"):
            raise ReplyError(message_of(told) or "an error without a message")
        match told.get("usage"):
            case {"prompt_tokens": int(prompt), "completion_tokens": int(output)}:
                self._record.prompt_tokens, self._record.output_tokens = prompt, output
                self._record.is_counted = True
                self.is_ended = self.is_ended or not told.get("choices")  # some count along with every chunk
        match told.get("choices"):
            case [{**choice}, *_]:
                delta = choice.get("delta")
                new = delta if isinstance(delta, dict) else {"text": choice.get("text")}
                if choice.get("finish_reason"):
                    self.is_ended, self._finish = True, now
                return any(value for name, value in new.items() if name != "role")
        return False


class Run:
    """A plan being carried out; what it has so far can be asked for at any time."""

    def __init__(self, plan: Plan) -> None:
        self.records: list[Record] = []
        self._plan = plan
        self._model = plan.model or ""
        self._start = time.monotonic()
        self._done = self._tokens = self._peak = 0
        self._live: set[Record] = set()
        self._gate = asyncio.Semaphore(plan.max_concurrency) if plan.max_concurrency else contextlib.nullcontext()

    async def go(self, notice: Callable[[Progress], None] = lambda _progress: None) -> None:
        """Send every request at its moment and wait for all answers."""
        plan = self._plan
        server, self._model = await reach(plan)
        allow_sockets(plan.max_concurrency or len(plan.queries))
        # Written before the clock starts: a long prompt takes as long to write as a short answer to come.
        bodies = write_bodies(plan, self._model)
        requests = [server.write("POST", PATHS[plan.endpoint], body) for body in bodies]
        self._start = time.monotonic()
        teller = asyncio.create_task(self._tell(notice))
        try:
            async with asyncio.TaskGroup() as group:
                for query, request in zip(plan.queries, requests, strict=True):
                    if (wait := query.at - self._now()) > 0:  # those of one moment leave before any answer is read
                        await asyncio.sleep(wait)
                    record = Record(query.at, query.output_tokens, query.prompt_tokens)
                    self.records.append(record)
                    group.create_task(self._ask(server, request, record))
        finally:
            teller.cancel()
        notice(self._progress())

    def outcome(self) -> Outcome:
        """What the run found."""
        ends = [record.end for record in self.records if record.end is not None]
        plan = self._plan
        return Outcome(
            plan.url,
            self._model,
            plan.endpoint,
            self.records,
            planned=len(plan.queries),
            seconds=max(ends, default=0.0),
            peak_concurrency=self._peak,
            max_concurrency=plan.max_concurrency,
        )

    async def _ask(self, server: Server, request: bytes, record: Record) -> None:
        async with self._gate:
            record.sent = self._now()
            self._live.add(record)
            self._peak = max(self._peak, len(self._live))
            reader, reply = Reader(record, self._start), Reply()
            try:
                async with asyncio.timeout(self._plan.timeout):
                    await http.exchange(server, request, reply, reader.take)
                if reply.status != 200:
                    raise ReplyError(str(reply))
                if not reply.is_stream:
                    raise ReplyError(f"the server did not stream: it sent {reply.headers.get('content-type')}")
                reader.close(self._now())
            except (OSError, ReplyError) as error:
                record.error, record.end = reason_of(error, self._plan.timeout), self._now()
            finally:
                record.status = reply.status
                self._live.remove(record)
            self._done += 1
            self._tokens += record.output_tokens

    async def _tell(self, notice: Callable[[Progress], None]) -> None:
        while True:
            notice(self._progress())
            await asyncio.sleep(TELL_EVERY)

    def _progress(self) -> Progress:
        tokens = self._tokens + sum(len(record.chunks) for record in self._live)
        return Progress(self._done, len(self._plan.queries), tokens, self._now())

    def _now(self) -> float:
        return time.monotonic() - self._start


async def run_serve(plan: Plan, notice: Callable[[Progress], None] = lambda _progress: None) -> Outcome:
    """Carry out a plan and say what became of every request."""
    run = Run(plan)
    await run.go(notice)
    return run.outcome()


async def reach(plan: Plan) -> tuple[Server, str]:
    """The server at the address where it answers, and the model to ask for."""
    server = Server.parse(plan.url, plan.api_key)
    try:
        async with asyncio.timeout(REACH_TIMEOUT):
            server = await server.found()
            reply = await http.get(server, "/v1/models")
    except (OSError, ReplyError) as error:
        is_certificate = isinstance(error, ssl.SSLCertVerificationError)
        remedy = "name its certificate in SSL_CERT_FILE" if is_certificate else "start it, or give its --url"
        reason = reason_of(error, REACH_TIMEOUT)
        raise ChairliftError(f"no server answers at {server.url} ({reason}): {remedy}") from None
    if reply.status in (401, 403):
        raise ChairliftError(f"{server.url} wants another API key (HTTP {reply.status}): give it with --api-key")
    if plan.model:
        return server, plan.model
    match reply.json():
        case {"data": [{"id": str(name)}, *_]}:
            return server, name
    raise ChairliftError(f"{server.url}/v1/models names no model (HTTP {reply.status}): give its name with --model")


def write_bodies(plan: Plan, model: str) -> Iterator[bytes]:
    """Each request's JSON; answers have exactly the length that was asked, if the server knows how."""
    r = random.Random(plan.seed)
    for query in plan.queries:
        body: dict[str, Any] = {
            "model": model,
            "temperature": plan.temperature,
            "max_tokens": query.output_tokens,
            "min_tokens": query.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if plan.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": query.text(r)}]
        else:
            body["prompt"] = query.drawn(r, plan.vocab_size or VOCABULARY).prompt
        yield json.dumps(body, separators=(",", ":")).encode()


def allow_sockets(count: int) -> None:
    """Raise this process's limit of open files as far as it goes: the usual 1,024 are too few for thousands."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 256  # and some for everything else
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
