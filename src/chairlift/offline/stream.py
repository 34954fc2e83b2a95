"""Stream: the answers to one request of an AsyncEngine, chunk by chunk."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from chairlift.text.outputs import Chunk, RequestOutput


class Stream:
    """The answers to one request, as an async iterator of chunks.

    Chunks of one answer that were not read in time are joined. After the last chunk, `output` has the whole answers.
    Iterating raises a RequestError if the request failed and an EngineFault if the engine has stopped.
    """

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop, abort: Callable[[], None]) -> None:
        self.id = request_id
        self.output: RequestOutput | None = None  # set with the first chunk
        self._loop = loop
        self._abort = abort
        self._chunks: deque[Chunk] = deque()  # appended by the engine's thread, read by the event loop
        self._error: Exception | None = None
        self._has_ended = False
        self._changed = asyncio.Event()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Chunk:
        """Return the part of one answer that was generated since the last call."""
        while not self._chunks:
            if self._has_ended:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        chunk = self._chunks.popleft()
        while self._chunks and self._chunks[0].index == chunk.index:
            chunk.join(self._chunks.popleft())
        return chunk

    async def aclose(self) -> None:
        """Abort the request, if it has not ended."""
        self._abort()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _wake(self, has_ended: bool, error: Exception | None) -> None:
        """Wake the reader; called in the event loop."""
        if not self._has_ended:
            self._has_ended, self._error = has_ended, error
        self._changed.set()
