"""Open-loop load test of an OpenAI-compatible server: each request is sent at its planned time."""

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
TELL_EVERY = 0.2  # seconds between progress updates
REACH_TIMEOUT = 30.0

# Events that are more than a token: a role, a finish reason, usage, or an error.
TELLING = re.compile(
    rb'"(?:finish_reason"\s*:\s*"|usage"\s*:\s*\{|role"\s*:\s*"|error"\s*:\s*[^\sn]|choices"\s*:\s*\[\s*\])'
)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The server, the requests, and how to send them."""

    url: str
    queries: Sequence[Query]
    model: str | None = None  # None: the server's first model
    api_key: str | None = field(default=None, repr=False)
    endpoint: Endpoint = "completions"
    temperature: float = 0.0
    max_concurrency: int | None = None
    timeout: float = 600.0  # seconds per answer, from its sending
    vocab_size: int | None = None
    seed: int = 0


@dataclass(slots=True, eq=False)
class Record:
    """The result of one request; times are seconds from the start of the run."""

    planned: float
    requested_tokens: int  # of output
    prompt_tokens: int
    output_tokens: int = 0
    sent: float | None = None
    chunks: array[float] = field(default_factory=lambda: array("d"))  # arrival time of each piece of the answer
    end: float | None = None
    status: int | None = None
    error: str | None = None
    is_counted: bool = False  # whether the server sent usage; otherwise each chunk counts as a token

    @property
    def state(self) -> str:
        """ok, refused, failed, or unfinished if the run was interrupted."""
        if self.end is None:
            return "unfinished"
        return "ok" if self.error is None else "refused" if self.status == REFUSED else "failed"


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run."""

    done: int
    total: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A run's records, complete or up to its interruption."""

    url: str
    model: str
    endpoint: Endpoint
    records: list[Record]
    planned: int
    seconds: float
    peak_concurrency: int
    max_concurrency: int | None = None


class Reader:
    """Reads an answer's events: the time of each token, and the JSON only of events that are more than a token."""

    def __init__(self, record: Record, start: float) -> None:
        self.is_ended = False
        self._record = record
        self._start = start
        self._rest = b""
        self._finish: float | None = None

    def take(self, data: bytes) -> bool:
        """Read a piece of the stream; return True after its last event."""
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
        """Finish at the end of the stream: the last line may lack its newline, and some servers omit [DONE]."""
        self.take(b"\n")
        if not self.is_ended:
            raise ReplyError("the stream ended before the answer did")
        record = self._record
        record.end = record.end or now
        if not record.is_counted:
            record.output_tokens = len(record.chunks)
        elif record.output_tokens and not record.chunks:  # a single token without text, sent with the finish reason
            record.chunks.append(self._finish or record.end)

    def _brings_tokens(self, event: bytes, now: float) -> bool:
        """Parse an event; return whether it has tokens. An event with only a role has none."""
        try:
            parsed = json.loads(event)
        except ValueError:
            raise ReplyError(f"an event is not JSON: {event[:80]!r}") from None
        if not isinstance(parsed, dict):
            raise ReplyError(f"an event is not an object: {event[:80]!r}")
        if parsed.get("error"):
            raise ReplyError(message_of(parsed) or "an error without a message")
        match parsed.get("usage"):
            case {"prompt_tokens": int(prompt), "completion_tokens": int(output)}:
                self._record.prompt_tokens, self._record.output_tokens = prompt, output
                self._record.is_counted = True
                self.is_ended = self.is_ended or not parsed.get("choices")  # some servers send usage with every chunk
        match parsed.get("choices"):
            case [{**choice}, *_]:
                delta = choice.get("delta")
                new = delta if isinstance(delta, dict) else {"text": choice.get("text")}
                if choice.get("finish_reason"):
                    self.is_ended, self._finish = True, now
                return any(value for name, value in new.items() if name != "role")
        return False


class LoadTest:
    """A load test in progress; `result` returns its results at any time."""

    def __init__(self, plan: LoadPlan) -> None:
        self.records: list[Record] = []
        self._plan = plan
        self._model = plan.model or ""
        self._start = time.monotonic()
        self._done = self._tokens = self._peak = 0
        self._live: set[Record] = set()
        self._gate = asyncio.Semaphore(plan.max_concurrency) if plan.max_concurrency else contextlib.nullcontext()

    async def run(self, notice: Callable[[Progress], None] = lambda _progress: None) -> None:
        """Send every request at its time and wait for all answers."""
        plan = self._plan
        server, self._model = await reach(plan)
        allow_sockets(plan.max_concurrency or len(plan.queries))
        # Encoded before the clock starts: encoding a long prompt takes as long as a short answer.
        bodies = write_bodies(plan, self._model)
        requests = [server.write("POST", PATHS[plan.endpoint], body) for body in bodies]
        self._start = time.monotonic()
        teller = asyncio.create_task(self._tell(notice))
        try:
            async with asyncio.TaskGroup() as group:
                for query, request in zip(plan.queries, requests, strict=True):
                    if (
                        wait := query.at - self._now()
                    ) > 0:  # requests with equal times are sent before any answer is read
                        await asyncio.sleep(wait)
                    record = Record(query.at, query.output_tokens, query.prompt_tokens)
                    self.records.append(record)
                    group.create_task(self._ask(server, request, record))
        finally:
            teller.cancel()
        notice(self._progress())

    def result(self) -> LoadResult:
        """Return the results so far."""
        ends = [record.end for record in self.records if record.end is not None]
        plan = self._plan
        return LoadResult(
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


async def run_serve(plan: LoadPlan, notice: Callable[[Progress], None] = lambda _progress: None) -> LoadResult:
    """Run a load test and return its results."""
    run = LoadTest(plan)
    await run.run(notice)
    return run.result()


async def reach(plan: LoadPlan) -> tuple[Server, str]:
    """Return the server with its resolved address, and the model's name."""
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
        raise ChairliftError(f"{server.url} rejects the API key (HTTP {reply.status}): give another with --api-key")
    if plan.model:
        return server, plan.model
    match reply.json():
        case {"data": [{"id": str(name)}, *_]}:
            return server, name
    raise ChairliftError(f"{server.url}/v1/models lists no model (HTTP {reply.status}): give its name with --model")


def write_bodies(plan: LoadPlan, model: str) -> Iterator[bytes]:
    """Yield each request's JSON; answers have exactly the requested length if the server supports ignore_eos."""
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
    """Raise this process's limit of open files as far as possible: the usual 1,024 are too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 256  # some for other files
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
