"""One client's connection: uvicorn's h11 protocol, with a bound on all that the client can cause.

A body is parsed only when the app reads it, a few parts at a time, so that a refused request costs its head and nothing
else. A connection that is closed in the middle of a body says so to the client first.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from chairlift.openai.replies import error_object
from chairlift.serving.backlog import Backlog

_HEAD = 64 << 10  # bytes of a request's head
_FIRST_EVENTS = 2  # parsed before the app asks for the body: a small body that came with its head, and its end
_EVENTS = 32  # parsed of one body before other connections may parse theirs
_TURN = 0.002  # seconds of parsing bodies, of all connections, in one turn of the event loop
# Parts in which a body may come: any small body may come byte by byte, a large one not.
_FREE_PARTS = 4096
_BYTES_A_PART = 256
LINGER_BYTES = 1 << 20  # discarded of what a refused client still sends


class Turns:
    """Parses the bodies of all connections, one after the other, for a short time in each turn of the event loop."""

    def __init__(self) -> None:
        self._due: deque[Callable[[], None]] = deque()

    def ask(self, parse: Callable[[], None]) -> None:
        """Have a connection's body parsed soon."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._run)
        self._due.append(parse)

    def _run(self) -> None:
        end = time.monotonic() + _TURN
        while self._due:
            self._due.popleft()()
            if time.monotonic() > end:
                break
        if self._due:
            asyncio.get_running_loop().call_soon(self._run)


class Parser(h11.Connection):
    """h11, that stops in a body when its events are used up, and refuses one in too many parts."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, _HEAD)
        self.events_left = 0
        self.is_held = False  # whether there may be more to parse than was allowed
        self.is_wanted = False  # whether the app reads the body
        self.is_complete = False  # whether all of a request has come
        self.trouble = "this is no HTTP request"
        self.status = 400
        self._parts = self._bytes = 0

    def next_event(self) -> Any:
        """Return h11's next event, or NEED_DATA where no more may be parsed now."""
        if self.events_left == 0 and self.their_state is h11.SEND_BODY:
            self.is_held = True
            return h11.NEED_DATA
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.trouble = f"this is no HTTP request: {str(error)[:200]}"
            self.status = 431 if error.error_status_hint == 431 else 400
            raise
        if type(event) is h11.Data:
            self.events_left -= 1
            self._count(len(event.data))
        elif type(event) is h11.Request:
            self.events_left = _FIRST_EVENTS
            self.is_wanted = self.is_complete = False
            self._parts = self._bytes = 0
        elif type(event) is h11.EndOfMessage:
            self.is_complete = True
        return event

    def _count(self, size: int) -> None:
        self._parts += 1
        self._bytes += size
        if self._parts > _FREE_PARTS + self._bytes // _BYTES_A_PART:
            self.trouble = f"the body's first {self._bytes:,} bytes came in {self._parts:,} parts: send larger chunks"
            raise h11.RemoteProtocolError(self.trouble)

    def send(self, event: Any) -> Any:
        """Write an event; an answer to a request that has not come whole closes its connection."""
        if type(event) is h11.Response and self.their_state is h11.SEND_BODY:
            headers = [*event.headers.raw_items(), (b"Connection", b"close")]
            event = h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
        return super().send(event)


class Wire(asyncio.Transport):
    """The transport as uvicorn sees it: the connection decides when to read on, and how to close."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        super().__init__()
        self.transport = transport
        self.written = 0
        self.is_lingering = False
        self._connection = connection

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return what the socket knows."""
        return self.transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """Whether nothing more may be written."""
        return self.is_lingering or self.transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send, or keep what the client does not read yet."""
        if self.is_lingering:
            return
        self.written += len(data)
        self.transport.write(data)

    @property
    def unsent(self) -> int:
        """Bytes that the client has not made room for."""
        return self.transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        """Stop reading from the socket."""
        self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on: the app wants more, or the next request."""
        self._connection.read_on()

    def close(self) -> None:
        """Close once all is sent.

        While the client still sends, the connection stays half open for a moment: a socket that is closed before all
        was read from it is reset, and the client may never see the answer.
        """
        if self._connection.is_in_body and self.transport.can_write_eof() and not self.is_closing():
            self.is_lingering = True
            self._connection.linger()
            try:
                self.transport.write_eof()
            except OSError:  # the client is gone
                self.transport.abort()
            self.transport.resume_reading()
        else:
            self.transport.close()

    def abort(self) -> None:
        """Close now; what is not sent is dropped."""
        self.transport.abort()


class Connections(Protocol):
    """What a connection knows of all of them; `listening.py` has them."""

    turns: Turns

    def add(self, connection: Connection) -> None:
        """Count a connection."""

    def remove(self, connection: Connection) -> None:
        """Count a connection no more."""

    def serve(self, connection: Connection) -> None:
        """Note that a connection has a request."""

    def wait(self, connection: Connection) -> None:
        """Note that a connection waits for its next request."""


class Connection(H11Protocol):
    """A client's connection, with its place among all of them."""

    def __init__(self, connections: Connections, **more: Any) -> None:
        super().__init__(**more)
        self.conn = self.parser = Parser()
        self.backlog = Backlog()
        self.is_extra = False  # beyond the number of connections: only open routes are served
        self.since = 0.0  # when the server began to wait for a head, or to linger
        self.awaits_head = True
        self.progress = (0, 0.0)  # bytes sent, and when that was first seen
        self._connections = connections
        self._discarded = 0

    # ---- as asyncio calls it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place among the connections, or one of the few extra ones."""
        self.wire = Wire(transport, self)
        self.since = self.loop.time()
        self.progress = 0, self.since
        self._connections.add(self)
        self.app_state = {"connection": self}
        super().connection_made(self.wire)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place back."""
        self._connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse a head, or as much of a body as is allowed now."""
        if self.wire.is_lingering:
            self._discarded += len(data)
            if self._discarded > LINGER_BYTES:
                self.wire.abort()
            return
        if not self.awaits_head and self.parser.their_state is h11.IDLE:
            self.awaits_head, self.since = True, self.loop.time()
        super().data_received(data)

    # ---- as uvicorn calls it

    def handle_events(self) -> None:
        """Parse what has come, and read no further into a body than the app does."""
        super().handle_events()
        if self.parser.their_state is not h11.IDLE:
            self.awaits_head = False
        if self.parser.is_complete:
            self._connections.serve(self)
        elif self.parser.their_state is h11.SEND_BODY:
            if not self.parser.is_wanted:
                self.flow.pause_reading()
            elif self.parser.is_held:
                self.wire.pause_reading()
                if not self.flow.read_paused:
                    self._connections.turns.ask(self._parse)

    def read_on(self) -> None:
        """The app reads: parse what is here, or wait for more."""
        self.parser.is_wanted = True
        if self.parser.is_held:
            self._connections.turns.ask(self._parse)
        else:
            self.wire.transport.resume_reading()

    def _parse(self) -> None:
        if self.wire.is_closing() or not self.is_in_body:
            return
        self.parser.is_held, self.parser.events_left = False, _EVENTS
        self.handle_events()
        if not self.parser.is_held and not self.flow.read_paused and not self.wire.is_closing():
            self.wire.transport.resume_reading()

    def on_response_complete(self) -> None:
        """Wait for the next request, if the connection stays."""
        self.parser.is_complete = False
        self._connections.wait(self)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Say what cannot be read, and close."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the app cannot answer any more
            self.cycle.message_event.set()
        if self.parser.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(error_object(self.parser.trouble, "invalid_request_error", "invalid_http", None))
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            response = h11.Response(status_code=self.parser.status, headers=headers)
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.wire.write(self.parser.send(event))
        self.wire.close()

    # ---- its bounds

    @property
    def is_in_body(self) -> bool:
        """Whether the client has more to send of a request, or sent what cannot be read."""
        return self.parser.their_state in (h11.SEND_BODY, h11.ERROR)

    def linger(self) -> None:
        """Count the time from which the client is only listened to."""
        self.since = self.loop.time()

    def stalled(self, now: float) -> float:
        """Return for how long the client has taken none of the bytes that wait for it; 0.0 where there are none."""
        unsent = self.wire.unsent
        sent = self.wire.written - unsent
        if sent != self.progress[0] or not unsent:
            self.progress = sent, now
        return now - self.progress[1]

    @property
    def unread(self) -> int:
        """Bytes in memory for this client."""
        return self.wire.unsent + self.backlog.size
