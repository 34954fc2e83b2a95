"""Cut: the part of a tensor that one rank reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a tensor: ranges of rows (dimension 0) or one range of columns (dimension 1)."""

    dimension: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor: a view if it is one range of rows, else a copy."""
        import torch

        parts = [tensor.narrow(self.dimension, first, last - first) for first, last in self.ranges]
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).contiguous()

    def in_blocks(self, size: int) -> tuple[Cut, Cut | None]:
        """Return the cut in blocks of `size` columns, and what to cut from those, if they have further columns.

        >>> Cut(1, ((48, 96),)).in_blocks(32)
        (Cut(dimension=1, ranges=((1, 3),)), Cut(dimension=1, ranges=((16, 64),)))
        """
        if self.dimension == 0:
            return self, None
        ((first, last),) = self.ranges
        begin, end = first // size, -(-last // size)
        is_whole = first % size == 0 and last % size == 0
        return Cut(1, ((begin, end),)), None if is_whole else Cut(1, ((first - begin * size, last - begin * size),))
