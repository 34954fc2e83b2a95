"""One client's connection: uvicorn's h11 protocol, with bounds on the memory and time that a client can use.

A body is parsed only when the app reads it, a few parts at a time, so that a rejected request costs only its head.
Before a connection is closed in the middle of a body, the response is sent.
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
_FIRST_EVENTS = 2  # parsed before the app reads the body: a small body that arrived with its head, and its end
_EVENTS = 32  # parsed of one body before the next connection's body
_PARSE_SECONDS = 0.002  # of parsing bodies, of all connections, per iteration of the event loop
# The most parts of a body: a small body may arrive byte by byte, a large one may not.
_FREE_PARTS = 4096
_BYTES_A_PART = 256
LINGER_BYTES = 1 << 20  # read and discarded of a rejected request, before the connection is aborted


class ParseQueue:
    """Parses the bodies of all connections in order, for a short time per iteration of the event loop."""

    def __init__(self) -> None:
        self._due: deque[Callable[[], None]] = deque()

    def add(self, parse: Callable[[], None]) -> None:
        """Schedule a connection's parsing."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._run)
        self._due.append(parse)

    def _run(self) -> None:
        end = time.monotonic() + _PARSE_SECONDS
        while self._due:
            self._due.popleft()()
            if time.monotonic() > end:
                break
        if self._due:
            asyncio.get_running_loop().call_soon(self._run)


class Parser(h11.Connection):
    """h11 with a budget of events per body, which rejects a body in too many parts."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, _HEAD)
        self.events_left = 0
        self.is_held = False  # whether parsing stopped because the budget was used up
        self.is_wanted = False  # whether the app reads the body
        self.is_complete = False  # whether the whole request has arrived
        self.trouble = "this is not an HTTP request"
        self.status = 400
        self._parts = self._bytes = 0

    def next_event(self) -> Any:
        """Return h11's next event, or NEED_DATA if the budget is used up."""
        if self.events_left == 0 and self.their_state is h11.SEND_BODY:
            self.is_held = True
            return h11.NEED_DATA
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.trouble = f"this is not an HTTP request: {str(error)[:200]}"
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
            self.trouble = f"the body's first {self._bytes:,} bytes are in {self._parts:,} parts: send larger chunks"
            raise h11.RemoteProtocolError(self.trouble)

    def send(self, event: Any) -> Any:
        """Write an event; a response to a request that has not arrived whole closes the connection."""
        if type(event) is h11.Response and self.their_state is h11.SEND_BODY:
            headers = [each for each in event.headers.raw_items() if each[0].lower() != b"connection"]
            headers.append((b"Connection", b"close"))
            event = h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
        return super().send(event)


class Wire(asyncio.Transport):
    """The transport that uvicorn sees: the connection controls reading and closing."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        super().__init__()
        self.transport = transport
        self.written = 0
        self.is_lingering = False
        self._connection = connection

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information about the socket."""
        return self.transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """Whether writing is no longer possible."""
        return self.is_lingering or self.transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send, or buffer what the client does not read yet."""
        if self.is_lingering:
            return
        self.written += len(data)
        self.transport.write(data)

    @property
    def unsent(self) -> int:
        """Bytes in the transport's write buffer."""
        return self.transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        """Stop reading from the socket."""
        self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading, of this body or of the next request."""
        self._connection.read_on()

    def close(self) -> None:
        """Close once all is sent.

        While the client still sends, the connection stays half open for a moment: closing a socket with unread input
        resets it, and the client may never see the response.
        """
        if self._connection.is_in_body and self.transport.can_write_eof() and not self.is_closing():
            self.is_lingering = True
            self._connection.linger()
            try:
                self.transport.write_eof()
            except OSError:  # the client has disconnected
                self.transport.abort()
            self.transport.resume_reading()
        else:
            self.transport.close()

    def abort(self) -> None:
        """Close now and drop unsent bytes."""
        self.transport.abort()


class Connections(Protocol):
    """The methods of `listening.Connections` that a connection calls."""

    parse_queue: ParseQueue

    def add(self, connection: Connection) -> None:
        """Add a connection."""

    def remove(self, connection: Connection) -> None:
        """Remove a connection."""

    def serve(self, connection: Connection) -> None:
        """Mark a connection as having a request."""

    def wait(self, connection: Connection) -> None:
        """Mark a connection as waiting for its next request."""


class Connection(H11Protocol):
    """A client's connection, registered in Connections."""

    def __init__(self, connections: Connections, **more: Any) -> None:
        super().__init__(**more)
        self.conn = self.parser = Parser()
        self.backlog = Backlog()
        self.is_extra = False  # accepted beyond the limit of connections: only open routes are served
        self.since = 0.0  # when the wait for a head, or the lingering, began
        self.awaits_head = True
        self.progress = (0, 0.0)  # bytes sent, and the time of the last change
        self._connections = connections
        self._discarded = 0

    # ---- called by asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection."""
        self.wire = Wire(transport, self)
        self.since = self.loop.time()
        self.progress = 0, self.since
        self._connections.add(self)
        self.app_state = {"connection": self}
        super().connection_made(self.wire)

    def connection_lost(self, exc: Exception | None) -> None:
        """Unregister the connection."""
        self._connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse a head, or a body within its budget of events."""
        if self.wire.is_lingering:
            self._discarded += len(data)
            if self._discarded > LINGER_BYTES:
                self.wire.abort()
            return
        if not self.awaits_head and self.parser.their_state is h11.IDLE:
            self.awaits_head, self.since = True, self.loop.time()
        super().data_received(data)

    # ---- called by uvicorn

    def handle_events(self) -> None:
        """Parse the received bytes; pause reading where the app does not read the body."""
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
                    self._connections.parse_queue.add(self._parse)

    def read_on(self) -> None:
        """Parse received bytes, or resume reading: the app reads the body."""
        self.parser.is_wanted = True
        if self.parser.is_held:
            self._connections.parse_queue.add(self._parse)
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
        """Wait for the next request, if the connection stays open."""
        self.parser.is_complete = False
        self._connections.wait(self)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Send an error that names what could not be parsed, and close."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the app can no longer respond
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

    # ---- read by Connections

    @property
    def is_in_body(self) -> bool:
        """Whether the request has not arrived whole, or could not be parsed."""
        return self.parser.their_state in (h11.SEND_BODY, h11.ERROR)

    def linger(self) -> None:
        """Start the time limit of the half-open connection."""
        self.since = self.loop.time()

    def stalled(self, now: float) -> float:
        """Return the seconds since the client last read, if it has unsent bytes; otherwise 0.0."""
        unsent = self.wire.unsent
        sent = self.wire.written - unsent
        if sent != self.progress[0] or not unsent:
            self.progress = sent, now
        return now - self.progress[1]

    @property
    def unread(self) -> int:
        """Bytes in memory that this client has not read."""
        return self.wire.unsent + self.backlog.size
