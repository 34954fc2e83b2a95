"""From the QKV projection to attention: norm, rotary embedding, and the write to the KV cache.

The rotary embedding rotates each pair (i, i + half) of a head by an angle that grows with the position.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, prange

from chairlift.ops.batch import Array, Batch
from chairlift.ops.kv_cache import KvCache, store_kv, write_kv_reference
from chairlift.ops.norm import normalize, rms_norm_reference
from chairlift.ops.triton_found import HAS_TRITON

_NOTHING = np.empty(0, np.float32)


def rotate_and_store(
    qkv: Array,
    cache: KvCache,
    layer: int,
    batch: Batch,
    cos_sin: tuple[Array, Array],
    norms: tuple[Array, Array] | None,
    eps: float,
) -> None:
    """Norm and rotate queries and keys of qkv [tokens, heads, dim] in place, then write keys and values to the cache.

    `cos_sin` are cosines and sines [positions, dim / 2]; `norms` the weights for queries and keys of families with a
    QK norm.
    """
    if isinstance(qkv, torch.Tensor):
        if qkv.is_cuda and HAS_TRITON:
            from chairlift.ops import fused_cuda

            fused_cuda.rotate_and_store(qkv, cache, layer, batch, cos_sin, norms, eps)  # type: ignore[arg-type]
        else:
            rotate_and_store_reference(qkv, cache, layer, batch, cos_sin, norms, eps)
        return
    (cos, sin), (q_norm, k_norm), host = cos_sin, norms or (_NOTHING, _NOTHING), batch.host
    _rotate_and_store(
        torch.get_num_threads(),
        qkv,
        cache.arrays[layer],
        cache.scale_arrays[layer],
        cache.block_size,
        host.positions,
        host.slots,
        cos,
        sin,
        q_norm,
        k_norm,
        eps,
    )


def rotate_and_store_reference(
    qkv: torch.Tensor,
    cache: KvCache,
    layer: int,
    batch: Batch,
    cos_sin: tuple[Any, Any],
    norms: tuple[Any, Any] | None,
    eps: float,
) -> None:
    """Compute rotate_and_store in plain torch."""
    keys = slice(qkv.shape[1] - 2 * cache.kv_heads, qkv.shape[1] - cache.kv_heads)
    q, k = qkv[:, : keys.start], qkv[:, keys]
    for heads, weight in zip((q, k), norms or (None, None), strict=True):
        normed = heads if weight is None else rms_norm_reference(heads, weight, eps)
        heads.copy_(rope_reference(normed, batch.positions, *cos_sin))
    write_kv_reference(cache, layer, qkv, batch)


def rope_reference(x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the rotation of x [tokens, heads, dim] as a new tensor."""
    c, s = cos[positions].unsqueeze(1).to(x.dtype), sin[positions].unsqueeze(1).to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)


@njit(nogil=True, parallel=True, error_model="numpy", cache=True)
def _rotate_and_store(
    pieces: int,
    qkv: np.ndarray,
    data: np.ndarray,
    scales: np.ndarray | None,
    block_size: int,
    positions: np.ndarray,
    slots: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    q_norm: np.ndarray,
    k_norm: np.ndarray,
    eps: float,
) -> None:
    for piece in prange(pieces):
        _rotate_tokens(
            qkv, data, scales, block_size, positions, slots, cos, sin, q_norm, k_norm, eps, piece, pieces
        )  # fmt: skip


@njit(nogil=True, error_model="numpy")  # no fastmath, which would change the rounding in store_kv
def _rotate_tokens(
    qkv: np.ndarray,
    data: np.ndarray,
    scales: np.ndarray | None,
    block_size: int,
    positions: np.ndarray,
    slots: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    q_norm: np.ndarray,
    k_norm: np.ndarray,
    eps: float,
    piece: int,
    pieces: int,
) -> None:
    tokens, kv_heads = qkv.shape[0], data.shape[2]
    heads = qkv.shape[1] - 2 * kv_heads
    first, last = tokens * piece // pieces, tokens * (piece + 1) // pieces
    for token in range(first, last):
        if q_norm.size:
            normalize(qkv[token], q_norm, eps, qkv[token], 0, heads)
            normalize(qkv[token], k_norm, eps, qkv[token], heads, heads + kv_heads)
        _rotate(qkv[token], heads + kv_heads, cos[positions[token]], sin[positions[token]])
    store_kv(data, scales, qkv, slots, block_size, first, last)


@njit(nogil=True, fastmath=True, error_model="numpy")
def _rotate(x: np.ndarray, heads: int, c: np.ndarray, s: np.ndarray) -> None:
    half = x.shape[1] // 2
    for head in range(heads):
        for i in range(half):
            first, second = x[head, i], x[head, half + i]
            x[head, i] = first * c[i] - second * s[i]
            x[head, half + i] = second * c[i] + first * s[i]
