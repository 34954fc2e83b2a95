"""Who goes next and who yields. A policy is a key (the smallest goes first) and a rule that picks the victim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from chairlift.core.request import Sequence


class Policy(Protocol):
    """The order of the queue and of the batch; ties go to who came first."""

    def key(self, sequence: Sequence) -> float:
        """The sequence's place, asked once when it joins the queue."""
        ...

    def victim(self, candidates: list[Sequence]) -> Sequence:
        """Who gives up its blocks; `candidates` is never empty and in the policy's order."""
        ...


class Fcfs:
    """First come, first served: the oldest goes first, the youngest yields; nobody starves."""

    def key(self, sequence: Sequence) -> float:
        """All equal: the arrival order decides."""
        return 0.0

    def victim(self, candidates: list[Sequence]) -> Sequence:
        """The youngest."""
        return candidates[-1]


POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": Fcfs}
