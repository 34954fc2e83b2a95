"""Parts of an assistant's message: content, reasoning and tool calls, in the order in which the model writes them."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """The next piece of the text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of the text that the model writes before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A new tool call; calls are numbered from 0, and the caller gives them their ids."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the JSON text of a call's arguments."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments


class MessageParser(Protocol):
    """Turns an answer's text, as it is decoded, into events."""

    def feed(self, text: str) -> list[Event]:
        """Read the next piece of text; the end of it is held back if it may be the beginning of a marker."""
        ...

    def finish(self) -> list[Event]:
        """Read the end of the answer; text that is not part of a call comes out as content."""
        ...


class PlainText:
    """A MessageParser without markers: all text is content."""

    def feed(self, text: str) -> list[Event]:
        """Return the text as content."""
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        """Return nothing: no text is ever held back."""
        return []
