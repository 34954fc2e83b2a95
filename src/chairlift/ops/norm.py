"""RMS norm: scale each vector to unit root mean square, then by a learned weight."""

from __future__ import annotations

import math

import numba
import numpy as np
import torch
from numba import njit


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, in float32 inside as every family does it."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


@njit(nogil=True, fastmath=True, error_model="numpy")
def normalize(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray, first: int, last: int) -> None:
    """The same for the rows first..last of x, compiled; for calls from other kernels. `out` may be x."""
    size = x.shape[1]
    for row in range(first, last):
        total = numba.float32(0.0)
        for i in range(size):
            total += x[row, i] * x[row, i]
        scale = numba.float32(1.0 / math.sqrt(total / size + eps))
        for i in range(size):
            out[row, i] = x[row, i] * scale * weight[i]
