"""RMS norm: scale each vector to unit root mean square, then by a learned weight."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba
import numpy as np
import torch
from numba import njit, prange

from chairlift.ops.batch import Array
from chairlift.ops.triton_found import HAS_TRITON


@dataclass(frozen=True, slots=True)
class Norm:
    """The weight and the epsilon of an RMS norm."""

    weight: torch.Tensor
    eps: float


def rms_norm(x: torch.Tensor, norm: Norm, add_to: torch.Tensor | None = None) -> torch.Tensor:
    """Return the norm of x over its last dimension; with `add_to`, add it there in place and return that."""
    if x.is_cuda and HAS_TRITON:
        from chairlift.ops import fused_cuda

        return fused_cuda.rms_norm(x, norm.weight, norm.eps, add_to)
    y = rms_norm_reference(x, norm.weight, norm.eps)
    return y if add_to is None else add_to.add_(y)


def add_norm(y: Array, norm: Norm, add_to: Array | None) -> Array:
    """Norm the output of a layer, as Gemma does, and add it in place to the residual if one is given."""
    if isinstance(y, torch.Tensor):
        assert add_to is None or isinstance(add_to, torch.Tensor)
        return rms_norm(y, norm, add_to)
    out = np.zeros_like(y) if add_to is None else add_to
    assert isinstance(out, np.ndarray)
    _add_norm(torch.get_num_threads(), y, norm.weight.numpy(), norm.eps, out)
    return out


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) * weight over the last dimension, computed in float32.

    A weight in the dtype of x multiplies the rounded result, as in Llama; a float32 weight with 16-bit inputs
    multiplies before rounding, as in Gemma.
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight if weight.dtype == x.dtype else (scaled * weight).to(x.dtype)


@njit(nogil=True, fastmath=True, error_model="numpy", cache=True)
def normalize(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray, first: int, last: int) -> None:
    """Norm the rows first..last of x into `out`, which may be x; compiled, for calls from other kernels and alone."""
    size = x.shape[1]
    for row in range(first, last):
        total = numba.float32(0.0)
        for i in range(size):
            total += x[row, i] * x[row, i]
        scale = numba.float32(1.0 / math.sqrt(total / size + eps))
        for i in range(size):
            out[row, i] = x[row, i] * scale * weight[i]


@njit(nogil=True, parallel=True, fastmath=True, error_model="numpy", cache=True)
def _add_norm(pieces: int, y: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray) -> None:
    for piece in prange(pieces):
        _add_norm_rows(y, weight, eps, out, piece, pieces)


@njit(nogil=True, fastmath=True, error_model="numpy")
def _add_norm_rows(y: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray, piece: int, pieces: int) -> None:
    tokens = y.shape[0]
    first, last = tokens * piece // pieces, tokens * (piece + 1) // pieces
    normalize(y, weight, eps, y, first, last)
    for row in range(first, last):
        for i in range(y.shape[1]):
            out[row, i] += y[row, i]
