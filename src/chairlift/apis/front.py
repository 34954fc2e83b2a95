"""Front: one HTTP API on the path of chat completions; PlainFront, the APIs that need no translation."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

Fields = dict[str, Any]


class Events(ABC):
    """Writes a streamed reply: chunks of a chat completion in, server-sent events out."""

    last = b""  # what follows the last event

    @abstractmethod
    def write(self, chunks: Sequence[Fields]) -> bytes:
        """Return the events for these chunks; the chunk with usage and no choices is the last."""

    @abstractmethod
    def fail(self, error: Fields, status: int) -> bytes:
        """Return the events that end a stream with OpenAI's error object."""


class Front(ABC):
    """One HTTP API."""

    name: str
    prefix: str  # of the ids of its replies
    is_chat = True
    id_header: ClassVar[str | None] = None  # another header that its clients read the request's id from
    fields: ClassVar[frozenset[str]] = frozenset()  # of its bodies, besides those of a chat completion
    names: ClassVar[Mapping[str, str]] = {}  # its own names for fields of a chat completion, for error messages

    @abstractmethod
    def read(self, raw: Fields) -> tuple[Fields, Fields]:
        """Return the body as that of a chat completion, and the fields that the reply repeats."""

    @abstractmethod
    def reply(self, chat: Fields, repeated: Fields) -> Fields:
        """Return the reply to a request that is not streamed, given that of the chat completion."""

    @abstractmethod
    def events(self, common: Fields, repeated: Fields, used: Callable[[], Fields]) -> Events:
        """Return the writer of one streamed reply: `common` is in all its chunks, `used` returns the usage so far."""

    @abstractmethod
    def error(self, error: Fields, status: int, id: str) -> Fields:
        """Return the body of an error response, given OpenAI's error object."""

    def in_own_names(self, error: Fields) -> Fields:
        """Return an error object with this API's names of fields in its message and param."""
        param: str | None = error["param"]
        # A name without an underscore may also be a plain word of the message, unless the error is about that field.
        meant = [name for name in self.names if "_" in name or name == param]
        message = re.sub(r"\b(" + "|".join(meant) + r")\b", lambda found: self.names[found[0]], error["message"])
        param = None if param is None else self.names.get(param, param)
        first = re.match(r"\w+", message)
        if param is None and first is not None and first[0] in self.fields:
            param = first[0]
        return {**error, "message": message, "param": param}


class PlainEvents(Events):
    """Chunks as they are."""

    last = b"data: [DONE]\n\n"

    def write(self, chunks: Sequence[Fields]) -> bytes:
        """Return the events for these chunks."""
        return b"".join(map(sse, chunks))

    def fail(self, error: Fields, status: int) -> bytes:
        """Return the error as an event."""
        return sse({"error": error})


class PlainFront(Front):
    """Chat completions and plain completions."""

    def __init__(self, name: str, prefix: str, *, is_chat: bool) -> None:
        self.name, self.prefix, self.is_chat = name, prefix, is_chat

    def read(self, raw: Fields) -> tuple[Fields, Fields]:
        """Return the body as it is."""
        return raw, {}

    def reply(self, chat: Fields, repeated: Fields) -> Fields:
        """Return the reply as it is."""
        return chat

    def events(self, common: Fields, repeated: Fields, used: Callable[[], Fields]) -> Events:
        """Return a writer of chunks as they are."""
        return PlainEvents()

    def error(self, error: Fields, status: int, id: str) -> Fields:
        """Return OpenAI's body of an error response."""
        return {"error": error}


CHAT = PlainFront("chat", "chatcmpl-", is_chat=True)
COMPLETION = PlainFront("completions", "cmpl-", is_chat=False)


def sse(content: Any) -> bytes:
    """Encode one server-sent event.

    >>> sse({"a": 1})
    b'data: {"a":1}\\n\\n'
    """
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def named_events(contents: Iterable[Fields]) -> bytes:
    """Encode server-sent events that are named after their type.

    >>> named_events([{"type": "ping"}])
    b'event: ping\\ndata: {"type":"ping"}\\n\\n'
    """
    return b"".join(b"event: " + content["type"].encode() + b"\n" + sse(content) for content in contents)
