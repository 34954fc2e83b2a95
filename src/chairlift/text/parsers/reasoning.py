"""Reasoning: the block of text that some models write before their answer, between markers."""

import re
from dataclasses import dataclass

from chairlift.text.parsers.arriving import ArrivingText, Markers, Reader
from chairlift.text.parsers.events import Event, MessageParser, Reasoning


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The markers around the block; `end` is also the text that ends the block early."""

    begin: str
    end: str


MARKERS = (
    ReasoningMarkers("<think>", "</think>"),
    ReasoningMarkers("<seed:think>", "</seed:think>"),
    ReasoningMarkers("[THINK]", "[/THINK]"),
)

_BREAKS = re.compile(r"\n*")


def reasoning_of(template: str) -> ReasoningMarkers | None:
    """Return the markers of the reasoning that a chat template's model writes; None if it writes none.

    >>> reasoning_of("{{ message.content.split('</think>')[-1] }}")
    ReasoningMarkers(begin='<think>', end='</think>')
    """
    return next((markers for markers in MARKERS if markers.end in template), None)


def opens_reasoning(prompt: str, markers: ReasoningMarkers) -> bool:
    """Return whether a prompt ends with the marker that begins the block, so that the answer begins inside it."""
    return prompt.rstrip().endswith(markers.begin)


class ReasoningParser:
    """A MessageParser that takes the reasoning from the start of the answer; `after` parses the text after it.

    The block begins with the answer or not at all: the marker is plain text in later content. Line breaks next to the
    markers are part of the format. An answer that does not end the block is all reasoning.
    """

    def __init__(self, markers: ReasoningMarkers, after: MessageParser, starts_inside: bool = False) -> None:
        self._markers = markers
        self._after = after
        self._starts_inside = starts_inside
        self._text = ArrivingText()
        self._steps = self._run()
        self._is_over = False
        self._pieces: list[str] = []
        self._breaks: list[str] = []  # line breaks at the end of the reasoning so far
        self._has_text = False

    def feed(self, text: str) -> list[Event]:
        """Read the next piece of text."""
        if self._is_over:
            return self._after.feed(text)
        if text:
            self._text.push(text)
            next(self._steps, None)
        return self._take()

    def finish(self) -> list[Event]:
        """Read the end of the answer."""
        if not self._is_over:
            self._text.end()
            next(self._steps, None)
        return [*self._take(), *self._after.finish()]

    def _run(self) -> Reader[None]:
        """Read the block and the line breaks after it; what `text` has left is the rest."""
        text, markers = self._text, self._markers
        text.hold()
        yield from text.space()
        has_begun = yield from text.literal(markers.begin)
        if has_begun or self._starts_inside:
            start = text.release()
            self._write("" if has_begun else start)
            if (yield from text.until(Markers(markers.end), self._write)):
                self._breaks.clear()
                yield from text.run(_BREAKS, len)
        self._is_over = True

    def _write(self, text: str) -> None:
        body = text.rstrip("\n")
        if not body:
            self._breaks.append(text)
            return
        self._pieces += [*self._breaks, body] if self._has_text else [body.lstrip("\n")]
        self._breaks = [text[len(body) :]]
        self._has_text = True

    def _take(self) -> list[Event]:
        reasoning = "".join(self._pieces)
        self._pieces = []
        events: list[Event] = [Reasoning(reasoning)] if reasoning else []
        if self._is_over:
            events += self._after.feed(self._text.release() + self._text.rest())
        return events
