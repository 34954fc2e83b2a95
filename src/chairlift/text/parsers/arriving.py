"""ArrivingText: text that is read while it arrives in pieces.

A reader is a generator that yields when it needs more text. So a parser reads as if all text were there, and where the
text is cut into pieces cannot change what it reads. Readers look one character ahead and never go back, which makes
the cost linear in the text.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reader = Generator[None, None, T]
Write = Callable[[str], object]

SPACE = re.compile(r"[ \t\r\n]*")


class Markers:
    """Strings to search for.

    The first characters of markers occur nowhere else in any of them: after the beginning of a marker that goes on
    differently, the search continues at the next character, and not within the beginning.
    """

    def __init__(self, *markers: str) -> None:
        self.names = markers
        firsts = {marker[0] for marker in markers}
        if any(firsts & set(marker[1:]) for marker in markers):
            raise ValueError(f"the first character of a marker occurs within a marker: {markers}")
        self.before = re.compile(f"[^{re.escape(''.join(sorted(firsts)))}]*" if firsts else r"[\s\S]*")

    def begin_with(self, text: str) -> bool:
        """Return whether a marker begins with the text."""
        return any(marker.startswith(text) for marker in self.names)


class ArrivingText:
    """The pieces of a text, the position of its reader, and the text held in case it is no part of a call."""

    def __init__(self) -> None:
        self._piece = ""
        self._at = 0
        self._ended = False
        self._held: list[str] | None = None
        self._held_from = 0

    def push(self, piece: str) -> None:
        """Add the next piece, after the reader has read all before it."""
        if self._held is not None:
            self._held.append(self._piece[self._held_from :])
        self._piece, self._at, self._held_from = piece, 0, 0

    def end(self) -> None:
        """Mark the end of the text."""
        self._ended = True

    def hold(self, before: str = "") -> None:
        """Keep the text that is read from here on, after the text given."""
        self._held, self._held_from = [before], self._at

    def release(self) -> str:
        """Return the text kept since `hold`, and keep no more."""
        if self._held is None:
            return ""
        held = "".join([*self._held, self._piece[self._held_from : self._at]])
        self._held = None
        return held

    def rest(self) -> str:
        """Return the text that has arrived and is not read, and read it."""
        rest, self._at = self._piece[self._at :], len(self._piece)
        return rest

    def peek(self) -> Reader[str]:
        """Return the next character without reading it, or nothing at the end."""
        while self._at == len(self._piece):
            if self._ended:
                return ""
            yield
        return self._piece[self._at]

    def skip(self) -> None:
        """Read the character that `peek` returned."""
        self._at += 1

    def run(self, pattern: re.Pattern[str], write: Write) -> Reader[None]:
        """Write the longest run of characters that match the pattern, a repeated character class."""
        while (yield from self.peek()):
            match = pattern.match(self._piece, self._at)
            end = match.end() if match is not None else self._at
            if end > self._at:
                write(self._piece[self._at : end])
                self._at = end
            if end < len(self._piece):
                return

    def collect(self, pattern: re.Pattern[str]) -> Reader[str]:
        """Return the longest run of characters that match the pattern, a repeated character class."""
        pieces: list[str] = []
        yield from self.run(pattern, pieces.append)
        return "".join(pieces)

    def space(self) -> Reader[None]:
        """Read whitespace."""
        yield from self.run(SPACE, len)

    def literal(self, text: str) -> Reader[bool]:
        """Read the given text; return whether it is there. If not, the beginning that is there has been read."""
        for character in text:
            if (yield from self.peek()) != character:
                return False
            self.skip()
        return True

    def begun(self, markers: Markers) -> Reader[str]:
        """Read the longest beginning of a marker that is here, perhaps nothing, perhaps a whole marker; return it."""
        begun = ""
        while (following := (yield from self.peek())) and markers.begin_with(begun + following):
            begun += following
            self.skip()
            if begun in markers.names:
                break
        return begun

    def until(self, markers: Markers, write: Write, drop_cut: bool = False) -> Reader[str]:
        """Write the text before the next marker, read the marker and return it; return nothing at the end.

        A beginning of a marker at the very end is text, or with `drop_cut` dropped.
        """
        while (yield from self.peek()):
            yield from self.run(markers.before, write)
            begun = yield from self.begun(markers)
            if begun in markers.names:
                return begun
            if begun and ((yield from self.peek()) or not drop_cut):
                write(begun)
        return ""


def read_all(text: str, reader: Callable[[ArrivingText], Reader[T]]) -> T:
    """Run a reader over a text that is complete."""
    arriving = ArrivingText()
    arriving.push(text)
    arriving.end()
    steps = reader(arriving)
    try:
        next(steps)
    except StopIteration as done:
        result: T = done.value
        return result
    raise RuntimeError("a reader asked for more text than there is")
