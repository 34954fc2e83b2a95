"""The fields of a request's body besides sampling: streaming, timeouts, priority, cache salt, ids and echo."""

from __future__ import annotations

import re
from dataclasses import dataclass

from chairlift.core.errors import RequestError
from chairlift.core.params import SamplingParams
from chairlift.openai.params import Body, get

NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # of a request id, which is written to headers and logs
LONGEST = 7 * 24 * 3600.0  # seconds, of timeout and ttft
_PRIORITIES = 1 << 31


@dataclass(frozen=True, slots=True)
class Options:
    """A request's fields besides sampling, read once from its body."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False  # usage in every chunk, not only in the last
    timeout: float | None = None
    priority: int = 0  # higher is admitted first
    ttft: float | None = None  # seconds until the first token is due
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool = False
    echo: bool = False
    no_output: bool = False  # echo with max_tokens 0: return the prompt alone


def read_options(body: Body) -> Options:
    """Read the fields of the body that are not sampling parameters.

    >>> read_options({"stream": True, "timeout": 2.5}).timeout
    2.5
    """
    stream = bool(get(body, "stream", "true or false"))
    stream_options = get(body, "stream_options", "an object")
    if stream_options is not None and not stream:
        raise RequestError("stream_options needs stream to be true: set it, or leave stream_options out")
    priority = get(body, "priority", "a whole number") or 0
    if abs(priority) > _PRIORITIES:
        raise RequestError(f"priority is {priority}: use -{_PRIORITIES} to {_PRIORITIES}")
    salt = get(body, "cache_salt", "a string")
    if salt is not None and not 0 < len(salt) <= 256:
        raise RequestError("cache_salt must have 1 to 256 characters")
    name = get(body, "request_id", "a string")
    if name is not None and NAME.fullmatch(name) is None:
        raise RequestError("request_id must have 1 to 128 letters, digits, dots, colons, dashes or underscores")
    include_usage = bool(get(stream_options or {}, "include_usage", "true or false"))
    continuous_usage = bool(get(stream_options or {}, "continuous_usage_stats", "true or false"))
    return Options(
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and continuous_usage,
        timeout=_seconds(body, "timeout"),
        priority=priority,
        ttft=_seconds(body, "ttft"),
        cache_salt=salt,
        request_id=name,
        return_token_ids=bool(get(body, "return_token_ids", "true or false")),
        echo=bool(get(body, "echo", "true or false")),
        no_output=bool(body.get("echo")) and body.get("max_tokens") == 0,
    )


def check_stream(params: SamplingParams) -> None:
    """Raise RequestError for streamed answers that are selected only at the end."""
    if params.use_beam_search:
        raise RequestError(
            "use_beam_search cannot be streamed, since beams are ranked at the end: leave out stream or use_beam_search"
        )
    if params.width > params.n:
        raise RequestError(
            f"best_of is {params.best_of} and n is {params.n}, which cannot be streamed, since the best answers are "
            "selected at the end: leave out stream or best_of"
        )


def _seconds(body: Body, name: str) -> float | None:
    value = get(body, name, "a number")
    if value is not None and not 0 < value <= LONGEST:
        raise RequestError(f"{name} is {value}: use seconds above 0 and up to {LONGEST:.0f}")
    return None if value is None else float(value)
