"""Grammars that force tool calls, in llguidance's variant of Lark.

A family gives the text around its calls as data, a CallFormat, written as its chat template writes it. The markers in
that text are single tokens for one tokenizer and plain text for another: `special` returns the id of a marker that is a
special token of the grammar's tokenizer, and None for text.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chairlift.text.json_schema import check_counts, check_multiples, close, options_of
from chairlift.text.parsers.json_text import quote
from chairlift.text.parsers.tools import Tool
from chairlift.text.tokenizer import Tokenizer

SpecialId = Callable[[str], int | None]

_TEXT = "TEXT: /(.|\\n)*/\nLINES: /((.|\\n)*\\n)?[ \\t]*/\nBREAKS: /\\n{1,2}/"


class Lark:
    """The rules of one grammar."""

    def __init__(self, markers: Sequence[str], special: SpecialId) -> None:
        self._ids = {marker: id for marker in markers if (id := special(marker)) is not None}
        self._split = re.compile("|".join(map(re.escape, self._ids)) or r"(?!)")
        self._rules: list[str] = [_TEXT]

    def rule(self, name: str, *parts: str) -> str:
        """Add a rule, and return its name."""
        body = " ".join(filter(None, parts)) or '""'
        self._rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def text(self, text: str) -> str:
        """Return the expression for a fixed text with markers in it."""
        parts, at = [], 0
        for marker in self._split.finditer(text):
            parts += [literal(text[at : marker.start()]), f"<[{self._ids[marker[0]]}]>"]
            at = marker.end()
        return " ".join(filter(None, [*parts, literal(text[at:])]))

    def until(self, name: str, marker: str) -> str:
        """Add a rule for any text up to a marker, and the marker."""
        if marker in self._ids:
            return self.rule(name, "TEXT", self.text(marker))
        return self.rule(f"{name}[lazy]", "TEXT", literal(marker))

    def source(self, *start: str) -> str:
        """Return the grammar, with the parts of its start."""
        return "\n".join(["%llguidance {}", f"start: {' '.join(filter(None, start))}", *self._rules, ""])


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The text around calls: trigger, opening, then for each call before, name, after, arguments, tail; then closing.

    Without a trigger, calls begin a line.
    """

    before: str
    after: str
    tail: str = ""
    trigger: str = ""
    opening: str = ""
    between: str = ""
    closing: str = ""
    repeats: bool = False
    """The trigger precedes every call, not only the first."""
    arguments: Callable[[Lark, Tool, str, bool], str] | None = None
    """Adds the rules of a tool's arguments and returns their expression; without it, arguments are a JSON object."""

    @property
    def _in_name(self) -> int:
        """The number of characters after a name that tell it from a longer one, where it ends free text."""
        return 0 if self.trigger else 1

    def grammar(
        self, markers: Sequence[str], tools: Sequence[Tool], required: bool, parallel: bool, special: SpecialId
    ) -> str:
        """Return the grammar for calls of these tools, at least one if required, otherwise anywhere in free text."""
        lark = Lark(markers, special)
        calls = lark.rule(
            "call", " | ".join(self._call(lark, index, tool, required) for index, tool in enumerate(tools))
        )
        if required:
            return lark.source("BREAKS?", lark.text(self.trigger + self.opening), self._calls(lark, calls, parallel))
        return self._anywhere(lark, tools, calls, parallel)

    def _call(self, lark: Lark, index: int, tool: Tool, required: bool) -> str:
        """Add the rule for one tool's call: its name and what follows it."""
        by_schema = required or tool.strict
        write = self.arguments or json_arguments
        arguments = lark.rule(f"arguments_{index}", write(lark, tool, f"arguments_{index}", by_schema))
        rest = lark.rule(f"rest_{index}", lark.text(self.after[self._in_name :]), arguments, lark.text(self.tail))
        name = literal(tool.name + self.after[: self._in_name])
        return lark.rule(f"call_{index}", lark.text(self.before), name, rest)

    def _calls(self, lark: Lark, first: str, parallel: bool) -> str:
        """Return the expression for one or more calls, after what opens them."""
        again = lark.text(self.between + (self.trigger if self.repeats else ""))
        more = f"({again} call)*" if parallel else ""
        return " ".join(filter(None, [first, more, lark.text(self.closing)]))

    def _anywhere(self, lark: Lark, tools: Sequence[Tool], calls: str, parallel: bool) -> str:
        """Return the grammar for free text with calls in it, or without parallel calls, one at its end."""
        if self.trigger:
            head = lark.until("head", self.trigger)
            block = lark.rule("block", head, lark.text(self.opening), self._calls(lark, calls, parallel))
        else:  # free text ends where a line begins with a call of a tool by its name
            heads = [self.opening + self.before + tool.name + self.after[: self._in_name] for tool in tools]
            blocks = [
                lark.rule(
                    f"block_{index}",
                    lark.rule(f"head_{index}[lazy]", "LINES", literal(head)),
                    self._calls(lark, f"rest_{index}", parallel),
                )
                for index, head in enumerate(heads)
            ]
            block = lark.rule("block", " | ".join(blocks))
        return lark.source(f"{block}* TEXT") if parallel else lark.source(f"TEXT | {block}")


def special_ids(tokenizer: Tokenizer) -> SpecialId:
    """Return the ids of the markers that llguidance holds as special tokens when it reads this tokenizer.

    Besides special tokens these are all added tokens of the form <...>, such as Qwen's <tool_call>: in the grammar
    their text would match only other, smaller tokens that spell it.
    """
    added = tokenizer.backend.get_added_tokens_decoder().items()
    return {
        token.content: id
        for id, token in added
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }.get


def literal(text: str) -> str:
    """Return the expression for a text; for no text, nothing."""
    return quote(text) if text else ""


def json_value(schema: Mapping[str, Any], strict: bool) -> str:
    """Return the expression for a JSON value; what llguidance cannot check is an error for strict tools only."""
    check_multiples(schema)
    if strict:
        check_counts(schema)
    return "%json " + json.dumps({**schema, "x-guidance": options_of(schema, lenient=not strict)})


def json_arguments(lark: Lark, tool: Tool, name: str, by_schema: bool) -> str:
    """Return the expression for arguments as a JSON object."""
    return json_value(arguments_schema(tool) if by_schema else {"type": "object"}, tool.strict)


def arguments_schema(tool: Tool) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments, always an object: a tool without a schema takes no arguments."""
    return {**close(tool.parameters or {"properties": {}}), "type": "object"}
