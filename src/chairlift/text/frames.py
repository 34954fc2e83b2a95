"""Messages over a pipe: four bytes of length, then the message."""

from __future__ import annotations

from typing import IO

LENGTH_BYTES = 4


def length_of(message: bytes) -> bytes:
    """Return the length prefix of a message."""
    return len(message).to_bytes(LENGTH_BYTES, "big")


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Return the next message; None if the other process has closed the pipe."""
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "big")
    message = stream.read(size)
    return message if len(message) == size else None


def write_frame(stream: IO[bytes], message: bytes) -> None:
    """Write a message with its length."""
    stream.write(length_of(message))
    stream.write(message)
    stream.flush()
