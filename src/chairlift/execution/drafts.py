"""DeviceDrafts: the seam for drafters on the device, which write drafts to rows before the model checks them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from chairlift.core.step import Newcomer, Step
from chairlift.execution.rows import Flat
from chairlift.ops.batch import count_decodes


class DeviceDrafts(ABC):
    """Drafts tokens for the rows of a batch, one pass of the batch for each position."""

    states: torch.Tensor | None = None  # where every pass of the model writes the hidden states that `read` reads

    def place(self, newcomer: Newcomer) -> None:  # noqa: B027  # most overwrite what the last one left
        """Note that a row has another sequence."""

    def copy(self, step: Step) -> None:  # noqa: B027  # most have no blocks of their own
        """Copy the blocks that the step copies."""

    def read(self, flat: Flat, rows: np.ndarray, at: np.ndarray) -> None:  # noqa: B027  # most have no states
        """Read the hidden states of a step; tokens `at` of its flat batch had the next token of `rows` sampled."""

    @abstractmethod
    def draft(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """Write `counts` drafts of each row behind its token at position `starts`, the last one known."""

    @abstractmethod
    def times(self, sizes: Sequence[int]) -> list[tuple[int, float]]:
        """Time a pass over so many rows, on rows without sequences."""

    def use_graphs(self) -> None:  # noqa: B027  # those that have none run kernel by kernel
        """Capture passes over a batch as CUDA graphs."""


def flat_of(rows: np.ndarray, begins: np.ndarray, counts: np.ndarray) -> Flat:
    """Lay out slices of `counts` tokens from positions `begins`."""
    starts = np.zeros(rows.size + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    owner = np.repeat(np.arange(rows.size), counts)
    positions = np.arange(owner.size) + (begins - starts[:-1])[owner]
    return Flat(rows, starts, begins + counts, owner, positions, count_decodes(starts))
