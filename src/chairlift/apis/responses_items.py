"""The objects of OpenAI's Responses API: a response and its output items."""

from __future__ import annotations

import time
import uuid
from typing import Any

Fields = dict[str, Any]


def new_id(prefix: str) -> str:
    """Return a unique id of an item."""
    return f"{prefix}_{uuid.uuid4().hex}"


def response_object(
    common: Fields,
    repeated: Fields,
    *,
    output: list[Fields],
    status: str = "completed",
    used: Fields | None = None,
    error: Fields | None = None,
) -> Fields:
    """Return a response; `common` has its id, its model and its time."""
    is_incomplete = status == "incomplete"
    return {
        "id": common["id"],
        "object": "response",
        "created_at": common["created"],
        "completed_at": int(time.time()) if status == "completed" else None,
        "model": common["model"],
        "status": status,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
        "output": output,
        "usage": None if used is None else usage(used),
        **repeated,
    }


def status_of(finish_reason: str | None) -> str:
    """Return the status of a response and its last item."""
    return "incomplete" if finish_reason == "length" else "completed"


def usage(used: Fields) -> Fields:
    """Return the usage, given that of the chat completion."""
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": used["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,  # OpenAI's price for writing a cache; ours is free
        },
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": used.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        },
        "total_tokens": used["total_tokens"],
    }


def text_part(text: str, scores: list[Fields]) -> Fields:
    """Return the part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}


def reasoning_part(text: str) -> Fields:
    """Return the part of a reasoning item."""
    return {"type": "reasoning_text", "text": text}


def message_item(id: str, parts: list[Fields], status: str = "completed") -> Fields:
    """Return the text of an answer."""
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": parts}


def reasoning_item(id: str, parts: list[Fields], status: str = "completed") -> Fields:
    """Return the reasoning of an answer: its own words, not a summary."""
    return {"id": id, "type": "reasoning", "summary": [], "status": status, "content": parts}


def call_item(id: str, call_id: str, name: str, arguments: str, status: str = "completed") -> Fields:
    """Return a call of an answer."""
    return {
        "id": id,
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }
