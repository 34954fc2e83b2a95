"""The vocabulary, split over ranks: each has an equal part of the rows of the embedding and of the head.

The last part is padded with zeros if the vocabulary does not divide.
"""

from __future__ import annotations

import torch

from chairlift.ops.group import Group
from chairlift.ops.weight import Weight


def part_size(vocabulary: int, ranks: int) -> int:
    """Return the rows of each rank, padding included."""
    return -(-vocabulary // ranks)


def embed(tokens: torch.Tensor, table: Weight, group: Group | None) -> torch.Tensor:
    """Return the embeddings of tokens; `table` has this rank's rows."""
    if group is None:
        return table.lookup(tokens)
    own = tokens - group.rank * table.shape[0]
    is_elsewhere = (own < 0) | (own >= table.shape[0])
    found = table.lookup(own.masked_fill(is_elsewhere, 0))
    # One rank adds the embedding and the others add zeros: the sum is exact.
    summed: torch.Tensor = group.sum(found.masked_fill(is_elsewhere[:, None], 0))
    return summed


def join_logits(part: torch.Tensor, vocabulary: int, group: Group, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the logits of the whole vocabulary on rank 0, in `out` if given; other ranks get their part back."""
    found = group.gather(part)
    if group.rank:
        return found
    found = found[:, :vocabulary]
    return found.contiguous() if out is None else out.copy_(found)
