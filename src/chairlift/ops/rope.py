"""Rotary position embedding: turn each pair (i, i + half) of a head by an angle that grows with the position."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from chairlift.ops.batch import Batch


def rope_(x: torch.Tensor, heads: int, batch: Batch, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate the first `heads` of x [tokens, heads, dim] in place; cos and sin are tables [positions, dim / 2]."""
    if x.device.type == "cpu" and x.dtype == torch.float32:
        _rope(x.numpy(), heads, batch.host.positions, cos.numpy(), sin.numpy())
    else:
        x[:, :heads] = rope_reference(x[:, :heads], batch.positions, cos, sin)


def rope_reference(x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The same in plain torch, as a new tensor."""
    c, s = cos[positions].unsqueeze(1).to(x.dtype), sin[positions].unsqueeze(1).to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)


@njit(nogil=True, fastmath=True, cache=True)
def _rope(x: np.ndarray, heads: int, positions: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
    half = x.shape[2] // 2
    for token in range(x.shape[0]):
        c, s = cos[positions[token]], sin[positions[token]]
        for head in range(heads):
            for i in range(half):
                first, second = x[token, head, i], x[token, head, half + i]
                x[token, head, i] = first * c[i] - second * s[i]
                x[token, head, half + i] = second * c[i] + first * s[i]
