"""Replies in pieces: none is copied into one string, and a piece that is sent is freed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from starlette.responses import Response

_SLICE = 64 << 10  # bytes of a reply that are written at a time


class PiecesResponse(Response):
    """JSON in pieces of bytes; `service.send_reply` writes each when the client has taken those before it."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        super().__init__(media_type="application/json")
        self.pieces = deque(pieces)
        self.headers["content-length"] = str(sum(map(len, self.pieces)))


def pieces_of(response: Response) -> deque[bytes]:
    """Return a reply's body in pieces."""
    if isinstance(response, PiecesResponse):
        return response.pieces
    body = bytes(response.body)
    return deque(body[start : start + _SLICE] for start in range(0, len(body), _SLICE))
