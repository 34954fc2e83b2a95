"""AsyncEngine: the engine on its own thread, for asyncio programs: submit, stream, abort."""

from __future__ import annotations

import asyncio
import weakref
from functools import partial
from types import TracebackType
from typing import Any

from chairlift.cluster.tensor_parallel.build import build
from chairlift.core.errors import RequestError
from chairlift.core.params import SamplingParams
from chairlift.core.settings import Settings
from chairlift.models.sources import DEFAULT_MODEL
from chairlift.offline.engine_thread import Change, EngineThread
from chairlift.offline.keywords import check_params
from chairlift.offline.prompts import Prompt
from chairlift.offline.requests import RequestBuilder
from chairlift.offline.stream import Stream

_INLINE = 2000  # characters, tokenized in a millisecond or two: longer prompts are tokenized in another thread


class AsyncEngine:
    """A model and its engine, which runs on its own thread, for programs with one event loop.

    At most `window` requests (default: four full batches) are live; `submit` waits for one to end before it adds
    another. The constructor loads the model, which takes seconds: call it before the event loop starts, or in a thread.

    >>> async def main() -> int:
    ...     async with AsyncEngine("stories15m", load_format="dummy", max_length=256, progress=False) as engine:
    ...         stream = await engine.submit([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))
    ...         return sum([len(chunk.token_ids) async for chunk in stream])
    >>> asyncio.run(main())
    4
    """

    def __init__(
        self, model: str = DEFAULT_MODEL, *, progress: bool = True, window: int | None = None, **settings: Any
    ) -> None:
        self.settings = Settings.of(**settings)
        self.model = model
        built = build(model, self.settings, progress=progress)
        self._end_ranks = weakref.finalize(self, built.close)
        self.engine = built.engine  # stepped by its own thread: read it only while no request is live
        self.config = built.config
        self.capacity = built.capacity
        self._limits = built.limits
        self._builder = RequestBuilder(model, built, self.settings)
        self.tokenizer = self._builder.tokenizer
        self._window = window or 4 * built.limits.max_sequences
        self._streams: dict[str, Stream] = {}  # of live requests; changed by the event loop alone
        self._waiting: list[asyncio.Future[None]] = []  # of calls of `submit` that wait for a request to end
        self._is_closed = False
        self._thread = EngineThread(built.engine, self.tokenizer, self._wake)
        self._thread.start()

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        tenant: str = "",
        priority: int = 0,
        salt: str = "",
    ) -> Stream:
        """Submit a prompt (text or token ids) and return the stream of its answers; a bad request is a RequestError.

        With `best_of` above n the stream yields the n likeliest answers at the end, each as one chunk. The scheduler
        reads `tenant`, `priority` (higher is admitted first) and `salt` (requests share prefixes only within a salt).
        """
        check_params(params)
        params = params or self._builder.default_params()
        if isinstance(prompt, str) and len(prompt) > _INLINE:
            read = await asyncio.to_thread(self._builder.prompts.encode, prompt)
        else:
            read = self._builder.prompts.encode(prompt)
        request_id = request_id or self._builder.new_id()
        more = {"tenant": tenant, "priority": priority, "salt": salt}
        build = partial(self._builder.build, request_id, read, params, self._thread.fail, **more)
        # A grammar is compiled beside the event loop.
        request = build() if params.structured is None else await asyncio.to_thread(build)
        self._limits.check(request)
        await self._wait_for_room()
        if request_id in self._streams:
            raise RequestError(f"request id {request_id!r} is in use: choose another or wait until it has ended")
        stream = Stream(request_id, asyncio.get_running_loop(), lambda: self.abort(request_id))
        self._streams[request_id] = stream
        self._thread.submit(request, read.text, stream)
        return stream

    def abort(self, request_id: str) -> None:
        """End a request: its stream ends with finish_reason "abort". Unknown ids and ended requests are ignored."""
        if request_id in self._streams:
            self._thread.abort(request_id)

    async def close(self) -> None:
        """Abort all requests, end their streams and stop the engine's thread; calls of `submit` after it are errors."""
        self._is_closed = True
        self._thread.close()
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._end_ranks)
        self._release_waiting()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _wait_for_room(self) -> None:
        """Return when fewer than `window` requests are live."""
        while True:
            if (fault := self._thread.fault) is not None:
                raise fault
            if self._is_closed:
                raise RequestError("this AsyncEngine is closed: make another one, or close it later")
            if len(self._streams) < self._window:
                return
            for left in [each for each in self._streams.values() if each._loop.is_closed()]:
                del self._streams[left.id]
                self._thread.abort(left.id)
            if len(self._streams) < self._window:
                return
            room = asyncio.get_running_loop().create_future()
            self._waiting.append(room)
            await room

    def _wake(self, changed: list[Change]) -> None:
        """Wake the readers of these streams; called in the event loop, once per step for all its streams."""
        for stream, has_ended, error in changed:
            stream._wake(has_ended, error)
            if has_ended:
                self._streams.pop(stream.id, None)
        if len(self._streams) < self._window:
            self._release_waiting()

    def _release_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for room in waiting:
            if not room.done():
                room.set_result(None)
