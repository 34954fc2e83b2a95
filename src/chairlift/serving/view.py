"""The live page with a recorded run in place of a server: `chairlift view FILE`."""

from __future__ import annotations

import asyncio
import contextlib
import html
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from chairlift.core.errors import ChairliftError
from chairlift.engine.record_file import KIND
from chairlift.serving.assets import INDEX, asset
from chairlift.serving.http_server import HttpServer, listen
from chairlift.serving.listening import allow_files

_PART = 256 << 10  # bytes per write
_LONGEST_HEAD = 1 << 16


def check(file: Path) -> None:
    """Raise a ChairliftError if a file is not a recording."""
    made = "record one with --record-view FILE, which simulate, compare and bench offline take"
    try:
        with file.open("rb") as opened:
            head = opened.readline(_LONGEST_HEAD)
    except OSError as error:
        raise ChairliftError(f"{file} cannot be read: {error.strerror or error}; {made}") from None
    kind = None
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(head)
        kind = found.get("kind") if isinstance(found, dict) else None
    if kind != KIND:
        raise ChairliftError(f"{file} is not a recording: {made}")


class ViewApp:
    """The page, its files and the recording; nothing else."""

    def __init__(self, file: Path) -> None:
        self._file = file

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one HTTP request."""
        if scope["type"] == "http":
            await self._response(HttpRequest(scope, receive))(scope, receive, send)

    def _response(self, http: HttpRequest) -> Response:
        path = http.url.path
        if http.method != "GET":
            return PlainTextResponse("use GET\n", 405, {"Allow": "GET"})
        if path == "/":
            return self._page()
        if path == "/ui/recording":
            return StreamingResponse(self._lines(), media_type="application/jsonl")
        found = asset(path.removeprefix("/ui/"), http.headers.get("if-none-match")) if path.startswith("/ui/") else None
        return found or PlainTextResponse("not found\n", 404)

    def _page(self) -> Response:
        """Return the page, which learns from its root element that there is a recording."""
        page = asset(INDEX)
        assert page is not None
        name = html.escape(self._file.name, quote=True).encode(errors="replace")
        body = bytes(page.body).replace(b"<html ", b'<html data-recording="' + name + b'" ', 1)
        kept = ("content-length", "content-type", "etag")
        headers = {name: value for name, value in page.headers.items() if name not in kept}
        return Response(body, 200, headers, "text/html")

    async def _lines(self) -> AsyncIterator[bytes]:
        with self._file.open("rb") as opened:
            while part := await asyncio.to_thread(opened.read, _PART):
                yield part


async def _serve(file: Path, host: str, port: int, say: Callable[[str], None]) -> None:
    listener = listen(host, port)
    server = HttpServer(ViewApp(file), listener, lambda reason: None)

    async def close() -> None:
        """Close nothing: a file needs no end."""

    shown = f"[{host}]" if ":" in host else host
    say(f"{file} at address http://{shown}:{listener.getsockname()[1]}/   (Ctrl-C ends it)")
    await server.run(0.0, lambda: None, lambda: 0, close)


def run(file: Path, host: str, port: int, say: Callable[[str], None]) -> int:
    """Serve the page with a recording until a signal; return the exit code."""
    check(file)
    allow_files()
    asyncio.run(_serve(file, host, port, say))
    return 0
