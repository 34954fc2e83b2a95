"""Masks of allowed tokens, which come from the host as packed bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from chairlift.ops.sampling import is_fused


def pack_masks(masks: Sequence[bytes | memoryview | None], vocabulary: int, *, pin: bool = False) -> torch.Tensor:
    """Return masks as rows of bytes [masks, at least vocabulary / 8]; None allows every token.

    In pinned memory, a copy to a GPU does not wait for the work before it. Masks that are one array are not copied.
    """
    width = -(-vocabulary // 8)
    whole: np.ndarray | None = getattr(masks, "whole", None)
    if whole is not None and 4 * whole.shape[1] >= width:
        return torch.from_numpy(whole.view(np.uint8))
    packed = torch.empty((len(masks), width), dtype=torch.uint8, pin_memory=pin)
    for row, mask in zip(packed.numpy(), masks, strict=True):
        if mask is None:
            row[:] = 0xFF
        else:
            found = np.frombuffer(mask, np.uint8, min(width, len(mask)))
            row[: found.size] = found
            row[found.size :] = 0
    return packed


def pinned_rows(rows: int, words: int) -> np.ndarray:
    """Return memory for masks that a GPU can copy from."""
    array: np.ndarray = torch.empty((rows, words), dtype=torch.int32, pin_memory=True).numpy()
    return array


def forbid_(logits: torch.Tensor, packed: torch.Tensor) -> None:
    """Set the logits [rows, vocabulary] of tokens with a bit of 0 to -inf."""
    if is_fused(logits):
        from chairlift.ops import sampling_cuda

        sampling_cuda.forbid_(logits, packed)
    else:
        forbid_reference_(logits, packed)


def forbid_reference_(logits: torch.Tensor, packed: torch.Tensor) -> None:
    """Compute forbid_ in plain torch."""
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
    is_allowed = (packed[:, :, None] >> bits) & 1
    logits.masked_fill_(is_allowed.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)
