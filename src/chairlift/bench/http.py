"""A small HTTP/1.1 client for thousands of streams: one connection each, and no task switch per piece of a body."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from chairlift.core.errors import ChairliftError

Listener = Callable[[bytes], bool]  # called with each piece of a body; returns True to end the exchange
PIECE_BYTES = 4096  # per read: several events
LONGEST_LINE = 1 << 16  # bytes of a head or of a chunk's size; more is not HTTP


class ReplyError(Exception):
    """A reply that is incomplete or not HTTP."""


@dataclass(frozen=True, slots=True)
class Server:
    """The server's address, and the headers of all requests."""

    host: str
    port: int
    prefix: str = ""  # of every path
    tls: ssl.SSLContext | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    address: tuple[str, int] | None = None  # resolved once, so that later requests need no DNS lookup

    @staticmethod
    def parse(url: str, api_key: str | None = None) -> Server:
        """Parse a server's URL, with or without the /v1 of OpenAI's clients.

        >>> Server.parse("http://[::1]:8000/v1").url
        'http://[::1]:8000'
        """
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise ChairliftError(f"{url!r} is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ChairliftError(f"{url!r} is not a URL of a server: use one such as http://127.0.0.1:8000")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ChairliftError("the API key has characters that no header can hold: give it without line ends")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return Server(parts.hostname, port, prefix, tls, headers)

    @property
    def url(self) -> str:
        """The URL as a user would write it."""
        return f"http{'s' * bool(self.tls)}://{self._name}{self.prefix}"

    @property
    def _name(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def write(self, method: str, path: str, body: bytes | None) -> bytes:
        """Return a request as bytes."""
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {self._name}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + (body or b"")

    async def found(self) -> Server:
        """Return the server with its resolved address, the one that accepts a connection."""
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, self.host, self.port)
        address = transport.get_extra_info("peername")[:2]
        transport.abort()
        return replace(self, address=address)


@dataclass(slots=True)
class Reply:
    """The reply so far; an event stream's body goes to the listener instead."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)

    @property
    def is_stream(self) -> bool:
        """Whether the reply is an event stream, not an error."""
        return self.status == 200 and self.headers.get("content-type", "").startswith("text/event-stream")

    def json(self) -> Any:
        """Return the body parsed as JSON, or None."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def __str__(self) -> str:
        """Format an error reply: its status and message."""
        text = self.body[:200].decode(errors="replace")
        return f"HTTP {self.status}: {message_of(self.json()) or ' '.join(text.split()) or 'without a reason'}"


class Chunks:
    """Decodes a chunked body from pieces of any size."""

    def __init__(self) -> None:
        self.ended = False
        self._left = 0  # bytes of the current chunk and of the line end after it
        self._rest = b""  # an incomplete line
        self._is_last = False

    def feed(self, data: bytes) -> bytes:
        """Return the decoded part of the body in these bytes."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        parts, place = [], 0
        while not self.ended:
            if self._left:
                parts.append(data[place : place + max(self._left - 2, 0)])
                taken = min(self._left, len(data) - place)
                place, self._left = place + taken, self._left - taken
                if self._left:
                    break
            end = data.find(b"\r\n", place)
            if end < 0:
                self._rest = data[place:]
                if len(self._rest) > LONGEST_LINE:
                    raise ReplyError("the reply is not HTTP: a chunk has no size")
                break
            line, place = data[place:end], end + 2
            if self._is_last:  # ignored trailers, then an empty line
                self.ended = not line
                continue
            try:
                size = int(line.partition(b";")[0], 16)
            except ValueError:
                raise ReplyError(f"the reply is not HTTP: {line[:20]!r} is not a chunk's size") from None
            self._is_last = size == 0
            self._left = size + 2 if size else 0
        return b"".join(parts)


class Exchange(asyncio.Protocol):
    """One request and its reply, on their own connection."""

    def __init__(self, request: bytes, reply: Reply, listener: Listener | None) -> None:
        self.reply = reply
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._listener = listener
        self._head = b""
        self._read: Callable[[bytes], None] = self._read_head
        self._chunks = Chunks()
        self._left: int | None = None  # remaining bytes of a body with a length; None: until the connection ends

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)
        self._request = b""

    def data_received(self, data: bytes) -> None:
        """Read a piece of the reply; any error fails this request alone."""
        if self.done.done():
            return
        try:
            self._read(data)
        except Exception as error:
            self.done.set_exception(error)

    def connection_lost(self, error: Exception | None) -> None:
        """End the reply; only a body without a length may end this way."""
        if self.done.done():
            return
        if error is None and self._read == self._read_body and self._left is None:
            self._end()
        else:
            where = "in the middle of the reply" if self.reply.status else "before a reply"
            self.done.set_exception(ReplyError(f"the connection was closed {where}"))

    def _read_head(self, data: bytes) -> None:
        self._head += data
        head, found, rest = self._head.partition(b"\r\n\r\n")
        if not found:
            if len(head) > LONGEST_LINE:
                raise ReplyError("the reply is not HTTP: its head has no end")
            return
        self._head = b""
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, status = first.partition(" ")
        if not version.startswith("HTTP/1.") or not status[:3].isdecimal():
            raise ReplyError(f"the reply is not HTTP/1.1: it begins with {first[:40]!r}")
        reply = self.reply
        pairs = (line.partition(":") for line in lines)
        reply.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if int(status[:3]) < 200:  # "100 Continue" and the like precede the reply
            self._read_head(rest)
            return
        reply.status = int(status[:3])
        if "chunked" in reply.headers.get("transfer-encoding", "").lower():
            self._read = self._read_chunks
        else:
            length = reply.headers.get("content-length")
            if length is not None and not length.isdecimal():
                raise ReplyError(f"the reply is not HTTP: its content-length is {length!r}")
            self._left = 0 if reply.status in (204, 304) else None if length is None else int(length)
            self._read = self._read_body
        self._read(rest)

    def _read_chunks(self, data: bytes) -> None:
        body = self._chunks.feed(data)
        self._take(body)
        if self._chunks.ended and not self.done.done():
            self._end()

    def _read_body(self, data: bytes) -> None:
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
        self._take(data)
        if self._left == 0 and not self.done.done():
            self._end()

    def _take(self, body: bytes) -> None:
        if self._listener is None or not self.reply.is_stream:
            self.reply.body += body
        elif body and self._listener(body):
            self._end()

    def _end(self) -> None:
        self.done.set_result(None)


class PlainExchange(Exchange, asyncio.BufferedProtocol):
    """An exchange without TLS, with its own small buffer: asyncio would allocate 256 KiB for every read."""

    # Not with TLS, where asyncio may drop data that a small buffer has no room for when the connection ends.
    def __init__(self, request: bytes, reply: Reply, listener: Listener | None) -> None:
        super().__init__(request, reply, listener)
        self._buffer = memoryview(bytearray(PIECE_BYTES))

    def get_buffer(self, _sizehint: int) -> memoryview:
        """Return the buffer for the next read."""
        return self._buffer

    def buffer_updated(self, count: int) -> None:
        """Read `count` bytes from the buffer."""
        self.data_received(bytes(self._buffer[:count]))


async def exchange(server: Server, request: bytes, reply: Reply, listener: Listener | None = None) -> None:
    """Send a request and fill in its reply, as far as received even if it fails."""
    kind, name = (Exchange, server.host) if server.tls else (PlainExchange, None)
    transport, protocol = await asyncio.get_running_loop().create_connection(
        lambda: kind(request, reply, listener),
        *(server.address or (server.host, server.port)),
        ssl=server.tls,
        server_hostname=name,
    )
    try:
        await protocol.done
    finally:
        transport.abort()  # no keep-alive; closing an abandoned stream also stops the server's work on it


async def get(server: Server, path: str) -> Reply:
    """Send a GET request."""
    await exchange(server, server.write("GET", path, None), reply := Reply())
    return reply


async def post(server: Server, path: str, value: Any) -> Reply:
    """Send a POST request with JSON."""
    await exchange(server, server.write("POST", path, json.dumps(value).encode()), reply := Reply())
    return reply


def message_of(body: Any) -> str | None:
    """Return the message of an error object, in one line."""
    match body:
        case {"error": {"message": str(text)}} | {"error": str(text)} | {"message": str(text)} | {"detail": str(text)}:
            return " ".join(text.split())
    return None


def reason_of(error: Exception, timeout: float) -> str:
    """Return why an exchange failed, with equal text for equal reasons."""
    if isinstance(error, TimeoutError) and error.errno is None:
        return f"not finished within {timeout:g} s"
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.errno and error.errno > 0:
        return os.strerror(error.errno).lower()  # asyncio's own text contains the address
    return str(error) or type(error).__name__
