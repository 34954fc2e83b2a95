"""The messages of a chat completion, checked and converted to the shape that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from chairlift.core.errors import RequestError


def read_messages(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a request's messages, with the tool calls of earlier answers as chat templates expect them.

    >>> call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    >>> [message] = read_messages({"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]})
    >>> message["content"], message["tool_calls"][0]["function"]["arguments"]
    ('', {'a': 1})
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of at least one message, each with a role and a content")
    return [_read_message(message, index) for index, message in enumerate(messages)]


def _read_message(message: Any, index: int) -> Mapping[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f'message {index} must be an object with a role, such as "user", and a content')
    content, calls = message.get("content"), message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise RequestError(f"message {index} has tool_calls that are not a list: send a list of calls, or leave it out")
    # An answer that only calls tools (or functions, their old name) has no text.
    is_call = message["role"] == "assistant" and (calls or isinstance(message.get("function_call"), dict))
    if not isinstance(content, (str, list)) and not (is_call and content is None):
        raise RequestError(f"message {index} has no content: give a string, or a list of text parts")
    if content is not None and "tool_calls" not in message:
        return message
    read = {**message, "content": "" if content is None else content}
    read.pop("tool_calls", None)  # a template may test only whether the key is there: drop null and []
    if calls:
        read["tool_calls"] = [
            _read_call(call, f"message {index}'s tool call {place}") for place, call in enumerate(calls)
        ]
    return read


def _read_call(call: Any, place: str) -> Mapping[str, Any]:
    """Parse a call's arguments: OpenAI sends them as JSON in a string, and templates iterate over them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{place} must be an object with a function, which has a name and arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise RequestError(f"{place} has arguments that are not JSON: send a JSON object in a string") from None
    return {**call, "function": {**function, "arguments": arguments or {}}}
