"""The flat batch of one step: which tokens belong to whom, and where their keys and values lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

# What ops take and give: a torch tensor, or a NumPy array where compiled CPU kernels run. A layer makes six calls, and
# to turn tensors into arrays and back in each would cost more than the calls do.
Array = torch.Tensor | np.ndarray


class HostBatch(NamedTuple):
    """The batch in main memory."""

    positions: np.ndarray  # [tokens] each token's place in its sequence
    slots: np.ndarray  # [tokens] where its key and value go: block * block_size + offset
    starts: np.ndarray  # [slices + 1] the slices' bounds in the batch
    contexts: np.ndarray  # [slices] tokens of the sequence up to the slice's end
    tables: np.ndarray  # [slices, blocks] physical blocks in order


@dataclass(slots=True)
class Batch:
    """The batch on its device, and as it was in main memory: on the CPU they are the same bytes."""

    positions: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    contexts: torch.Tensor
    tables: torch.Tensor
    host: HostBatch
    _tiles: torch.Tensor | None = None

    @property
    def decodes(self) -> int:
        """How many slices of a single token stand before the first longer one."""
        longer = np.flatnonzero(np.diff(self.host.starts) > 1)
        return int(longer[0]) if longer.size else self.host.contexts.size

    def tiles(self, tokens: int) -> torch.Tensor | None:
        """The slices behind the decodes, cut into tiles of so many tokens: [2, tiles], each its slice and first token.

        Made by the first layer that asks, for all.
        """
        first = self.decodes
        if first == self.host.contexts.size:
            return None
        if self._tiles is None:
            counts = np.diff(self.host.starts)[first:]
            found = [(first + piece, token) for piece, count in enumerate(counts) for token in range(0, count, tokens)]
            self._tiles = torch.tensor(found, dtype=torch.int32).T.contiguous().to(self.tables.device)
        return self._tiles

    @staticmethod
    def on(device: torch.device, host: HostBatch) -> Batch:
        """Send a batch to its device."""
        positions, slots, starts, contexts, tables = (
            torch.from_numpy(array).to(device, non_blocking=True) for array in host
        )
        return Batch(positions, slots, starts, contexts, tables, host)
