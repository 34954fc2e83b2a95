"""Masks of allowed tokens, which come from the host as packed bits."""

from __future__ import annotations

import numpy as np
import torch


def pack_masks(masks: list[bytes | None], vocabulary: int) -> np.ndarray:
    """Return masks as rows of bytes [masks, vocabulary / 8]; None allows every token."""
    width = -(-vocabulary // 8)
    packed = np.full((len(masks), width), 0xFF, np.uint8)
    for row, mask in zip(packed, masks, strict=True):
        if mask is not None:
            row[: len(mask)] = np.frombuffer(mask, np.uint8, min(width, len(mask)))
            row[len(mask) :] = 0
    return packed


def forbid_(logits: torch.Tensor, packed: torch.Tensor) -> None:
    """Set the logits [rows, vocabulary] of tokens whose bit is 0 to -inf."""
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
    is_allowed = (packed[:, :, None] >> bits) & 1
    logits.masked_fill_(is_allowed.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)
