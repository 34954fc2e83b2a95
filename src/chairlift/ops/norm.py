"""RMS norm: scale each vector to unit root mean square, then by a learned weight."""

from __future__ import annotations

import math

import numba
import numpy as np
import torch
from numba import njit


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension."""
    if x.device.type == "cpu" and x.dtype == torch.float32:
        out = torch.empty(x.shape)
        size = x.shape[-1]
        normalize(x.reshape(-1, size).numpy(), weight.numpy(), eps, out.view(-1, size).numpy())
        return out
    return rms_norm_reference(x, weight, eps)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The same in plain torch, in float32 inside as every family does it."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


@njit(nogil=True, fastmath=True, cache=True)
def normalize(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray) -> None:
    """The rows of x to unit root mean square, times the weight; for calls from other kernels too."""
    rows, size = x.shape
    for row in range(rows):
        total = numba.float32(0.0)
        for i in range(size):
            total += x[row, i] * x[row, i]
        scale = numba.float32(1.0 / math.sqrt(total / size + eps))
        for i in range(size):
            out[row, i] = x[row, i] * scale * weight[i]
