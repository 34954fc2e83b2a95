"""Tools for a chat template without tools: a system message, and calls as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_HOW = (
    "You can call these functions:\n<tools>\n{tools}\n</tools>\n"
    "To call one, answer with its name and its arguments in JSON between tags, and nothing else:\n"
    '<tool_call>\n{{"name": "function", "arguments": {{"argument": "value"}}}}\n</tool_call>'
)


def show_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the conversation with the tools in its system message and with calls and their results as text."""
    shown = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    system = _HOW.format(tools=shown)
    rest = [_as_text(message) for message in messages]
    if rest and rest[0].get("role") == "system" and isinstance(rest[0].get("content"), str):
        system = f"{rest[0]['content']}\n\n{system}"
        rest = rest[1:]
    return [{"role": "system", "content": system}, *rest]


def show_calls(messages: Sequence[Mapping[str, Any]], template: str) -> Sequence[Mapping[str, Any]]:
    """Return the conversation with its calls as text, if the template does not write them: turns would be empty."""
    if "tool_calls" in template:
        return messages
    return [_as_text(message) if isinstance(message, Mapping) else message for message in messages]


def _as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [
        f"<tool_call>\n{json.dumps({key: call['function'].get(key) for key in ('name', 'arguments')})}\n</tool_call>"
        for call in calls
    ]
    content = message.get("content")
    before = [content] if isinstance(content, str) and content else []
    return {
        **{key: value for key, value in message.items() if key != "tool_calls"},
        "content": "\n".join(before + texts),
    }
