"""Stop strings: the end of a text that is generated in pieces, and the part that is safe to show before it."""

from collections.abc import Sequence

from chairlift.core.errors import RequestError


class StopSearch:
    """Finds the first stop string, and holds back the longest end of the text that could become one.

    The text held back is shorter than the longest stop string, so the cost of a piece does not grow with the text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if isinstance(stops, str) or not all(stops):
            raise RequestError(f"stop strings must be a list of texts that are not empty, not {stops!r}")
        self.found: str | None = None
        self._stops = tuple(stops)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops), default=0)
        self._include = include
        self._held = ""

    def feed(self, piece: str, armed: bool = True) -> str:
        """Read the next piece of text and return the text to show; unless armed, ignore stop strings that end in it."""
        if not self._stops:
            return piece
        text = self._held + piece
        match = self._match(text, len(self._held)) if armed else None
        if match is not None:
            start, self.found = match
            self._held = ""
            return text[: start + len(self.found) if self._include else start]
        safe = self._safe(text)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """Return the text held back: the text has ended, so it can complete no stop string."""
        held, self._held = self._held, ""
        return held

    def _match(self, text: str, seen: int) -> tuple[int, str] | None:
        """Return the first, then shortest, stop string that ends in the new part, with its start."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            # Starting the search here skips matches that end before the new part: they were ignored then.
            start = text.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0 and (best is None or (start, len(stop)) < best[:2]):
                best = (start, len(stop), stop)
        return None if best is None else (best[0], best[2])

    def _safe(self, text: str) -> int:
        """Return the length of the text in which no incomplete stop string begins."""
        end = len(text)
        for start in range(max(0, end - self._longest + 1), end):
            if text[start] in self._firsts:
                tail = text[start:]
                if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                    return start
        return end
