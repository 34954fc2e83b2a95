"""When the batch takes new requests: an admission gate on the one scheduling loop."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple, Protocol


class Line(NamedTuple):
    """What a gate sees of the batch and of those who wait for it."""

    running: int
    waiting: int  # of those who may share a batch
    seats: int  # in the whole batch
    since: float  # when the first in line came
    is_last: bool  # whether nobody else will come, or the first in line has been in a batch before


class Gate(Protocol):
    """Decides, before each step, whether waiting requests may join."""

    closes: bool  # whether a batch that has begun takes nobody in until all of it is done

    def is_open(self, line: Line, now: float) -> bool:
        """Whether to admit in this step."""
        ...

    def close(self) -> None:
        """All that could join have: the batch stands."""
        ...

    def pause(self, line: Line, now: float) -> float:
        """With an empty batch and those who wait: seconds until it opens by itself."""
        ...


class Continuous:
    """A free seat is taken at the very next step (iteration-level scheduling)."""

    closes = False

    def is_open(self, line: Line, now: float) -> bool:
        """Always."""
        return True

    def close(self) -> None:
        """It never is."""

    def pause(self, line: Line, now: float) -> float:
        """None."""
        return 0.0


class Static:
    """A batch starts when it is full, or when the input has ended; then nobody joins until all of it is done."""

    closes = True

    def __init__(self) -> None:
        self._is_forming = False  # a large batch takes several steps to let everybody in

    def is_open(self, line: Line, now: float) -> bool:
        """With an empty batch and enough who wait."""
        if not line.running:
            self._is_forming = self.pause(line, now) <= 0
        return self._is_forming

    def close(self) -> None:
        """The batch is complete."""
        self._is_forming = False

    def pause(self, line: Line, now: float) -> float:
        """Only another request helps."""
        return 0.0 if line.waiting >= line.seats or line.is_last else inf


class Dynamic(Static):
    """A batch starts when it is full or its first request has waited for a while; then it is closed until done."""

    def __init__(self, window: float) -> None:
        super().__init__()
        self._window = window

    def pause(self, line: Line, now: float) -> float:
        """What is left of the first one's window."""
        return min(super().pause(line, now), max(0.0, line.since + self._window - now))


GATES: dict[str, Callable[[float], Gate]] = {
    "continuous": lambda window: Continuous(),
    "dynamic": Dynamic,
    "static": lambda window: Static(),
}
