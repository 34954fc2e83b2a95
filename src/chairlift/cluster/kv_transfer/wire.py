"""The messages of a KV connection: framed, typed and bounded; both ends first prove that they know the key."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import stat
import struct
import time
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from chairlift.core.errors import ChairliftError, SettingsError

HANDSHAKE_SECONDS = 5.0  # for the proof of the key in all; then, up to Welcome, without a byte
_LEAST_WAIT = 0.001  # seconds; a timeout of 0 would make the socket non-blocking
MAX_FRAME = 17 << 20  # bytes: the tokens of the longest prompt that an engine accepts, packed
MOST_SLOTS = 1 << 16
_LENGTH = struct.Struct("<I")
_NONCE = 32  # bytes
_LEAST_KEY = 16  # bytes of a cluster key

Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
Handle = Annotated[list[bytes | int | bool], Meta(max_length=16)]
Slots = Annotated[list[Annotated[int, Meta(ge=0, lt=MOST_SLOTS)]], Meta(max_length=MOST_SLOTS)]


class LinkError(ConnectionError):
    """The connection has ended, or the other end does not keep to the protocol."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """From the sender: its blocks, which must be the same in every byte as the receiver's."""

    layout: Annotated[str, Meta(max_length=64)]  # digest of the model and of a block's layout
    block_bytes: Number
    ways: Annotated[list[Annotated[str, Meta(max_length=8)]], Meta(max_length=4)]  # that it can use, the best first


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """From the receiver: its slots, all of which the sender may fill; a descriptor of shared memory follows for shm."""

    slots: Annotated[int, Meta(ge=1, lt=MOST_SLOTS)]
    way: Annotated[str, Meta(max_length=8)]  # one of the sender's
    handle: Handle = []  # of memory on a GPU, for cuda; of registered memory, for nixl


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """From the receiver, instead of Welcome."""

    reason: Annotated[str, Meta(max_length=1024)]


class Prompt(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """From the sender: a prompt of which blocks follow."""

    transfer: Number
    salt: Annotated[str, Meta(max_length=512)]
    key: Annotated[bytes, Meta(max_length=1 << 24)]  # its packed tokens, of whole blocks


class Blocks(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """From the sender: consecutive blocks are in these slots; for tcp their bytes follow."""

    transfer: Number
    first: Number
    slots: Slots


class End(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """From the sender: no more blocks of a prompt follow."""

    transfer: Number


class Read(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """From the receiver: these slots have been copied into the cache or are not needed, and may be filled again."""

    slots: Slots


Message = Hello | Welcome | Refused | Prompt | Blocks | End | Read
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


def send(link: socket.socket, message: Message) -> None:
    """Send one message."""
    raw = _encode(message)
    try:
        link.sendall(_LENGTH.pack(len(raw)) + raw)
    except OSError as error:
        raise LinkError(f"the other end is gone: {error}") from None


def receive(link: socket.socket) -> Message:
    """Wait for one message."""
    (length,) = _LENGTH.unpack(read(link, _LENGTH.size))
    if length > MAX_FRAME:
        raise LinkError(f"a message of {length:,} bytes was announced: the largest has {MAX_FRAME:,}")
    try:
        found: Message = _decode(read(link, length))
        return found
    except msgspec.DecodeError as error:
        raise LinkError(f"a message could not be decoded: {error}") from None


def read(link: socket.socket, count: int, end: float | None = None) -> bytes:
    """Read exactly so many bytes, until a time if one is given."""
    found = bytearray(count)
    read_into(link, memoryview(found), end)
    return bytes(found)


def read_into(link: socket.socket, target: memoryview, end: float | None = None) -> None:
    """Fill a piece of memory."""
    filled = 0
    while filled < len(target):
        try:
            if end is not None:
                link.settimeout(max(_LEAST_WAIT, end - time.monotonic()))
            count = link.recv_into(target[filled:])
        except OSError as error:
            raise LinkError(f"the other end is gone: {error}") from None
        if not count:
            raise LinkError("the other end has closed the connection")
        filled += count


def prove(link: socket.socket, key: bytes, *, is_sender: bool) -> None:
    """Prove to each other that both ends know the key, without sending it; LinkError if the other end does not.

    The link's timeout bounds the proof in all: a peer without the key may send one byte after the other.
    """
    seconds = link.gettimeout()
    end = None if seconds is None else time.monotonic() + seconds
    own = secrets.token_bytes(_NONCE)
    _send_raw(link, own)
    other = read(link, _NONCE, end)
    sender, receiver = (own, other) if is_sender else (other, own)
    proofs = [hmac.digest(key, side + sender + receiver, "sha256") for side in (b"kv sender", b"kv receiver")]
    mine, expected = proofs if is_sender else reversed(proofs)
    _send_raw(link, mine)
    if not hmac.compare_digest(read(link, len(expected), end), expected):
        raise LinkError("the other end has another cluster key")
    link.settimeout(seconds)


def _send_raw(link: socket.socket, raw: bytes) -> None:
    try:
        link.sendall(raw)
    except OSError as error:
        raise LinkError(f"the other end is gone: {error}") from None


def connect(address: str, key: bytes) -> socket.socket:
    """Connect to a receiver at unix:PATH or tcp:HOST:PORT, and prove the key."""
    kind, _, where = address.partition(":")
    link = socket.socket(socket.AF_UNIX) if kind == "unix" else None
    try:
        if link is not None:
            link.settimeout(HANDSHAKE_SECONDS)
            link.connect(where)
        else:
            host, _, port = where.rpartition(":")
            link = socket.create_connection((host.strip("[]"), int(port)), HANDSHAKE_SECONDS)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(link)
        # A Unix socket is in a folder of this user alone: no key is needed to reach it.
        prove(link, key if kind == "tcp" else b"", is_sender=True)
    except (OSError, ValueError) as error:
        if link is not None:
            link.close()
        raise LinkError(f"{address} cannot be reached: {error}") from None
    return link


def keep_alive(link: socket.socket) -> None:
    """Notice within half a minute that the other host is gone."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen(address: str) -> socket.socket:
    """Return a listening socket at unix:PATH or tcp:HOST:PORT."""
    kind, _, where = address.partition(":")
    try:
        if kind == "unix":
            Path(where).unlink(missing_ok=True)  # of an engine that was killed
            link = socket.socket(socket.AF_UNIX)
            link.bind(where)
            link.listen()
            return link
        host, _, port = where.rpartition(":")
        return socket.create_server((host.strip("[]"), int(port)))
    except (OSError, ValueError) as error:
        raise SettingsError(f"KV blocks cannot be received at {address}: {error}") from None


def read_key(path: Path) -> bytes:
    """Read the cluster's key from a file that only its owner can read."""
    try:
        mode = path.stat().st_mode
        found = path.read_bytes().strip()
    except OSError as error:
        raise ChairliftError(f"the cluster key {path} cannot be read: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077 and os.name == "posix":
        raise ChairliftError(f"the cluster key {path} can be read by other users: run chmod 600 {path}")
    if len(found) < _LEAST_KEY:
        raise ChairliftError(
            f"the cluster key {path} has {len(found)} bytes: use at least {_LEAST_KEY}, such as those of openssl rand "
            "-hex 32"
        )
    return found
