"""PiecesResponse: a reply as a list of pieces, which are not joined; each is freed once sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from starlette.responses import Response

_SLICE = 64 << 10  # bytes of a reply per write


class PiecesResponse(Response):
    """JSON in pieces of bytes; `service.send_reply` writes each when the client has read the pieces before it."""

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
