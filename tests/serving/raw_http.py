"""HTTP by hand over a socket, for what no client library would send."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from running import Running

COMPLETION = "/v1/completions"


def address_of(server: Running) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


@contextmanager
def connected(server: Running, *, buffer: int | None = None) -> Iterator[socket.socket]:
    """A raw connection, with a small buffer for what is not read if told so."""
    with socket.socket() as client:
        if buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        client.connect(address_of(server))
        client.settimeout(240)  # far longer than a busy machine takes for the largest of these
        yield client


def post(body: dict[str, Any], key: str | None = None) -> bytes:
    content = json.dumps(body).encode()
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    return (
        f"POST {COMPLETION} HTTP/1.1\r\nHost: x\r\n{authorization}Content-Length: {len(content)}\r\n\r\n".encode()
        + content
    )


def in_chunks(body: bytes, size: int, key: str | None = None) -> bytes:
    """A request with a body in chunks of so many bytes."""
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"POST {COMPLETION} HTTP/1.1\r\nHost: x\r\n{authorization}Transfer-Encoding: chunked\r\n\r\n".encode()
    parts = (body[start : start + size] for start in range(0, len(body), size))
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def read_all(client: socket.socket) -> bytes:
    """All that comes until the server closes."""
    found = b""
    while part := client.recv(1 << 20):
        found += part
    return found


def read_reply(client: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """The status, the headers and the body of one reply."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        part = client.recv(1 << 16)
        assert part, f"the reply broke off after {raw!r}"
        raw += part
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers["content-length"]):
        part = client.recv(1 << 20)
        assert part, "the body broke off"
        body += part
    return int(first.split()[1]), headers, body
