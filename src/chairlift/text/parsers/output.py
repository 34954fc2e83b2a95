"""Output: collects the events of a parser, with neighbouring pieces joined."""

from chairlift.text.parsers.events import CallArguments, CallStart, Content, Event, Reasoning

_SPACE = " \t\r\n"


class Output:
    """Events since the last `take`.

    Whitespace next to calls is part of the format, not of the content: trailing whitespace of the content is held back
    until it is known what follows it.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.is_after_call = False  # nothing but whitespace has followed the last call
        self._events: list[Event] = []
        self._pieces: list[str] = []
        self._kind: type[Content | Reasoning | CallArguments] = Content  # of the pieces
        self._space: list[str] = []
        self._has_content = False

    def content(self, text: str) -> None:
        """Add text for the user."""
        body = text.rstrip(_SPACE)
        if not body:
            self._space.append(text)
            return
        space, end = "".join(self._space), text[len(body) :]
        if self.num_calls and not self._has_content:
            space, body = "", body.lstrip(_SPACE)
        self._select(Content)
        self._pieces += (space, body)
        self._space = [end]
        self._has_content, self.is_after_call = True, False

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        self._select(Reasoning)
        self._pieces.append(text)

    def start(self, name: str) -> None:
        """Begin a call."""
        self._join()
        self._space.clear()
        self._events.append(CallStart(self.num_calls, name))
        self.num_calls += 1
        self.is_after_call = True
        self._select(CallArguments)

    def arguments(self, text: str) -> None:
        """Add a piece of the last call's arguments."""
        self._select(CallArguments)
        self._pieces.append(text)

    def finish(self) -> None:
        """Add the whitespace held back, unless it follows a call."""
        if not self.is_after_call and any(self._space):
            self._select(Content)
            self._pieces += self._space
        self._space = []

    def take(self) -> list[Event]:
        """Return the events, and forget them."""
        self._join()
        events, self._events = self._events, []
        return events

    def _select(self, kind: type[Content | Reasoning | CallArguments]) -> None:
        if kind is not self._kind:
            self._join()
            self._kind = kind

    def _join(self) -> None:
        text = "".join(self._pieces)
        self._pieces = []
        if not text:
            return
        if self._kind is CallArguments:
            self._events.append(CallArguments(self.num_calls - 1, text))
        else:
            self._events.append(Reasoning(text) if self._kind is Reasoning else Content(text))
