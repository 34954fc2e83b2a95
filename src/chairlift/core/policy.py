"""The seam for who goes next and who yields: a key, a lane, a victim rule. The policies are in policies.py."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from chairlift.core.request import Sequence

Lane = Hashable


def _nothing(sequence: Sequence) -> int:
    return 0


class Policy:
    """First come, first served, and the rules that other policies change.

    Those who wait stand in lanes, most policies have one; in a lane the smallest key goes first, and of equals who came
    first.
    """

    is_in_order = False  # whether who comes later never goes before who waits already
    needs_lengths = False  # whether it reads `sequence.expected`
    reads_cache = False  # whether its keys change with what is in the prefix cache
    is_preemptive = False  # whether those who run may have to yield to one who waits
    fills_by_lane = False  # whether a batch that closes is made of one lane

    def key(self, sequence: Sequence) -> float:
        """Its place in its lane and in the batch, asked once when it joins the queue."""
        return 0.0

    def lane(self, sequence: Sequence, now: float) -> Lane:
        """Where it waits; asked again when it is first there, so that it may have to change."""
        return None

    def choose(self, heads: Mapping[Lane, Sequence], now: float) -> Lane:
        """The lane whose first goes next; there is at least one."""
        return next(iter(heads))

    def victim(self, candidates: list[Sequence]) -> Sequence:
        """Who gives up its blocks when memory is short; `candidates` is never empty and in the order of keys."""
        return candidates[-1]

    def yields_to(self, newcomer: Sequence, running: list[Sequence]) -> Sequence | None:
        """Who gives up its seat and blocks to one who waits and does not fit, if anybody; `running` is in order."""
        return None

    def arrange(self, prompts: list[Sequence]) -> list[Sequence]:
        """In which order prompts under way share what the decodes leave of a step; they come in the order of keys."""
        return prompts

    # ---- what it may want to know

    cached: Callable[[Sequence], int] = staticmethod(_nothing)  # tokens of one who waits that are in the prefix cache

    def arrived(self, sequence: Sequence) -> None:
        """It waits for the first time."""

    def seated(self, sequence: Sequence) -> None:
        """It has a seat in the batch."""

    def unseated(self, sequence: Sequence) -> None:
        """It has lost its seat: it has ended, or yielded."""

    def ended(self, sequence: Sequence) -> None:
        """It is gone; after `unseated`, if it had a seat."""
