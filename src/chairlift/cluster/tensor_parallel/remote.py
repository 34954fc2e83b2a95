"""Ranks on other hosts: each has a connection with rank 0, for messages in one direction and reports in the other.

A rank host (rank_host.py) waits for rank 0 there and starts the rank's process, which inherits the connection:
whichever end is lost, the other one sees the connection close.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import Annotated

import msgspec
from msgspec import Meta

from chairlift.cluster.kv_transfer.wire import LinkError, connect, keep_alive, prove, read
from chairlift.core.errors import ChairliftError, DeviceError

_LENGTH = struct.Struct("<I")
MAX_FRAME = 64 << 20  # bytes: a step of the longest prompts takes far fewer
# For the proof of the key, in all: a host has one handshake at a time, and rank 0 waits longer for its own.
PROOF_SECONDS = 3.0
JOB_SECONDS = 10.0  # for the first message after it, which rank 0 sends when it has reached all hosts


class Remote(msgspec.Struct, frozen=True):
    """Where the ranks other than rank 0 are."""

    addresses: list[str]  # HOST:PORT of the rank hosts of ranks 1 and up, in order
    key: str  # that they know
    own: str  # address of this host, at which ranks reach rank 0 and each other


class RankJob(msgspec.Struct, frozen=True):
    """The first message to a rank host: the rank to start there."""

    rank: Annotated[int, Meta(ge=1)]
    size: Annotated[int, Meta(ge=2, le=1024)]
    is_cuda: bool
    host: str  # address of rank 0's store, where the ranks find each other
    port: Annotated[int, Meta(ge=1, le=65535)]


def call(remote: Remote) -> list[socket.socket]:
    """Connect to all rank hosts and prove the key; raise a ChairliftError if one does not answer."""
    links: list[socket.socket] = []
    try:
        for address in remote.addresses:
            links.append(connect(f"tcp:{address}", remote.key.encode()))
            links[-1].settimeout(None)
    except LinkError as error:
        for link in links:
            link.close()
        raise ChairliftError(f"rank {len(links) + 1} of {len(remote.addresses) + 1}: {error}") from None
    return links


def accept(link: socket.socket, key: str) -> RankJob:
    """Let rank 0 prove the key, and return its first message; raise a LinkError if it breaks the protocol."""
    link.settimeout(PROOF_SECONDS)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(link)
    prove(link, key.encode(), is_sender=False)
    link.settimeout(JOB_SECONDS)
    try:
        job = msgspec.json.decode(read_frame(link), type=RankJob)
    except msgspec.DecodeError as error:
        raise LinkError(f"the first message is not a rank's job: {error}") from None
    link.settimeout(None)
    return job


def frame(message: bytes) -> bytes:
    """Return a message with its length before it."""
    return _LENGTH.pack(len(message)) + message


def read_frame(link: socket.socket) -> bytes:
    """Wait for one message; raise a LinkError if the connection ends."""
    (length,) = _LENGTH.unpack(read(link, _LENGTH.size))
    if length > MAX_FRAME:
        raise LinkError(f"a message of {length:,} bytes was announced: the largest has {MAX_FRAME:,}")
    return read(link, length)


class SocketSender:
    """Sends each message to all ranks."""

    def __init__(self, links: list[socket.socket]) -> None:
        self._links = links
        self.is_broken = False  # a rank that is lost closes its connection, which is seen here

    def send(self, message: bytes) -> None:
        """Send a message; DeviceError if a rank is lost."""
        whole = frame(message)
        try:
            for link in self._links:
                link.sendall(whole)
        except OSError as error:
            raise DeviceError(f"the connection to a rank has ended: {error}") from None

    def close(self) -> None:
        """End the messages: ranks that have read all of them end."""
        for link in self._links:
            with suppress(OSError):
                link.shutdown(socket.SHUT_WR)


class SocketReceiver:
    """Reads the messages of a SocketSender."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

    def receive(self) -> bytes | None:
        """Wait for the next message; None if rank 0 has ended the messages or is lost."""
        try:
            return read_frame(self._link)
        except LinkError:
            return None


class RemoteProcess:
    """A rank's process on another host, as far as its connection tells."""

    pid = 0

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._has_ended = False

    def poll(self) -> int | None:
        """Return 0 if the connection has ended, else None."""
        try:
            if not self._has_ended and self._link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                return None
            self._has_ended = True
        except BlockingIOError:
            return None
        except OSError:
            self._has_ended = True
        return 0

    def kill(self) -> None:
        """Close the connection: the host ends the process."""
        self._has_ended = True
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    def wait(self) -> int:
        """Close this end."""
        self._link.close()
        return 0
