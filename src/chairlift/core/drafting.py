"""Drafter: the seam for speculation. A drafter proposes tokens that may come next in a sequence.

A step checks proposals in a slice of 1 + k tokens, and only tokens that the model would have chosen itself are
accepted. So a bad drafter costs time and never changes an answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from chairlift.core.request import Sequence

MAX_DRAFTS = 8  # for one sequence in a step: the ninth is hardly ever accepted
GRADES = 10
UNKNOWN = -1  # a draft that the executor's own draft model chooses, on the device


class Proposal(NamedTuple):
    """Draft tokens of one sequence, in order."""

    tokens: list[int]
    grade: int = 0  # below GRADES: proposals of one grade are accepted about equally often


NOTHING = Proposal([])


class Drafter(ABC):
    """Proposes draft tokens."""

    is_on_device = False  # the executor chooses the tokens: drafts are UNKNOWN
    seconds = 0.0  # of the host, for each sequence in a step

    @abstractmethod
    def propose(self, sequence: Sequence, most: int) -> Proposal:
        """Return up to `most` tokens that may follow the sequence's tokens, all of which are known."""

    def ended(self, sequence: Sequence) -> None:  # noqa: B027  # most drafters keep nothing of a sequence
        """Learn from a sequence that has ended, and forget it."""


class DeviceDrafter(Drafter):
    """Leaves the choice of the tokens to a draft model in the executor."""

    is_on_device = True

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        """Return as many placeholders as may be drafted; masks of a grammar would need the tokens themselves."""
        return NOTHING if sequence.constraint is not None else Proposal([UNKNOWN] * most)


class Filler(Drafter):
    """Proposes the sequence's last token again and again, for measurements with a given acceptance."""

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        """Return as many tokens as allowed."""
        return Proposal(sequence.tokens[-1:] * most)
