"""How prompts share a step with decodes: how much of a prompt goes into what is left of the budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class PrefillMode(Protocol):
    """Cuts prompts to fit a step."""

    def chunk(self, remaining: int, left: int) -> int:
        """How many of a prompt's `remaining` tokens to compute with `left` tokens of budget; 0 to wait."""
        ...


class Chunked:
    """As much of the prompt as the decodes have left room for (Sarathi)."""

    def chunk(self, remaining: int, left: int) -> int:
        """All that fits."""
        return min(remaining, left)


PREFILL_MODES: dict[str, Callable[[], PrefillMode]] = {"chunked": Chunked}
