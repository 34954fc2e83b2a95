"""Which key the router wants for a path, whatever else a client writes into its request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.datastructures import URL
from starlette.requests import Request

from chairlift.gateway.app import Gateway
from chairlift.gateway.pool import Pool
from chairlift.serving.keys import VARIABLE, Keyring
from chairlift.serving.routes import PAGE_ROUTES, ROUTES, Access, Route

_KEYRING = Keyring.read(None, {VARIABLE: "operator:sk-key-of-operator:admin,bob:sk-key-of-bob"})
_NO_SERVER = 503  # the request was accepted, and no server runs


def status(method: str, path: str, key: str | None = None) -> int:
    """The status of the router's reply, with no server behind it."""
    headers = [(b"host", b"router")] + ([] if key is None else [(b"authorization", f"Bearer {key}".encode())])
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "scheme": "http",
        "headers": headers,
    }
    sent: list[dict[str, Any]] = []
    received = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

    async def receive() -> dict[str, Any]:
        if (message := next(received, None)) is None:
            await asyncio.Event().wait()
        assert message is not None
        return message

    async def send(message: Any) -> None:
        sent.append(message)

    pool = Pool(["http://127.0.0.1:9"], "round-robin")
    asyncio.run(Gateway(pool, _KEYRING, 1 << 20)(scope, receive, send))
    return int(sent[0]["status"])


def test_the_host_header_opens_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starlette below 1.0 puts the Host header into the URL as it is: with `router/health?`, its path is /health."""
    monkeypatch.setattr(Request, "url", property(lambda _: URL("http://router/health?/v1/completions")))
    assert status("POST", "/v1/completions") == 401
    assert status("GET", "/metrics") == 401
    assert status("GET", "/metrics", "sk-key-of-bob") == 403
    assert status("POST", "/v1/completions", "sk-key-of-bob") == _NO_SERVER


@pytest.mark.parametrize("route", [each for each in (*ROUTES, *PAGE_ROUTES) if each.access is Access.ADMIN])
def test_what_needs_an_admin_key_at_a_server_needs_one_at_the_router(route: Route) -> None:
    """The servers behind it may have no keys."""
    assert status(route.method, route.path) == 401
    assert status(route.method, route.path, "sk-key-of-bob") == 403
    assert status(route.method, route.path, "sk-key-of-operator") in (200, _NO_SERVER)
