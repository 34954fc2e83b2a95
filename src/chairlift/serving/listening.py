"""Acceptor accepts connections within the limit of open files; Connections closes clients that send or read too slowly.

The number of connections stays below the limit of open files, so that a descriptor is always left for a health check,
a log or the next engine process. At the limit, the connection that has had no request for longest is closed to accept
a new one; if every connection has a request, a new one may only use open routes.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from chairlift.core.errors import SettingsError
from chairlift.serving.connection import Connection, ParseQueue

log = logging.getLogger("chairlift")

_FILES = 1 << 16  # limit of open files to ask for: one per waiting or running request, and some for the rest
SPARE_FILES = 64  # descriptors kept for pipes and sockets of other processes, logs, closing connections
EXTRA = 32  # connections beyond the limit, on which only open routes are served
_ACCEPTS = 32  # per iteration of the event loop
_RETRY = 0.2  # seconds to pause after accept() has failed
_SWEEP = 0.5  # seconds between two checks of all connections
HEAD_SECONDS = 20.0  # to receive a request's head, from the connection's start or the head's first byte
LINGER_SECONDS = 2.0  # for a client to stop sending a rejected request
STALL_SECONDS = 30.0  # without a byte read by a client that has unread bytes
MOST_UNREAD = 256 << 20  # bytes in memory that all clients have not read
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def allow_files() -> None:
    """Raise this process's limit of open files: the usual 1,024 is too low for thousands of waiting requests."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def most_connections() -> int:
    """Return the limit of connections that keeps enough descriptors for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _FILES if soft == resource.RLIM_INFINITY else min(_FILES, soft)
    most = limit - _open_files() - SPARE_FILES - EXTRA
    if most < 1:
        needed = limit - most + 1
        raise SettingsError(f"the limit of open files is {limit}: raise it to {needed} or more (ulimit -n {needed})")
    return most


def _open_files() -> int:
    try:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:  # the system has no /proc
        return SPARE_FILES


class Connections:
    """All connections of one HTTP process."""

    def __init__(self, most: int, closed: Callable[[str], None] = lambda reason: None) -> None:
        self.most = most
        self.parse_queue = ParseQueue()
        self._closed = closed
        self._opening: dict[Connection, asyncio.Task[None]] = {}  # oldest first
        self._all: set[Connection] = set()
        self._without_request: dict[Connection, None] = {}  # idle for longest first

    def __len__(self) -> int:
        return len(self._all) + len(self._opening)

    def open(self, connection: Connection, task: asyncio.Task[None]) -> None:
        """Add a connection that is not ready: it may need a TLS handshake."""
        self._opening[connection] = task

    def add(self, connection: Connection) -> None:
        """Add a connection that is ready."""
        self._opening.pop(connection, None)
        self._all.add(connection)
        self._without_request[connection] = None

    def remove(self, connection: Connection) -> None:
        """Remove a connection."""
        self._opening.pop(connection, None)
        self._all.discard(connection)
        self._without_request.pop(connection, None)

    def serve(self, connection: Connection) -> None:
        """Protect a connection from eviction: its request has arrived whole."""
        self._without_request.pop(connection, None)

    def wait(self, connection: Connection) -> None:
        """Make a connection the last to be evicted: its request has been answered."""
        self._without_request.pop(connection, None)
        self._without_request[connection] = None

    @property
    def is_quiet(self) -> bool:
        """Whether every request has been answered and every response read."""
        return all(each in self._without_request and not each.unread for each in self._all)

    def make_room(self) -> bool:
        """Return whether a new connection fits; at the limit, evict one without a request."""
        if len(self) < self.most:
            return True
        if self._without_request:
            self._end(next(iter(self._without_request)), "evicted")
        elif self._opening:
            connection, task = next(iter(self._opening.items()))
            self.remove(connection)
            task.cancel()
        return len(self) < self.most

    def _end(self, connection: Connection, reason: str) -> None:
        self._closed(reason)
        self.remove(connection)
        connection.wire.abort()

    async def watch(self) -> None:
        """Close connections that exceed a time or memory limit, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP)
            try:
                self._sweep(loop.time())
            except Exception:
                log.exception("the connections could not be checked")

    def _sweep(self, now: float) -> None:
        unread = []
        for each in list(self._all):
            stalled = each.stalled(now)
            if stalled > STALL_SECONDS:
                self._end(each, "unread")
            elif each.wire.is_lingering and now - each.since > LINGER_SECONDS:
                each.wire.abort()
            elif each.awaits_head and now - each.since > HEAD_SECONDS:
                self._end(each, "no_head")
            elif each.unread:
                unread.append((stalled, each.unread, each))
        excess = sum(size for _, size, _ in unread) - MOST_UNREAD
        if excess > 0:
            # Close first the clients that have read nothing for longest, then the clients with most unread bytes.
            for _, size, each in sorted(unread, key=lambda found: found[:2], reverse=True):
                self._end(each, "unread")
                excess -= size
                if excess <= 0:
                    break


class Acceptor:
    """Accepts connections from a listening socket."""

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        make: Callable[[], Connection],
        context: ssl.SSLContext | None = None,
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._connections = connections
        self._make = make
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None
        self._start()

    def _start(self) -> None:
        self._again = None
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Stop accepting."""
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("no connection can be accepted: %s", error)
                self._loop.remove_reader(self._listener)
                self._again = self._loop.call_later(_RETRY, self._start)
                return
            accepted.setblocking(False)
            has_room = self._connections.make_room()
            if not has_room and len(self._connections) >= self._connections.most + EXTRA:
                with accepted, suppress(OSError):
                    accepted.send(_FULL)
                continue
            connection = self._make()
            connection.is_extra = not has_room
            self._connections.open(connection, self._loop.create_task(self._open(connection, accepted)))

    async def _open(self, connection: Connection, accepted: socket.socket) -> None:
        seconds = None if self._context is None else HEAD_SECONDS
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, accepted, ssl=self._context, ssl_handshake_timeout=seconds
            )
        except (OSError, asyncio.CancelledError):  # the client disconnected, failed the TLS handshake, or was evicted
            self._connections.remove(connection)
