"""Exchange: one request and its reply on a connection to a server; the body is read as it is passed on."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import h11

CONNECT_SECONDS = 5.0
_HEAD = 64 << 10  # bytes of a reply's head
_READ = 64 << 10  # bytes per read: bounds what a reply has in memory here

Headers = Sequence[tuple[bytes, bytes]]


class Lost(Exception):  # noqa: N818  # the server's, not ours
    """The server cannot be reached, ended the connection, or does not speak HTTP."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None


@dataclass(slots=True, eq=False)
class Wire:
    """An open connection to a server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    parser: h11.Connection
    idle_since: float = 0.0

    @staticmethod
    async def open(address: Address) -> Wire:
        """Connect, or raise Lost."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(address.host, address.port, ssl=address.tls, limit=_READ)
        except (OSError, TimeoutError) as error:
            raise Lost(f"cannot connect: {error or 'no answer in time'}") from None
        return Wire(reader, writer, h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD))

    def close(self) -> None:
        """Close at once: the server then cancels the request."""
        self.writer.transport.abort()


class Exchange:
    """A request that was sent, and the reply to it."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.has_ended = False

    async def send(self, method: str, target: str, headers: Headers, body: bytes) -> None:
        """Send the request and receive the head of its reply, or raise Lost.

        The reply may come before the whole request is sent: a server that refuses a request reads little of its body.
        """
        parser = self.wire.parser
        request = h11.Request(method=method, target=target, headers=[*headers, (b"content-length", b"%d" % len(body))])
        head = parser.send(request)
        assert head is not None
        self.wire.writer.write(head + body)
        parser.send(h11.Data(data=body))
        parser.send(h11.EndOfMessage())
        while not isinstance(event := await self._event(), h11.Response):
            pass  # 100 and other interim responses
        self.status, self.headers = event.status_code, event.headers.raw_items()

    async def read(self) -> bytes:
        """Return the next part of the body; b"" at its end. Raise Lost if it breaks off."""
        while not self.has_ended:
            event = await self._event()
            if isinstance(event, h11.Data):
                return bytes(event.data)
            self.has_ended = isinstance(event, h11.EndOfMessage)
        return b""

    async def read_all(self, most: int) -> bytes:
        """Return the body; of a longer one, its first `most` bytes and what arrived with them: `read` has the rest."""
        found = b""
        while len(found) < most and (part := await self.read()):
            found += part
        return found

    @property
    def can_be_reused(self) -> bool:
        """Whether the connection can carry another request."""
        parser = self.wire.parser
        return self.has_ended and parser.our_state is h11.DONE and parser.their_state is h11.DONE

    async def _event(self) -> Any:
        parser = self.wire.parser
        try:
            while (event := parser.next_event()) is h11.NEED_DATA:
                parser.receive_data(await self.wire.reader.read(_READ))
        except (OSError, h11.RemoteProtocolError) as error:
            raise Lost(f"the connection ended: {error}") from None
        if isinstance(event, h11.ConnectionClosed):
            raise Lost("the connection ended before the reply")
        return event
