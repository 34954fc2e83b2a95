"""How much continuous batching can gain over static batching: arithmetic on the answers' lengths alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bound:
    """Forward passes with equal batches, all requests there from the start, in the order they came."""

    static: int  # each batch lasts as long as its longest answer
    continuous: int  # at least: no seat is ever empty, and the longest answer takes as many passes as it has tokens

    @property
    def ratio(self) -> float:
        """The most that can be gained; prompts longer than a step can shift it a little."""
        return self.static / self.continuous


def bound_of(lengths: Sequence[int], seats: int) -> Bound:
    """The bound for answers of these lengths.

    >>> bound_of([1, 8, 1, 8], seats=2)
    Bound(static=16, continuous=9)
    """
    static = sum(max(lengths[start : start + seats]) for start in range(0, len(lengths), seats))
    return Bound(static, max(max(lengths), -(-sum(lengths) // seats)))
