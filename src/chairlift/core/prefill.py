"""Prefill modes: the order of prompts and decodes in a step, the step's size, and the cutting of prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from chairlift.core.cost import Cost
from chairlift.core.errors import SettingsError
from chairlift.core.limits import Limits


class PrefillMode(Protocol):
    """Cuts prompts to fit a step."""

    decodes_wait: int  # most steps in a row with prompts and without decodes
    step_tokens: int  # most tokens of a step

    def chunk(self, remaining: int, left: int) -> int:
        """Return how many of a prompt's `remaining` tokens to compute with `left` tokens of budget; 0 to wait."""
        ...

    def room_for_drafts(self, left: int) -> int:
        """Return how many of the `left` tokens that decodes leave may be drafts while prompts wait for them."""
        ...


class Chunked:
    """Decodes first; prompt chunks fill the rest of the budget (Sarathi)."""

    decodes_wait = 0

    def __init__(self, limits: Limits, cost: Cost) -> None:
        self.step_tokens = limits.step_tokens

    def chunk(self, remaining: int, left: int) -> int:
        """Return as many tokens as fit."""
        return min(remaining, left)

    def room_for_drafts(self, left: int) -> int:
        """Return half of them."""
        return left // 2


class SplitFuse(Chunked):
    """Steps of one moderate size: long prompts are cut and short ones combined to fill it (FastGen).

    The size is the smallest with about the lowest cost per token: a larger step only takes longer. It is at least twice
    max_sequences, so that a full batch of decodes leaves half of it to prompts.
    """

    def __init__(self, limits: Limits, cost: Cost) -> None:
        super().__init__(limits, cost)
        self.step_tokens = min(limits.step_tokens, max(2 * limits.max_sequences, cost.knee))


class PrefillFirst(Chunked):
    """Prompts first, in steps without decodes. The best time to first token, and the longest stalls of decodes.

    If prompts arrive without end, one step in 17 has decodes, too, so that running sequences do not starve.
    """

    decodes_wait = 16


class Whole(Chunked):
    """Each prompt in one step, with the decodes, however long it is (Orca)."""

    def __init__(self, limits: Limits, cost: Cost) -> None:
        super().__init__(limits, cost)
        self._longest = limits.max_length
        needed = limits.max_length + limits.max_sequences
        if limits.step_tokens < needed:
            raise SettingsError(
                f"step_tokens is {limits.step_tokens}, but with whole prompts a step may have to hold one of "
                f"{limits.max_length} tokens beside {limits.max_sequences} decodes: use {needed} or more, lower "
                "max_length, or use chunked prompts"
            )

    def chunk(self, remaining: int, left: int) -> int:
        """Return all tokens if they fit, else 0."""
        return remaining if remaining <= left else 0

    def room_for_drafts(self, left: int) -> int:
        """Return what the longest prompt leaves."""
        return max(0, left - self._longest)


PREFILL_MODES: dict[str, Callable[[Limits, Cost], PrefillMode]] = {
    "chunked": Chunked,
    "splitfuse": SplitFuse,
    "prefill-first": PrefillFirst,
    "whole": Whole,
}
