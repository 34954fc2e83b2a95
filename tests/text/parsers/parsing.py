"""Parsing for tests: the tools, and the parts of a message with their pieces joined."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from chairlift.text.parsers.events import CallArguments, CallStart, Content, Event, MessageParser, Reasoning
from chairlift.text.parsers.tools import Tool

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "filter": {"type": "object"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "limit": {"type": "number"},
        },
        "required": ["city"],
    },
)
SEARCH = Tool("search", {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]})
NOW = Tool("now")
TOOLS = (WEATHER, SEARCH, NOW)


@dataclass
class Message:
    """An assistant's message: what a client has after the last event."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, event: Event) -> None:
        match event:
            case Content(text):
                self.content += text
            case Reasoning(text):
                self.reasoning += text
            case CallStart(index, name):
                assert index == len(self.calls), "calls are numbered in their order"
                self.calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(self.calls) - 1, "arguments belong to the last call"
                name, arguments = self.calls[index]
                self.calls[index] = (name, arguments + text)


def events_of(parser: MessageParser, pieces: Iterable[str]) -> list[Event]:
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    assert all(event.name if isinstance(event, CallStart) else event.text for event in events), "no event is empty"
    return events


def parse(parser: MessageParser, *pieces: str) -> Message:
    message = Message()
    for event in events_of(parser, pieces):
        message.add(event)
    return message


def cuts(text: str) -> Iterator[list[str]]:
    """Yield the text in two pieces, cut at every position, and in single characters."""
    yield from ([text[:position], text[position:]] for position in range(1, len(text)))
    yield list(text)
