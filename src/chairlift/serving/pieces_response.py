"""A reply that is written in pieces: none of it is copied into one string, and a piece that is sent is freed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from starlette.responses import Response


class PiecesResponse(Response):
    """JSON in pieces of bytes; each is written when the client has taken those before it."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        super().__init__(media_type="application/json")
        self._pieces = deque(pieces)
        self.headers["content-length"] = str(sum(map(len, self._pieces)))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while self._pieces:
            await send({"type": "http.response.body", "body": self._pieces.popleft(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
