"""Dialect: how one family of models writes tool calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chairlift.text.parsers.events import MessageParser
from chairlift.text.parsers.grammar import CallFormat, SpecialId
from chairlift.text.parsers.tools import Tool


@dataclass(frozen=True, slots=True)
class Dialect:
    """The format of one family's tool calls: how to recognise it, parse it and force it."""

    name: str
    signs: tuple[tuple[str, ...], ...]
    """A chat template is of this family if it contains all strings of one of these."""
    parser: Callable[[Sequence[Tool]], MessageParser]
    calls: CallFormat
    kept: tuple[str, ...] = ()
    """Markers that must stay in the decoded text even where they are special tokens."""
    has_channels: bool = False
    """All answers are written in this format, also those without tools, and reasoning is part of it."""

    def matches(self, template: str) -> bool:
        """Return whether a chat template is of this family."""
        return any(all(sign in template for sign in signs) for signs in self.signs)

    def grammar(
        self, tools: Sequence[Tool], *, required: bool, parallel: bool = True, special: SpecialId = lambda _: None
    ) -> str | None:
        """Return an llguidance grammar for the text after the reasoning; None if there is nothing to force.

        With `required`, the answer is one call that matches its tool's schema, or with `parallel` more: to force a
        call of one tool, pass that tool alone. Otherwise the answer is free text with calls in it, and those of strict
        tools match their schemas. `special` returns the id of a marker that the grammar's tokenizer holds as a special
        token, and None for one that it holds as text.
        """
        if not tools or not (required or any(tool.strict for tool in tools)):
            return None
        return self.calls.grammar(self.kept, tools, required, parallel, special)
