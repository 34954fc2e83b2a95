"""MessageFormat: how the answers of a conversation are divided into content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from chairlift.core.constraint import Thinking
from chairlift.core.errors import SettingsError
from chairlift.text.parsers import DIALECTS, dialect_of, parser_for
from chairlift.text.parsers.events import CallStart, Content, Event, MessageParser, Reasoning
from chairlift.text.parsers.reasoning import ReasoningMarkers, reasoning_of
from chairlift.text.parsers.tools import Tool
from chairlift.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """The format of a conversation's answers, which a family of models, its tools and the prompt determine."""

    dialect: str | None = None
    tools: tuple[Tool, ...] = ()
    reasoning: ReasoningMarkers | None = None
    is_open: bool = False  # the prompt ends inside the reasoning
    shows_reasoning: bool = True  # otherwise it is left out

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        has_calls = self.dialect is not None and (self.tools or DIALECTS[self.dialect].has_channels)
        return not has_calls and self.reasoning is None

    def parser(self) -> MessageParser:
        """Return a parser for one answer."""
        dialect = None if self.dialect is None else DIALECTS[self.dialect]
        return parser_for(dialect, self.tools, self.reasoning, self.is_open)

    def kept_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Return the special tokens that the parser must see."""
        if self.is_plain:
            return frozenset()
        markers = [] if self.dialect is None else list(DIALECTS[self.dialect].kept)
        if self.reasoning is not None:
            markers += [self.reasoning.begin, self.reasoning.end]
        ids = map(tokenizer.backend.token_to_id, markers)
        return frozenset(id for id in ids if id is not None) & tokenizer.special_ids

    def opened(self, is_open: bool) -> MessageFormat:
        """Return the format for a prompt that ends inside the reasoning, or not."""
        return replace(self, is_open=is_open) if is_open != self.is_open else self


PLAIN = MessageFormat()


def is_closed(prompt: str, markers: ReasoningMarkers) -> bool:
    """Return whether a prompt ends behind the reasoning, so that the answer has none."""
    return prompt.rstrip().endswith(markers.end)


@dataclass(frozen=True, slots=True)
class Family:
    """The format of a model's answers, recognised from its chat template."""

    dialect: str = "hermes"
    reasoning: ReasoningMarkers | None = None
    shows_tools: bool = False  # whether the template writes tools into the prompt

    @staticmethod
    def of(template: str | None, tool_parser: str | None = None) -> Family:
        """Recognise the family of a template; `tool_parser` names another dialect for its tool calls.

        >>> Family.of("{% if tools %}<tool_call>{{ tools | tojson }} \\"name\\"{% endif %}").dialect
        'hermes'
        """
        if tool_parser is not None and tool_parser not in DIALECTS:
            raise SettingsError(f"tool_parser is {tool_parser!r}: use one of {', '.join(DIALECTS)}")
        if template is None:
            return Family(tool_parser or "hermes")
        found = dialect_of(template)
        return Family(tool_parser or found or "hermes", reasoning_of(template), "tools" in template)

    def form(self, tools: Sequence[Tool], *, shows_reasoning: bool = True) -> MessageFormat:
        """Return the format of answers in a conversation with these tools."""
        is_needed = bool(tools) or DIALECTS[self.dialect].has_channels
        return MessageFormat(
            self.dialect if is_needed else None, tuple(tools), self.reasoning, shows_reasoning=shows_reasoning
        )

    def thinking(
        self, tokenizer: Tokenizer, is_open: bool, is_closed: bool, budget: int | None = None
    ) -> Thinking | None:
        """Return how an answer's reasoning begins and ends; None if it has none."""
        markers = self.reasoning
        if markers is None or is_closed:
            return None
        begin, end = (tuple(tokenizer.encode(each, add_special_tokens=False)) for each in (markers.begin, markers.end))
        return Thinking(begin, end, is_open, budget)


@dataclass(slots=True)
class ToolCall:
    """A call that the model made."""

    name: str
    arguments: str = ""  # JSON


@dataclass(slots=True)
class Message:
    """An answer in parts."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Append a part."""
        match event:
            case Content(text):
                self.content += text
            case Reasoning(text):
                self.reasoning += text
            case CallStart(_, name):
                self.calls.append(ToolCall(name))
            case _:
                self.calls[event.index].arguments += event.text


def read_message(form: MessageFormat, text: str) -> Message:
    """Divide the whole text of an answer.

    >>> read_message(MessageFormat(reasoning=ReasoningMarkers("<think>", "</think>")), "<think>Hm.</think>Yes.")
    Message(content='Yes.', reasoning='Hm.', calls=[])
    """
    parser, message = form.parser(), Message()
    for event in (*parser.feed(text), *parser.finish()):
        if form.shows_reasoning or not isinstance(event, Reasoning):
            message.add(event)
    return message


def reasoning_tokens(tokens: list[int], start: tuple[int, ...], end: tuple[int, ...], is_open: bool) -> int:
    """Count the tokens of an answer's reasoning, its markers included.

    >>> reasoning_tokens([1, 7, 8, 2, 9], (1,), (2,), False)
    4
    """
    if not is_open and tuple(tokens[: len(start)]) != start:
        return 0
    for place in range(len(tokens) - len(end) + 1):
        if tuple(tokens[place : place + len(end)]) == end:
            return place + len(end)
    return len(tokens)
