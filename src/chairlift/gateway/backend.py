"""Backend: one server behind the gateway, with its open connections and its health."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from chairlift.core.errors import SettingsError
from chairlift.gateway.exchange import Address, Exchange, Headers, Lost, Wire
from chairlift.routing.pools import Role

_IDLE, _IDLE_SECONDS = 64, 20.0  # kept connections without a request; our server closes them after 30 s
PROBE_SECONDS = 2.0  # for the answer to a health check
PROBE_EVERY = 1.0
_STATE = 64 << 10  # bytes of the answer to a health check that are read
_FAILED_PROBES = 3  # without an answer, after which the server's requests are given up


class Backend:
    """A server, named by its URL if it has no other name."""

    def __init__(self, url: str, name: str = "") -> None:
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise SettingsError(f"{url!r} is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise SettingsError(f"{url!r} is not the URL of a server: use one such as http://10.0.0.2:8000")
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        self.name = name or f"{parts.scheme}://{parts.netloc}{self.prefix}"
        self.host = parts.netloc
        self.address = Address(parts.hostname, port, ssl.create_default_context() if parts.scheme == "https" else None)
        self.trouble: str | None = "not checked yet"
        self.role: Role = "both"
        self.receives_at = ""  # where it receives KV blocks
        self.queued_tokens = self.max_sequences = 0  # if it reports its load
        self._failed = 0  # probes without an answer, one after the other
        self._idle: deque[Wire] = deque()
        self._open: set[Wire] = set()

    async def send(self, method: str, target: str, headers: Headers, body: bytes) -> Exchange:
        """Send a request; return the exchange with the head of its reply, or raise Lost."""
        headers = [(b"host", self.host.encode()), *headers]
        while (wire := self._kept()) is not None:
            # The server may have closed it a moment ago: that says nothing about the server.
            try:
                return await self._send(wire, method, target, headers, body)
            except Lost:
                continue
        return await self._send(await Wire.open(self.address), method, target, headers, body)

    async def _send(self, wire: Wire, method: str, target: str, headers: Headers, body: bytes) -> Exchange:
        exchange = Exchange(wire)
        self._open.add(wire)
        try:
            await exchange.send(method, self.prefix + target, headers, body)
        except BaseException:
            self._drop(wire)
            raise
        return exchange

    def _kept(self) -> Wire | None:
        while self._idle:
            wire = self._idle.pop()
            if time.monotonic() - wire.idle_since < _IDLE_SECONDS and not wire.reader.at_eof():
                return wire
            wire.close()
        return None

    def release(self, exchange: Exchange) -> None:
        """Keep the connection of a complete exchange; close that of any other, which cancels its request."""
        wire = exchange.wire
        if wire not in self._open:
            return
        if not exchange.can_be_reused or len(self._idle) >= _IDLE:
            self._drop(wire)
            return
        self._open.discard(wire)
        wire.parser.start_next_cycle()
        wire.idle_since = time.monotonic()
        self._idle.append(wire)

    def _drop(self, wire: Wire) -> None:
        self._open.discard(wire)
        wire.close()

    def close(self) -> None:
        """Close all connections: their requests are lost."""
        while self._idle:
            self._idle.pop().close()
        for wire in [*self._open]:
            self._drop(wire)

    # ---- health

    async def probe(self) -> str | None:
        """Return why the server takes no requests now, or None. Without an answer for long, give up its requests."""
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                trouble = await self._probe("/ready")
        except (Lost, TimeoutError) as error:
            self._failed += 1
            if self._failed >= _FAILED_PROBES:
                self.close()
            return f"it does not answer: {error or 'no reply in time'}"
        self._failed = 0
        return trouble

    async def _probe(self, path: str) -> str | None:
        exchange = await self._send(await Wire.open(self.address), "GET", path, [(b"host", self.host.encode())], b"")
        try:
            if exchange.status == 404 and path == "/ready":
                return await self._probe("/health")  # servers other than ours
            if exchange.status != 200:
                return f"it answers {path} with {exchange.status}"
            self._learn(await exchange.read_all(_STATE))
            return None
        finally:
            self._drop(exchange.wire)

    def _learn(self, raw: bytes) -> None:
        """Read the server's role, if it has one; servers other than ours have none."""
        try:
            state = _decode_state(raw)
        except msgspec.DecodeError:
            state = State()
        self.role, address = state.role, state.receives_at
        self.queued_tokens, self.max_sequences = state.queued_tokens, state.max_sequences
        host, _, port = address.removeprefix("tcp:").rpartition(":")
        if host in ("0.0.0.0", "[::]", "::", ""):  # it listens on all its addresses: one of them is known
            address = f"tcp:{self.address.host}:{port}"
        self.receives_at = address if port else ""


class State(msgspec.Struct):
    """What the answer to a health check says of a server's role and load."""

    role: Role = "both"
    receives_at: Annotated[str, Meta(max_length=256)] = ""
    queued_tokens: int = 0
    max_sequences: int = 0


_decode_state = msgspec.json.Decoder(State).decode
