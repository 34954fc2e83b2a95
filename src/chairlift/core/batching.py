"""Continuous, static and dynamic batching: an admission gate on the one scheduling loop."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple, Protocol


class GateView(NamedTuple):
    """The state of the batch and the queue that a gate decides on."""

    running: int  # sequences
    waiting: int  # sequences that may share a batch
    rows: int  # of the whole batch
    since: float  # arrival of the request that is admitted next
    is_last: bool  # whether no other request is expected, or the next one has been in a batch before


class Gate(Protocol):
    """Decides, before each step, whether waiting requests may be admitted."""

    closes: bool  # whether a batch that has started admits no request until all of it has ended

    def is_open(self, view: GateView, now: float) -> bool:
        """Whether to admit requests in this step."""
        ...

    def close(self) -> None:
        """Note that all requests that fit have been admitted."""
        ...

    def pause(self, view: GateView, now: float) -> float:
        """Return the seconds until it opens by itself, for an empty batch with waiting requests."""
        ...


class Continuous:
    """Admit a waiting request in the step after a row is free (iteration-level scheduling)."""

    closes = False

    def is_open(self, view: GateView, now: float) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Do nothing: it is never closed."""

    def pause(self, view: GateView, now: float) -> float:
        """Return 0: it is always open."""
        return 0.0


class Static:
    """Start a batch when it is full, or when the input has ended; admit no request until all of it has ended."""

    closes = True

    def __init__(self) -> None:
        self._is_forming = False  # a large batch is admitted over several steps

    def is_open(self, view: GateView, now: float) -> bool:
        """Whether the batch is empty and enough requests wait, or it is still being filled."""
        if not view.running:
            self._is_forming = self.pause(view, now) <= 0
        return self._is_forming

    def close(self) -> None:
        """Note that the batch is complete."""
        self._is_forming = False

    def pause(self, view: GateView, now: float) -> float:
        """Return 0 if the batch can start, else inf: only another request changes that."""
        return 0.0 if view.waiting >= view.rows or view.is_last else inf


class Dynamic(Static):
    """Start a batch when it is full or its first request has waited long enough; then admit none until it has ended."""

    def __init__(self, window: float) -> None:
        super().__init__()
        self._window = window

    def pause(self, view: GateView, now: float) -> float:
        """Return the rest of the first request's window."""
        return min(super().pause(view, now), max(0.0, view.since + self._window - now))


GATES: dict[str, Callable[[float], Gate]] = {
    "continuous": lambda window: Continuous(),
    "dynamic": Dynamic,
    "static": lambda window: Static(),
}
