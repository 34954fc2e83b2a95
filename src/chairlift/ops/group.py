"""Group: the operations between the ranks that share one model. Without tensor parallelism there is no group."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Group(Protocol):
    """The ranks of one model. Every rank must make the same calls in the same order, with tensors of the same shapes.

    Rank 0 chooses tokens: it alone needs the logits of the whole vocabulary.
    """

    @property
    def rank(self) -> int:
        """The number of this rank."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def sum(self, x: Any) -> Any:
        """Sum a tensor or a NumPy array over all ranks, in place, and return it."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the columns of all ranks side by side on rank 0; any other rank gets its own back."""

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrite a tensor with that of rank 0 and return it."""

    def least(self, number: int) -> int:
        """Return the least of all ranks' numbers."""
