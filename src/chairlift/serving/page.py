"""Page: the engines' steps for the browsers that show them, as one stream of events for each.

The engines are asked for records only while a browser reads them. A record is passed on as the bytes that the engine
sent, unless the prompts in it are to be shown.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from chairlift.serving.failures import Failure
from chairlift.serving.messages import Watch
from chairlift.serving.replying import Message, Send, Streamed, until_disconnected
from chairlift.serving.served import ServedModel

log = logging.getLogger("chairlift")
MOST_VIEWERS = 16
MOST_UNREAD = 4 << 20  # bytes that a viewer has not read; beyond them it misses some steps
_RENEW_EVERY = 2.0  # seconds
_LEASE = 6.0  # seconds that an engine records without being asked again
_BEGIN_EVERY = 15  # renewals between two new beginnings: what a page saves must begin with one, whatever it drops
PROMPT_TOKENS = 64  # of each prompt's end, where prompts are shown


class Viewer:
    """The events that one browser has not been sent."""

    def __init__(self) -> None:
        self._events: deque[bytes] = deque()
        self._size = 0
        self._has_more = asyncio.Event()
        self.is_closed = False

    def put(self, event: bytes) -> bool:
        """Add an event; False if there was no room, and all were dropped."""
        self._has_more.set()
        if self._size + len(event) > MOST_UNREAD:
            self._events.clear()
            self._size = 0
            return False
        self._events.append(event)
        self._size += len(event)
        return True

    def close(self) -> None:
        """End the stream."""
        self.is_closed = True
        self._has_more.set()

    async def take(self) -> bytes:
        """Wait for events, and return all that there are."""
        await self._has_more.wait()
        self._has_more.clear()
        found = b"".join(self._events)
        self._events.clear()
        self._size = 0
        return found


class Page:
    """The viewers of one HTTP process."""

    def __init__(self, models: Iterable[ServedModel], *, shows_prompts: bool = False) -> None:
        self._models = list(models)
        self._prompt_tokens = PROMPT_TOKENS if shows_prompts else 0
        self._viewers: set[Viewer] = set()
        self._renewing: asyncio.Task[None] | None = None
        for model in self._models:
            for replica, client in enumerate(model.fleet.clients.values()):
                label = msgspec.json.encode({"model": model.name, "replica": replica})
                client.on_record = partial(self._tell, model, b"data: " + label[:-1] + b",")

    def watch(self) -> Streamed:
        """Return a stream of events for one more browser."""
        if len(self._viewers) >= MOST_VIEWERS:
            message = f"{MOST_VIEWERS} pages are open already, in this process: close one and try again"
            raise Failure(message, 429, "rate_limit_error", "too_many_viewers", retry_after=5.0)
        return PageStream(self)

    def add(self, viewer: Viewer) -> None:
        """Send events to a viewer."""
        self._viewers.add(viewer)
        viewer.put(self._state())
        self._ask(is_new=True)
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew())

    def remove(self, viewer: Viewer) -> None:
        """Forget a viewer; after the last one, the engines stop recording."""
        self._viewers.discard(viewer)
        if not self._viewers and self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None

    def close(self) -> None:
        """End all streams: the server stops."""
        for viewer in self._viewers:
            viewer.close()

    def _ask(self, *, is_new: bool = False) -> None:
        for model in self._models:
            for client in model.fleet.clients.values():
                client.watch(Watch(_LEASE, is_new, self._prompt_tokens))

    async def _renew(self) -> None:
        for number in itertools.count(1):
            await asyncio.sleep(_RENEW_EVERY)
            self._ask(is_new=number % _BEGIN_EVERY == 0)
            self._send(self._state())

    def _state(self) -> bytes:
        """Return an event with the state of every engine; it also keeps the connection alive."""
        engines = []
        for model in self._models:
            for replica, client in enumerate(model.fleet.clients.values()):
                hello = client.hello
                engines.append(
                    {
                        "model": model.name,
                        "replica": replica,
                        "trouble": client.trouble,
                        "device": None if hello is None else hello.device,
                        "dtype": None if hello is None else hello.dtype,
                    }
                )
        return b"data: " + msgspec.json.encode({"engines": engines}) + b"\n\n"

    def _tell(self, model: ServedModel, label: bytes, record: bytes) -> None:
        if self._prompt_tokens:
            try:
                record = with_prompts(record, model)
            except Exception:  # of the tokenizer; the engine's other messages must not suffer from it
                log.exception("the prompts of the live page could not be decoded")
                return
        self._send(label + record[1:] + b"\n\n")

    def _send(self, event: bytes) -> None:
        has_room = [viewer.put(event) for viewer in self._viewers]
        if not all(has_room):
            self._ask(is_new=True)  # a viewer that has missed something needs a new beginning


class PageStream(Streamed):
    """The events for one browser, until it disconnects."""

    def __init__(self, page: Page) -> None:
        super().__init__()
        self._page = page

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        """Send the stream."""
        viewer = Viewer()
        disconnect = asyncio.create_task(until_disconnected(receive))
        writing = asyncio.create_task(self._write(viewer, send))
        self._page.add(viewer)
        try:
            await asyncio.wait({disconnect, writing}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                await writing
        finally:
            self._page.remove(viewer)
            for task in (disconnect, writing):
                task.cancel()

    async def _write(self, viewer: Viewer, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while not viewer.is_closed:
            await send({"type": "http.response.body", "body": await viewer.take(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def with_prompts(record: bytes, model: ServedModel) -> bytes:
    """Return a record with the ends of prompts as text in place of their token ids."""
    found = msgspec.json.decode(record)
    tokenizer = model.reader.tokenizer
    admitted = (event for event in found.get("events", ()) if event[0] == "admit")
    for lane in (*found.get("start", {}).get("lanes", ()), *admitted):
        lane[-1] = "" if tokenizer is None else tokenizer.decode(lane[-1] or [])
    return msgspec.json.encode(found)
