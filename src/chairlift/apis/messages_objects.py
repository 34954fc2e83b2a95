"""The objects of Anthropic's Messages API: messages, usage and errors."""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def message_object(common: Fields, content: list[Fields], used: Fields, stop: Fields) -> Fields:
    """Return a message; `common` has its id and its model."""
    return {
        "id": common["id"],
        "type": "message",
        "role": "assistant",
        "model": common["model"],
        "content": content,
        **stop,
        "usage": used,
    }


def stop_of(finish_reason: str | None, stop_reason: int | str | None) -> Fields:
    """Return why a message ended, given a chat completion's finish_reason and stop_reason.

    >>> stop_of("stop", "END")
    {'stop_reason': 'stop_sequence', 'stop_sequence': 'END'}
    """
    match finish_reason:
        case "length":
            reason = "max_tokens"
        case "tool_calls":
            reason = "tool_use"
        case "stop" if isinstance(stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
        case _:
            reason = "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def usage(used: Fields) -> Fields:
    """Return the usage, given that of a chat completion: input_tokens do not include the cached ones."""
    cached = used["prompt_tokens_details"]["cached_tokens"]
    found = {
        "input_tokens": used["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": used["completion_tokens"],
    }
    details = used.get("completion_tokens_details", {})
    if "reasoning_tokens" in details:
        found["output_tokens_details"] = {"thinking_tokens": details["reasoning_tokens"]}
    return found


def error_object(error: Fields, status: int) -> Fields:
    """Return an error, given OpenAI's error object and the HTTP status."""
    kind = _ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error["message"]}}
