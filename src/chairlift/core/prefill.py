"""How prompts share a step with decodes: who goes first, how large a step is, and where a prompt is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from chairlift.core.cost import Cost
from chairlift.core.errors import SettingsError
from chairlift.core.limits import Limits


class PrefillMode(Protocol):
    """Cuts prompts to fit a step."""

    decodes_wait: int  # steps in a row that may have prompts and no decodes
    step_tokens: int  # that a step may hold

    def chunk(self, remaining: int, left: int) -> int:
        """How many of a prompt's `remaining` tokens to compute with `left` tokens of budget; 0 to wait."""
        ...


class Chunked:
    """Decodes first, and as much of the prompts as they have left room for (Sarathi)."""

    decodes_wait = 0

    def __init__(self, limits: Limits, cost: Cost) -> None:
        self.step_tokens = limits.step_tokens

    def chunk(self, remaining: int, left: int) -> int:
        """All that fits."""
        return min(remaining, left)


class SplitFuse(Chunked):
    """Every step of one moderate size: long prompts are cut and short ones put together to fill it (FastGen).

    The size is the smallest at which a step's tokens come about as cheap as they get: beyond it a larger step only
    makes everybody in it wait longer. It is twice the seats at least, so that a full batch leaves half of it.
    """

    def __init__(self, limits: Limits, cost: Cost) -> None:
        super().__init__(limits, cost)
        self.step_tokens = min(limits.step_tokens, max(2 * limits.max_sequences, cost.knee))


class PrefillFirst(Chunked):
    """Newcomers at once, in steps of their own; decodes wait. The best time to first token, and the worst stalls.

    If prompts come without end, one step in 17 has decodes, too, so that running sequences do not starve.
    """

    decodes_wait = 16


class Whole(Chunked):
    """A prompt in one step, beside the decodes, however long it is (Orca)."""

    def __init__(self, limits: Limits, cost: Cost) -> None:
        super().__init__(limits, cost)
        needed = limits.max_length + limits.max_sequences
        if limits.step_tokens < needed:
            raise SettingsError(
                f"step_tokens is {limits.step_tokens}, but with whole prompts a step may have to hold one of "
                f"{limits.max_length} tokens beside {limits.max_sequences} decodes: use {needed} or more, lower "
                "max_length, or use chunked prompts"
            )

    def chunk(self, remaining: int, left: int) -> int:
        """All or nothing."""
        return remaining if remaining <= left else 0


PREFILL_MODES: dict[str, Callable[[Limits, Cost], PrefillMode]] = {
    "chunked": Chunked,
    "splitfuse": SplitFuse,
    "prefill-first": PrefillFirst,
    "whole": Whole,
}
