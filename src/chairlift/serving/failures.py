"""Failure: an error response, that is, an HTTP status and OpenAI's error object."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from chairlift.core.errors import ChairliftError, ContextLengthError, RequestError
from chairlift.openai.params import is_field
from chairlift.openai.replies import error_object

_LONGEST = 400  # characters of a message


@dataclass(slots=True, eq=False)
class Failure(ChairliftError):  # noqa: N818  # a 429 or 503 only asks for a retry
    """The error response to a request."""

    message: str
    status: int
    kind: str
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None
    more_headers: dict[str, str] = field(default_factory=dict)
    is_paced: bool = False  # sent with a delay when there are many

    def __str__(self) -> str:
        return self.message

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object."""
        message = self.message
        if len(message) > _LONGEST:  # it quotes the wrong value, which may be as long as a body
            message = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 :]}"
        found: dict[str, Any] = error_object(message, self.kind, self.code, self.param)["error"]
        return found

    @property
    def headers(self) -> dict[str, str]:
        """Retry-After, where known, and the other headers of this failure."""
        again = {} if not self.retry_after else {"Retry-After": str(max(1, math.ceil(self.retry_after)))}
        return {**again, **self.more_headers}


def invalid(message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> Failure:
    """Return the failure of an invalid request."""
    return Failure(message, status, "invalid_request_error", code, param)


def from_request(error: RequestError) -> Failure:
    """Return the failure of a RequestError; `param` is its first word if that is the name of a field."""
    if isinstance(error, ContextLengthError):
        return _too_long(error)
    first = error.for_clients.split(" ", 1)[0]
    return invalid(error.for_clients, param=first if is_field(first) else None)


def _too_long(error: ContextLengthError) -> Failure:
    """Use OpenAI's code and wording: clients parse them to shorten a conversation and retry."""
    least, answer = (1, "at least 1") if error.max_tokens is None else (error.max_tokens, f"{error.max_tokens}")
    at_least = "at least " if error.is_estimate else ""
    return invalid(
        f"This model's maximum context length is {error.max_length} tokens. However, you requested "
        f"{at_least}{error.prompt_tokens + least} tokens ({at_least}{error.prompt_tokens} in the {error.field}, "
        f"{answer} in the completion). Please shorten the {error.field}.",
        param=error.field,
        code="context_length_exceeded",
    )


def unavailable(message: str, retry_after: float = 1.0) -> Failure:
    """Return the failure of a server that cannot serve at the moment; the client may retry."""
    return Failure(message, 503, "service_unavailable_error", "service_unavailable", retry_after=retry_after)


def timed_out(seconds: float) -> Failure:
    """Return the failure of a request that exceeded its timeout."""
    return Failure(
        f"the request was not done within its {seconds:g} s: raise timeout, or lower max_tokens",
        408,
        "timeout_error",
        "timeout",
    )


def broken(message: str) -> Failure:
    """Return the failure of a request that an engine error ended."""
    return Failure(message, 500, "server_error", "engine_error")
