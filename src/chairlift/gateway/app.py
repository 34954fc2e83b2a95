"""Gateway: the ASGI app that passes each request on to a server, and to another if the first cannot take it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from chairlift import __version__
from chairlift.apis.front import Front
from chairlift.apis.fronts import CHAT, MESSAGES, RESPONSES
from chairlift.gateway.asks import read_ask
from chairlift.gateway.exchange import Lost
from chairlift.gateway.forward import Body, Forward
from chairlift.gateway.pool import Pool
from chairlift.serving.admission import Admission, Refused
from chairlift.serving.failures import Failure, invalid, unavailable
from chairlift.serving.families import CONTENT_TYPE
from chairlift.serving.keys import Keyring, Tenant
from chairlift.serving.replying import json_response

log = logging.getLogger("chairlift")
access_log = logging.getLogger("chairlift.access")

_LARGE_BODY = 20_000  # bytes of JSON above which parsing runs in a thread, to keep the event loop free
_BODY_SECONDS = 60.0  # for a client to send its body
_BODIES = 256 << 20  # bytes of bodies in memory, in all: each is kept until its reply begins, for another attempt
_REPLY = 1 << 20  # bytes of a reply that is read whole

_FRONTS = {"/v1/messages": MESSAGES, "/v1/responses": RESPONSES}  # the shapes of errors, by the path's beginning
_OPEN = ("/health", "/ready", "/version", "/openapi.json")  # paths that need no key
_ADMINS = ("/metrics", "/reset_prefix_cache", "/ui/events")  # and those that need an admin's

Endpoint = Callable[[HttpRequest], Awaitable[Response]]


class Gateway:
    """Routes requests to the servers of a pool."""

    def __init__(self, pool: Pool, keyring: Keyring | None, max_body: int) -> None:
        self.is_draining = False
        self._pool = pool
        self._keyring = keyring
        self._max_body = max_body
        self._held = 0  # bytes of bodies
        # The servers bound their queues; only the limits of tenants are held here.
        self._admission = Admission(1 << 20, 1 << 40)
        self._own: dict[tuple[str, str], Endpoint] = {
            ("GET", "/health"): self._health,
            ("GET", "/ready"): self._ready,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/version"): self._version,
            ("GET", "/v1/models"): self._models,
            ("POST", "/reset_prefix_cache"): self._reset,
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one HTTP request."""
        if scope["type"] != "http":
            return
        start, http = time.monotonic(), HttpRequest(scope, receive)
        front = next((front for path, front in _FRONTS.items() if scope["path"].startswith(path)), CHAT)
        status = 499
        try:
            status = await self._serve(http, front, send)
        except ClientDisconnect:
            pass
        except Exception as error:
            failure = error if isinstance(error, Failure) else self._unexpected(error)
            status = failure.status
            content = front.error(failure.error, failure.status, "")
            await json_response(content, failure.status, failure.headers)(scope, receive, send)
        finally:
            seconds = round(time.monotonic() - start, 4)
            access_log.info("%s %s %d", http.method, scope["path"][:100], status, extra={"seconds": seconds})

    def _unexpected(self, error: Exception) -> Failure:
        log.error("a request failed with an unexpected error", exc_info=error)
        return Failure("unexpected error in the router: its log has the details", 500, "server_error", "internal_error")

    async def _serve(self, http: HttpRequest, front: Front, send: Any) -> int:
        tenant = self._authorize(http)
        own = self._own.get((http.method, http.scope["path"]))
        if own is not None:
            response = await own(http)
            await response(http.scope, http.receive, send)
            return response.status_code
        self._check_room(http)
        return await self._forward(http, front, tenant, send)

    def _authorize(self, http: HttpRequest) -> Tenant | None:
        headers, path = http.headers, http.scope["path"]  # not http.url, which also reads the client's Host header
        if self._keyring is None or path in _OPEN:
            return None
        tenant = self._keyring.find(headers.get("authorization")) or self._keyring.find_key(headers.get("x-api-key"))
        if tenant is None:
            message = "no valid API key: send Authorization: Bearer YOUR_KEY, or x-api-key: YOUR_KEY"
            raise Failure(message, 401, "authentication_error", "invalid_api_key")
        if path in _ADMINS and not tenant.is_admin:
            raise Failure(f"{path} needs an admin key", 403, "permission_error", "admin_only")
        return tenant

    def _check_room(self, http: HttpRequest) -> None:
        connection = http.scope.get("state", {}).get("connection")
        if connection is not None and connection.is_extra:
            raise unavailable("the router is at its limit of connections: try again in a moment")
        if self.is_draining:
            raise unavailable("the router is shutting down: try another, or again in a moment", 5.0)

    # ---- passing on

    async def _forward(self, http: HttpRequest, front: Front, tenant: Tenant | None, send: Any) -> int:
        body = Body(self._count)
        admitted = None
        try:
            await self._receive(http, body)
            key = http.headers.get("authorization") or http.headers.get("x-api-key") or ""
            session, is_small = http.headers.get("x-session-id"), len(body.raw) <= _LARGE_BODY
            read = (
                read_ask(body.raw, key, session)
                if is_small
                else await asyncio.to_thread(read_ask, body.raw, key, session)
            )
            try:
                admitted = self._admission.admit(tenant, read.ask.tokens, 0, time.monotonic())
            except Refused as error:
                found = error.refusal
                raise Failure(found.message, 429, "rate_limit_error", found.reason, None, found.retry_after) from None
            return await Forward(self._pool, http, front, read, admitted, body).run(send)
        finally:
            body.free()
            if admitted is not None:
                admitted.release(time.monotonic())

    def _count(self, size: int) -> None:
        self._held += size

    async def _receive(self, http: HttpRequest, body: Body) -> None:
        most = self._max_body
        too_large = invalid(f"the body is larger than {most:,} bytes: send less", status=413, code="body_too_large")
        declared = http.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > most:
            raise too_large
        raw = bytearray()
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for part in http.stream():
                    raw += part
                    body.hold(len(part))
                    if len(raw) > most:
                        raise too_large
                    if self._held > _BODIES:
                        message = f"the router holds {self._held:,} bytes of bodies: try again in 1 s"
                        raise Failure(message, 429, "rate_limit_error", "too_many_bodies", retry_after=1.0)
        except TimeoutError:
            raise invalid(f"the body did not arrive within {_BODY_SECONDS:.0f} s", status=408, code="timeout") from None
        body.raw = bytes(raw)

    # ---- the router's own routes

    async def _health(self, http: HttpRequest) -> Response:
        return self._state("ok", "unhealthy", self._pool.trouble)

    async def _ready(self, http: HttpRequest) -> Response:
        trouble = "the router is shutting down" if self.is_draining else self._pool.trouble
        return self._state("ready", "not ready", trouble)

    def _state(self, good: str, bad: str, trouble: str | None) -> Response:
        servers = {name: backend.trouble or "ok" for name, backend in self._pool.backends.items()}
        if trouble is None:
            return json_response({"status": good, "servers": servers})
        return json_response({"status": bad, "reason": trouble, "servers": servers}, 503)

    async def _metrics(self, http: HttpRequest) -> Response:
        return Response(self._pool.render(), media_type=CONTENT_TYPE)

    async def _version(self, http: HttpRequest) -> Response:
        return json_response({"version": __version__})

    async def _models(self, http: HttpRequest) -> Response:
        """List the models of all servers, each once."""
        replies = await self._ask_all(http)
        found: dict[str, Any] = {}
        for status, content in replies:
            if status == 200 and isinstance(content, dict):
                models = content.get("data")
                for each in models if isinstance(models, list) else ():
                    if isinstance(each, dict):
                        found.setdefault(str(each.get("id")), each)
        if not any(status == 200 for status, _ in replies):
            return json_response(replies[0][1], replies[0][0])
        return json_response({"object": "list", "data": list(found.values())})

    async def _reset(self, http: HttpRequest) -> Response:
        """Empty the prefix caches of all servers."""
        replies = await self._ask_all(http)
        for name in self._pool.backends:
            self._pool.router.forget(name)
        failed = [(status, content) for status, content in replies if status != 200]
        if failed:
            return json_response(failed[0][1], failed[0][0])
        counts = (content.get("blocks") for _, content in replies if isinstance(content, dict))
        return json_response({"blocks": sum(count for count in counts if isinstance(count, int))})

    async def _ask_all(self, http: HttpRequest) -> list[tuple[int, Any]]:
        """Send a request without a body to all servers that work; return each status and content."""
        keys = [(name, value) for name, value in http.headers.raw if name in (b"authorization", b"x-api-key")]

        async def ask(backend: Any) -> tuple[int, Any]:
            try:
                exchange = await backend.send(http.method, http.scope["path"], keys, b"")
                try:
                    return exchange.status, msgspec.json.decode(await exchange.read_all(_REPLY))
                finally:
                    backend.release(exchange)
            except (Lost, msgspec.MsgspecError, UnicodeDecodeError) as error:
                return 502, {"error": unavailable(f"{backend.name}: {error}").error}

        replies = await asyncio.gather(*map(ask, self._pool.working))
        if not replies:
            raise unavailable(self._pool.trouble or "no server works", 2.0)
        return list(replies)
