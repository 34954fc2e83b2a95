"""Output: collects the events of a parser, with neighbouring pieces joined."""

from chairlift.text.parsers.events import CallArguments, CallStart, Content, Event

_SPACE = " \t\r\n"


class Output:
    """Events since the last `take`.

    Whitespace next to calls is part of the format, not of the content: trailing whitespace of the content is held back
    until it is known what follows it.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._events: list[Event] = []
        self._pieces: list[str] = []
        self._is_content = True  # the pieces are content, otherwise arguments of the last call
        self._space: list[str] = []
        self._has_content = False
        self._after_call = False

    def content(self, text: str) -> None:
        """Add text for the user."""
        body = text.rstrip(_SPACE)
        if not body:
            self._space.append(text)
            return
        space, end = "".join(self._space), text[len(body) :]
        if self.num_calls and not self._has_content:
            space, body = "", body.lstrip(_SPACE)
        self._select(is_content=True)
        self._pieces += (space, body)
        self._space = [end]
        self._has_content, self._after_call = True, False

    def start(self, name: str) -> None:
        """Begin a call."""
        self._join()
        self._space.clear()
        self._events.append(CallStart(self.num_calls, name))
        self.num_calls += 1
        self._after_call = True
        self._select(is_content=False)

    def arguments(self, text: str) -> None:
        """Add a piece of the last call's arguments."""
        self._select(is_content=False)
        self._pieces.append(text)

    def finish(self) -> None:
        """Add the whitespace held back, unless it follows a call."""
        if not self._after_call and any(self._space):
            self._select(is_content=True)
            self._pieces += self._space
        self._space = []

    def take(self) -> list[Event]:
        """Return the events, and forget them."""
        self._join()
        events, self._events = self._events, []
        return events

    def _select(self, *, is_content: bool) -> None:
        if is_content is not self._is_content:
            self._join()
            self._is_content = is_content

    def _join(self) -> None:
        text = "".join(self._pieces)
        self._pieces = []
        if text:
            last = self.num_calls - 1
            self._events.append(Content(text) if self._is_content else CallArguments(last, text))
