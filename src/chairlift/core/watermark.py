"""How many blocks admission leaves free, so that a newcomer's prompt does not force a preemption a few steps later."""

from __future__ import annotations

_FLOOR = 0.01  # of the cache
_CEILING = 0.5
_RISE = 0.02  # of the cache, for each step in which somebody had to yield
_FALL = 0.999  # what is left of it after a step in which nobody had to


class Watermark:
    """Rises when sequences had to yield, since then too many were let in; sinks while none has to."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._floor = max(1.0, _FLOOR * total)
        self._level = self._floor

    @property
    def blocks(self) -> int:
        """How many to leave."""
        return int(self._level)

    def learn(self, has_yielded: bool) -> None:
        """A step has been planned."""
        if has_yielded:
            self._level = min(_CEILING * self._total, self._level + _RISE * self._total)
        else:
            self._level = max(self._floor, self._level * _FALL)
