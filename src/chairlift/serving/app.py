"""The ASGI application: it finds the route, checks the API key, and turns every exception into an error object."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Match
from starlette.routing import Route as Pattern

from chairlift.apis.front import CHAT, Front
from chairlift.core.errors import RequestError
from chairlift.openai.options import NAME
from chairlift.openai.replies import new_id
from chairlift.serving.body import BodyError
from chairlift.serving.failures import Failure, from_request, invalid, unavailable
from chairlift.serving.keys import Tenant
from chairlift.serving.metrics import OVERLOADED
from chairlift.serving.replying import Streamed, json_response, send_reply
from chairlift.serving.routes import PAGE_ROUTES, ROUTES, Access, Route
from chairlift.serving.service import CLIENT_DISCONNECTED, Call, Service

log = logging.getLogger("chairlift")
access_log = logging.getLogger("chairlift.access")


class App:
    """Serves the routes of one Service; CORS headers only for the given origins."""

    def __init__(self, service: Service, origins: Sequence[str] = ()) -> None:
        self.service = service
        self._origins = frozenset(origins)
        routes = ROUTES if service.page is None else (*ROUTES, *PAGE_ROUTES)
        self._patterns = [(Pattern(each.path, _nothing, methods=[each.method]), each) for each in routes]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one HTTP request."""
        if scope["type"] == "lifespan":
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        start = time.monotonic()
        http = HttpRequest(scope, receive)
        call = Call(self.service, http, None, _request_id(http))
        route: Route | None = None
        failure: Failure | None = None
        try:
            response = self._preflight(http)
            if response is None:
                route = self._find(scope)
                self._check_room(route, scope)
                call.tenant = self._authorize(route, http)
                response = await route.endpoint(call)
        except ClientDisconnect:
            response = Response(status_code=CLIENT_DISCONNECTED)
        except Exception as error:
            failure = self._explain(error, call)
            content = front_of(route).error(failure.error, failure.status, call.id)
            response = json_response(content, failure.status, failure.headers)
        if failure is not None and failure.is_paced:
            call.close()  # what it holds counts against other requests
            await asyncio.sleep(self.service.pace.delay(time.monotonic()))
        response.headers["X-Request-Id"] = call.id
        if (header := front_of(route).id_header) is not None:
            response.headers[header] = call.id
        if call.ignored:
            names = (quote(name[:100], errors="replace")[:200] for name in call.ignored[:20])  # bounds the header
            response.headers["X-Chairlift-Ignored-Fields"] = ", ".join(names)
        self._allow_origin(http, response)
        try:
            if isinstance(response, Streamed):
                await response(scope, receive, send)
            else:
                await send_reply(response, send, call.backlog, call.close)
        finally:
            call.close()
            self._note(call, route, response.status_code, time.monotonic() - start, failure)

    def _explain(self, error: Exception, call: Call) -> Failure:
        """Return the error that is sent to the client; an unexpected one is logged."""
        if isinstance(error, Failure):
            if error.code in OVERLOADED:
                call.model.metrics.refused(error.code)
            return error
        if isinstance(error, RequestError | BodyError):
            call.model.metrics.refused("invalid")
            return from_request(error) if isinstance(error, RequestError) else invalid(str(error), code="invalid_body")
        log.error("a request failed with an unexpected error", exc_info=error, extra={"request_id": call.id})
        return Failure("unexpected error in the server: its log has the details", 500, "server_error", "internal_error")

    def _find(self, scope: Any) -> Route:
        allowed = []
        for pattern, route in self._patterns:
            match, child = pattern.matches(scope)
            if match is Match.FULL:
                scope.update(child)
                return route
            if match is Match.PARTIAL and route.method not in allowed:
                allowed.append(route.method)
        if allowed:
            wanted = f"{scope['path']} takes {' or '.join(allowed)}, not {scope['method']}"
            failure = invalid(wanted, status=405, code="wrong_method")
            failure.more_headers["Allow"] = ", ".join(allowed)
            raise failure
        hint = self._hint(scope) or "see /openapi.json for the routes"
        raise invalid(f"there is no {scope['path']}: {hint}", status=404, code="unknown_route")

    def _hint(self, scope: Any) -> str | None:
        """Suggest a route that differs only by /v1: a client's base URL may lack it, or have it twice."""
        path = scope["path"]
        for meant in (f"/v1{path}", path.removeprefix("/v1")):
            if any(pattern.matches({**scope, "path": meant})[0] is not Match.NONE for pattern, _ in self._patterns):
                of_client = " The base URL of an OpenAI client ends with /v1" if meant.startswith("/v1/") else ""
                if meant.startswith("/v1/messages"):
                    of_client = " The base URL of an Anthropic client ends without /v1"
                return f"did you mean {meant}?{of_client}"
        return None

    def _check_room(self, route: Route, scope: Any) -> None:
        """Reject all but open routes on connections that were accepted beyond the limit."""
        connection = scope.get("state", {}).get("connection")
        if connection is not None and connection.is_extra and route.access is not Access.OPEN:
            self.service.first.metrics.refused("connections")
            failure = unavailable("the server is at its limit of connections: try again in a moment")
            failure.more_headers["Connection"] = "close"
            raise failure

    def _authorize(self, route: Route, http: HttpRequest) -> Tenant | None:
        keyring = self.service.keyring
        if keyring is None or route.access is Access.OPEN:
            return None
        tenant = keyring.find(http.headers.get("authorization")) or keyring.find_key(http.headers.get("x-api-key"))
        if tenant is None:
            self.service.first.metrics.refused("unauthorized")
            raise Failure(
                "no valid API key: send Authorization: Bearer YOUR_KEY, or x-api-key: YOUR_KEY",
                401,
                "authentication_error",
                "invalid_api_key",
                more_headers={"WWW-Authenticate": "Bearer"},
            )
        if route.access is Access.ADMIN and not tenant.is_admin:
            raise Failure(f"{route.path} needs an admin key", 403, "permission_error", "admin_only")
        return tenant

    # ---- CORS

    def _preflight(self, http: HttpRequest) -> Response | None:
        if http.method != "OPTIONS" or "access-control-request-method" not in http.headers or not self._origins:
            return None
        wanted = http.headers.get("access-control-request-headers", "authorization, content-type")
        return Response(
            status_code=204,
            headers={
                "Access-Control-Allow-Methods": "GET, POST",
                "Access-Control-Allow-Headers": quote(wanted, safe=", "),
            },
        )

    def _allow_origin(self, http: HttpRequest, response: Response) -> None:
        origin = http.headers.get("origin")
        if origin is not None and ("*" in self._origins or origin in self._origins):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Vary"] = "Origin"

    # ---- metrics, traces and the access log

    def _note(self, call: Call, route: Route | None, status: int, seconds: float, failure: Failure | None) -> None:
        path = "other" if route is None else route.path
        call.model.metrics.responded(path, status, seconds)
        if self.service.traces is not None and call.http.method == "POST":
            self.service.traces.record(path, status, seconds, call.id, call.http.headers, call.outputs)
        access_log.info(
            "%s %s %d",
            call.http.method,
            path,
            status,
            extra={
                "request_id": call.id,
                "seconds": round(seconds, 4),
                "tenant": None if call.tenant is None else call.tenant.name,
                "code": None if failure is None else failure.code,
                "why": None if failure is None else failure.error["message"],  # shortened by `error`
            },
        )


def front_of(route: Route | None) -> Front:
    """Return the API that determines the shape of a route's errors: OpenAI's, unless the route has its own."""
    return CHAT if route is None else route.front


def _request_id(http: HttpRequest) -> str:
    """Return the client's X-Request-Id if it is a valid name, else a new id."""
    given = http.headers.get("x-request-id", "")
    return given if NAME.fullmatch(given) else new_id("req").removeprefix("req-")


async def _nothing(_request: HttpRequest) -> Response:
    raise AssertionError("App calls the endpoints itself")
