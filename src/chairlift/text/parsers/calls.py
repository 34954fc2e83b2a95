"""CallParser: content with tool calls in it; a family says how its calls begin and reads one of them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from chairlift.text.parsers.arriving import SPACE, ArrivingText, Markers, Reader
from chairlift.text.parsers.events import Event
from chairlift.text.parsers.output import Output
from chairlift.text.parsers.tools import Tool


class StepParser(ABC):
    """A MessageParser written as a generator, which stops where the text that has arrived ends."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._text = ArrivingText()
        self._output = Output()
        self._steps = self._run()

    def feed(self, text: str) -> list[Event]:
        """Read the next piece of text."""
        if text:
            self._text.push(text)
            next(self._steps, None)
        return self._output.take()

    def finish(self) -> list[Event]:
        """Read the end of the answer."""
        self._text.end()
        next(self._steps, None)
        self._output.finish()
        return self._output.take()

    @abstractmethod
    def _run(self) -> Reader[None]:
        """Read the whole answer."""


class CallParser(StepParser):
    """A parser for one family of models.

    Calls begin with one of the `openers` anywhere in the text, or with one of the characters in `bare` at the start of
    a line. From there on the text is held, until `_read_calls` starts a call. If it starts none, the text is content.
    """

    openers: Markers = Markers()
    bare = ""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._stops = Markers(*self.openers.names, *(["\n"] if self.bare else []))

    def _run(self) -> Reader[None]:
        text, output = self._text, self._output
        is_line_start = True
        while (yield from text.peek()):
            opener = ""
            if is_line_start and self.bare:
                yield from text.run(SPACE, output.content)
                following = yield from text.peek()
                if following and following in self.bare:
                    opener = following  # not read yet
                    text.hold()
            if not opener:
                opener = yield from text.until(self._stops, output.content)
                is_line_start = opener == "\n"
                if is_line_start or not opener:
                    output.content(opener)
                    continue
                text.hold(opener)
            is_line_start = yield from self._read_calls(opener)
            if not is_line_start:
                output.content(text.release())

    @abstractmethod
    def _read_calls(self, opener: str) -> Reader[bool]:
        """Read the calls after an opener; return False if the text held since then is not part of a call."""

    def _start(self, name: str) -> None:
        """Begin a call: the text held so far is part of it."""
        self._text.release()
        self._output.start(name)

    def _read_closing(self, *markers: str) -> Reader[None]:
        """Read the markers after a call, with whitespace before each; if one is not there, go on with content."""
        for marker in markers:
            self._text.hold()
            yield from self._text.space()
            if not (yield from self._text.literal(marker)):
                yield from self._break_off()
                return
        self._text.release()

    def _break_off(self) -> Reader[bool]:
        """End a call that is not complete: the text held is content, or cut off like the call if the answer ends."""
        unread = yield from self._text.peek()
        held = self._text.release()
        if unread:
            self._output.content(held)
        return True
