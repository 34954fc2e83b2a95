"""Backlog: the bytes in memory that one client has not read yet."""

from __future__ import annotations

from chairlift.text.outputs import Chunk

# A client that is further behind loses its answer: 60,000 plain tokens, or 3,000 with 64 log-probabilities each.
MOST = 32 << 20
_TOKEN, _ENTRY = 512, 160  # bytes of a token's piece, and of each log-probability in it


class Backlog:
    """Counts what waits for one client, beyond what its socket's own buffer holds."""

    def __init__(self) -> None:
        self.size = 0

    @property
    def is_full(self) -> bool:
        """Whether the client is too far behind."""
        return self.size > MOST


def size_of(piece: Chunk) -> int:
    """Return about how many bytes of memory a piece takes."""
    entries = 0 if piece.logprobs is None else sum(map(len, piece.logprobs))
    return _TOKEN * max(1, len(piece.token_ids)) + _ENTRY * entries
