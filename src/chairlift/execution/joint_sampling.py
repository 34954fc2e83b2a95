"""Sampling with several ranks: rank 0 chooses every token, and the other ranks get its tokens in the same step.

So all ranks have the same inputs for the next step, also if their sums differ in the last bit, and only rank 0 needs
logits, sampling parameters, grammars and penalties.
"""

from __future__ import annotations

import numpy as np
import torch

from chairlift.core.step import Newcomer
from chairlift.execution.rows import Rows
from chairlift.execution.sampler import Sampler
from chairlift.ops.group import Group


class LeadingSampler:
    """The sampler of rank 0, which sends each choice to the other ranks."""

    def __init__(self, sampler: Sampler, group: Group) -> None:
        self._sampler, self._group = sampler, group
        self.place = sampler.place

    def is_greedy(self, rows: np.ndarray) -> bool:
        """Whether a captured step may choose the tokens itself: it may not, since they must be sent."""
        return False

    def sample(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray, masks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return one token for each row of logits, and write it to the row."""
        return self._group.broadcast(self._sampler.sample(logits, rows, positions, masks).long())


class FollowingSampler:
    """The sampler of any other rank, which gets the tokens of rank 0."""

    def __init__(self, rows: Rows, group: Group) -> None:
        self._rows, self._group = rows, group

    def place(self, newcomer: Newcomer) -> None:
        """Ignore a sequence's parameters."""

    def is_greedy(self, rows: np.ndarray) -> bool:
        """Whether a captured step may choose the tokens itself."""
        return False

    def sample(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray, masks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the tokens that rank 0 has chosen, and write them to their rows."""
        tokens = self._group.broadcast(torch.empty(rows.size, dtype=torch.int64, device=self._rows.device))
        self._rows.put(rows, positions, tokens)
        return tokens
