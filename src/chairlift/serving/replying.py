"""Replies as they are sent: event streams, and bodies in pieces, both no faster than the client reads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
from starlette.responses import Response

from chairlift.apis.front import Front
from chairlift.openai.chunks import Chunks
from chairlift.openai.options import Options
from chairlift.openai.replies import usage
from chairlift.serving.backlog import Backlog
from chairlift.serving.failures import Failure
from chairlift.serving.generation import Answering
from chairlift.serving.pieces_response import pieces_of

log = logging.getLogger("chairlift")
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class Streamed(Response):
    """A reply that is written while it is made: it sends itself."""

    def __init__(self) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]


class EventStream(Streamed):
    """A streamed reply: it ends with the last answer, or when the client disconnects."""

    def __init__(
        self,
        answering: Answering,
        chunks: Chunks,
        options: Options,
        front: Front,
        request_id: str,
        repeated: dict[str, Any],
    ) -> None:
        super().__init__()
        self._answering, self._chunks, self._options, self._id = answering, chunks, options, request_id
        self._writer = front.events(chunks.common, repeated, self._used)

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


async def until_disconnected(receive: Callable[[], Awaitable[Message]]) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_read(send: Send) -> None:
    """Wait until the client has read all but the socket's buffer: sending an empty part waits for that."""
    await send({"type": "http.response.body", "body": b"", "more_body": True})


async def send_reply(response: Response, send: Send, backlog: Backlog, close: Callable[[], None]) -> None:
    """Send a reply in pieces; `close` is called when all but the last have been read."""
    pieces = pieces_of(response)
    backlog.size += sum(map(len, pieces))
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    while len(pieces) > 1:
        await send({"type": "http.response.body", "body": pieces[0], "more_body": True})
        backlog.size -= len(pieces.popleft())
        await until_read(send)
    last = pieces.popleft() if pieces else b""
    backlog.size -= len(last)
    close()
    await send({"type": "http.response.body", "body": last, "more_body": False})


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response, encoded by msgspec."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")
