"""The live page's files, with the headers that confine it."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

from starlette.responses import Response

INDEX = "index.html"
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
# Nothing from another server, no inline script or style, no frame around it.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # a browser may keep it, and asks each time whether it has changed
}


@cache
def _read() -> dict[str, tuple[bytes, str, str]]:
    """Return each file's content, type and ETag."""
    found = {}
    for file in files("chairlift.ui").iterdir():
        kind = _KINDS.get(file.name.rpartition(".")[2])
        if kind is not None:
            content = file.read_bytes()
            found[file.name] = content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return found


def asset(name: str, known: str | None = None) -> Response | None:
    """Return a file of the page, or 304 if the browser knows it; None if there is no such file.

    >>> asset("index.html").media_type, asset("../secret")
    ('text/html', None)
    """
    if name not in _read():
        return None
    content, kind, tag = _read()[name]
    headers = {**_HEADERS, "ETag": tag}
    return Response(status_code=304, headers=headers) if known == tag else Response(content, 200, headers, kind)
