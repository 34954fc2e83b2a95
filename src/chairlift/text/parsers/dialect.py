"""Dialect: how one family of models writes tool calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chairlift.text.parsers.events import MessageParser
from chairlift.text.parsers.tools import Tool


@dataclass(frozen=True, slots=True)
class Dialect:
    """The format of one family's tool calls: how to recognise it, parse it and force it."""

    name: str
    signs: tuple[tuple[str, ...], ...]
    """A chat template is of this family if it contains all strings of one of these."""
    parser: Callable[[Sequence[Tool]], MessageParser]
    kept: tuple[str, ...] = ()
    """Markers that must stay in the decoded text even where they are special tokens."""
    has_channels: bool = False
    """All answers are written in this format, also those without tools, and reasoning is part of it."""

    def matches(self, template: str) -> bool:
        """Return whether a chat template is of this family."""
        return any(all(sign in template for sign in signs) for signs in self.signs)
