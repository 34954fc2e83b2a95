"""Backlog: bytes in memory that one client has not read."""

from __future__ import annotations

from chairlift.text.outputs import Chunk

# Bytes above which a stream is aborted: 60,000 plain tokens, or 3,000 with 64 log-probabilities each.
MOST = 32 << 20
_TOKEN, _ENTRY = 512, 160  # bytes of a chunk per token, and per log-probability


class Backlog:
    """Counts the bytes that one client has not read, without those in the socket's buffer."""

    def __init__(self) -> None:
        self.size = 0

    @property
    def is_full(self) -> bool:
        """Whether the client has left more than MOST bytes unread."""
        return self.size > MOST


def size_of(piece: Chunk) -> int:
    """Return the approximate size of a chunk in memory, in bytes."""
    entries = 0 if piece.logprobs is None else sum(map(len, piece.logprobs))
    return _TOKEN * max(1, len(piece.token_ids)) + _ENTRY * entries
