"""Conversation: collects the messages of a chat completion from the items or blocks of another API."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from chairlift.core.errors import RequestError
from chairlift.core.values import show

MOST = 4096  # messages or items of a request, as in a chat completion
Content = str | list[dict[str, str]]


class Conversation:
    """The messages of a chat completion. Reasoning, text and calls of one answer become one message."""

    def __init__(self) -> None:
        self._leading: list[str] = []  # texts of the system: most templates allow one such message, the first
        self._messages: list[dict[str, Any]] = []
        self._reasoning: list[str] = []  # of the answer that follows

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages, the system's first."""
        system = [{"role": "system", "content": "\n\n".join(self._leading)}] if self._leading else []
        return [*system, *self._messages]

    def system(self, texts: Sequence[str]) -> None:
        """Add instructions; those before any other message become one message."""
        if self._messages:
            self._append("system", content_of(texts))
        else:
            self._leading.append("\n".join(texts))

    def user(self, texts: Sequence[str]) -> None:
        """Add a message of the user."""
        self._append("user", content_of(texts))

    def result(self, call_id: str, texts: Sequence[str]) -> None:
        """Add the result of a call."""
        self._append("tool", content_of(texts), tool_call_id=call_id)

    def think(self, text: str) -> None:
        """Add reasoning to the answer that follows."""
        self._reasoning.append(text)

    def answer(self, texts: Sequence[str]) -> None:
        """Add the text of an answer."""
        self._append("assistant", content_of(texts), **self._thoughts())

    def call(self, call_id: str, name: str, arguments: Any) -> None:
        """Add a call to the last answer, or as an answer without text."""
        if self._reasoning or not self._messages or self._messages[-1]["role"] != "assistant":
            self._append("assistant", "", **self._thoughts())
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._messages[-1].setdefault("tool_calls", []).append(call)

    def _append(self, role: str, content: Content, **more: Any) -> None:
        self._messages.append({"role": role, "content": content, **more})
        self._reasoning.clear()

    def _thoughts(self) -> dict[str, str]:
        return {"reasoning_content": "\n".join(self._reasoning)} if self._reasoning else {}


def content_of(texts: Sequence[str]) -> Content:
    """Return texts as the content of a message: one as a string, several as parts."""
    return (texts[0] if texts else "") if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


def read_texts(content: Any, place: str, kinds: Collection[str]) -> list[str]:
    """Return the texts of a content: a string, or a list of text parts of these types.

    >>> read_texts([{"type": "input_text", "text": "Hi"}], "input[0]", ("input_text",))
    ['Hi']
    """
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise RequestError(f"{place} has the content {show(content)}: use a string, or a list of text parts")
    return [_read_part(part, f"{place} part {number}", kinds) for number, part in enumerate(content)]


def _read_part(part: Any, place: str, kinds: Collection[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise RequestError(f"{place} is {show(part)}: use an object of type {' or '.join(kinds)}")
    if kind not in kinds:
        raise RequestError(f"{place} has the type {show(kind)}: this model reads text alone; use {' or '.join(kinds)}")
    if not isinstance(text := part.get("text"), str):
        raise RequestError(f"{place} has the text {show(text)}: use a string")
    return text


def read_list(body: Mapping[str, Any], name: str) -> list[Any]:
    """Return a list of messages or items, of bounded length."""
    found = body.get(name)
    if not isinstance(found, list) or not found:
        raise RequestError(f"{name} is {show(found)}: use a list of at least one")
    if len(found) > MOST:
        raise RequestError(f"{name} has {len(found)} entries: send at most {MOST}")
    return found


def read_string(part: Mapping[str, Any], name: str, place: str) -> str:
    """Return a string field of an item."""
    if not isinstance(value := part.get(name), str):
        raise RequestError(f"{place} has the {name} {show(value)}: use a string")
    return value


# Fields of a chat completion with results that these APIs cannot show, and their values without effect.
_NOT_SHOWN: Mapping[str, tuple[Any, ...]] = {"n": (1,), "prompt_logprobs": (), "return_token_ids": (False,)}


def other_fields(raw: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Return the fields of a body that are the same in a chat completion: sampling and vLLM's extra fields."""
    for name in ("messages", "prompt", "max_completion_tokens"):
        if name not in own and raw.get(name) is not None:
            raise RequestError(f"{name} is not a field of this API: leave it out, or use /v1/chat/completions")
    for name, neutral in _NOT_SHOWN.items():
        if (value := raw.get(name)) is not None and value not in neutral:
            raise RequestError(f"{name} is {show(value)}: not supported by this API; use /v1/chat/completions")
    return {name: value for name, value in raw.items() if name not in own}
