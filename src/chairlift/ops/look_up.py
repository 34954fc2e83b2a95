"""Look-up of the decodes' tokens, slots, contexts and block tables in the rows of all sequences."""

from __future__ import annotations

import torch

from chairlift.ops.triton_found import HAS_TRITON


def look_up(
    rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, tables: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, slots, contexts and block tables of decodes at these rows and positions."""
    if rows.is_cuda and HAS_TRITON:
        from chairlift.ops import fused_cuda

        return fused_cuda.look_up(rows, positions, tokens, tables, block_size)
    return look_up_reference(rows, positions, tokens, tables, block_size)


def look_up_reference(
    rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, tables: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute look_up in plain torch."""
    own = tables[rows]
    blocks = own.gather(1, (positions // block_size).long()[:, None])[:, 0].long()
    return tokens[rows, positions], blocks * block_size + positions % block_size, positions + 1, own
