"""Attention over the paged KV cache, for any mix of prompt chunks and decodes in one flat batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba
import numpy as np
import torch
import torch.nn.functional as F
from numba import njit, prange

from chairlift.ops.kv_cache import KvCache
from chairlift.ops.tile import BLOCK_COLUMNS, block_tile, exp


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which rows of the flat batch belong to whom, and where their keys and values lie."""

    positions: torch.Tensor  # [tokens] each token's place in its sequence
    slots: torch.Tensor  # [tokens] where its key and value go: block * block_size + offset
    starts: torch.Tensor  # [slices + 1] the slices' bounds in the batch
    contexts: torch.Tensor  # [slices] tokens of the sequence up to the slice's end
    tables: torch.Tensor  # [slices, blocks] physical blocks in order


def paged_attention(
    q: torch.Tensor, cache: KvCache, layer: int, batch: AttentionBatch, window: int = 0
) -> torch.Tensor:
    """Causal attention of q [tokens, heads, dim] to all that its sequence has in the cache, itself included.

    With a window, a token sees the last `window` tokens only. The keys of this step must be written already.
    """
    if q.device.type == "cpu" and q.dtype == torch.float32 and _fits_tiles(cache):
        out = torch.empty(q.shape)
        _attend(
            q.contiguous().numpy(),
            cache.data[layer].numpy(),
            batch.tables.numpy(),
            batch.starts.numpy(),
            batch.contexts.numpy(),
            cache.block_size,
            window or 1 << 30,
            out.numpy(),
            torch.get_num_threads(),
        )
        return out
    return paged_attention_reference(q, cache, layer, batch, window)


def paged_attention_reference(
    q: torch.Tensor, cache: KvCache, layer: int, batch: AttentionBatch, window: int = 0
) -> torch.Tensor:
    """The same in plain torch: slice by slice, with its keys and values gathered from the pages."""
    out = torch.empty_like(q)
    keys, values = cache.keys(layer), cache.values(layer)
    bounds, contexts = batch.starts.tolist(), batch.contexts.tolist()
    for i, context in enumerate(contexts):
        blocks = batch.tables[i, : -(-context // cache.block_size)].long()
        k = keys[blocks].permute(1, 0, 3, 2).flatten(1, 2)[:, :context]
        v = values[blocks].permute(1, 0, 2, 3).flatten(1, 2)[:, :context]
        rows = slice(bounds[i], bounds[i + 1])
        place = torch.arange(context - (bounds[i + 1] - bounds[i]), context, device=q.device).unsqueeze(1)
        seen = torch.arange(context, device=q.device).unsqueeze(0)
        mask = seen <= place
        if window:
            mask &= seen > place - window
        answer = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), attn_mask=mask, enable_gqa=True
        )
        out[rows] = answer[0].transpose(0, 1)
    return out


def _fits_tiles(cache: KvCache) -> bool:
    return cache.block_size % BLOCK_COLUMNS == 0 and cache.dim % BLOCK_COLUMNS == 0


_QUERY_ROWS = 32  # query rows that share one pass over the keys


@njit(nogil=True, parallel=True, fastmath=True, cache=True)
def _attend(
    q: np.ndarray,
    data: np.ndarray,
    tables: np.ndarray,
    starts: np.ndarray,
    contexts: np.ndarray,
    block_size: int,
    window: int,
    out: np.ndarray,
    threads: int,
) -> None:
    heads, dim = q.shape[1], q.shape[2]
    kv_heads = data.shape[2]
    group = heads // kv_heads
    stride = max(1, _QUERY_ROWS // group)  # tokens in one item of work
    for thread in prange(threads):
        queries = np.empty((stride * group, dim), np.float32)
        sums = np.empty((stride * group, dim), np.float32)
        scores = np.empty((stride * group, BLOCK_COLUMNS), np.float32)
        peaks = np.empty(stride * group, np.float32)
        totals = np.empty(stride * group, np.float32)
        item = 0
        for piece in range(contexts.size):
            first, last = starts[piece], starts[piece + 1]
            for token in range(first, last, stride):
                count = min(stride, last - token)
                place = contexts[piece] - (last - token)  # the first query's position
                for head in range(kv_heads):
                    item += 1
                    if item % threads == thread:
                        _attend_item(
                            q, data, tables[piece], block_size, window, out,
                            token, count, place, head, group, queries, sums, scores, peaks, totals,
                        )  # fmt: skip


@njit(nogil=True, fastmath=True)
def _attend_item(
    q: np.ndarray,
    data: np.ndarray,
    table: np.ndarray,
    block_size: int,
    window: int,
    out: np.ndarray,
    token: int,
    count: int,
    place: int,
    head: int,
    group: int,
    queries: np.ndarray,
    sums: np.ndarray,
    scores: np.ndarray,
    peaks: np.ndarray,
    totals: np.ndarray,
) -> None:
    """`count` tokens from `token` on, all query heads of one KV head, with the softmax carried along the blocks."""
    dim = q.shape[2]
    rows = count * group
    scale = numba.float32(1.0 / math.sqrt(dim))
    for row in range(rows):
        for i in range(dim):
            queries[row, i] = q[token + row // group, head * group + row % group, i] * scale
            sums[row, i] = 0.0
        peaks[row] = -1.0e38  # above a masked score, below any real one
        totals[row] = 0.0
    queries_at, sums_at, scores_at = queries.ctypes.data, sums.ctypes.data, scores.ctypes.data
    begin = max(0, place - window + 1) // BLOCK_COLUMNS * BLOCK_COLUMNS
    for column in range(begin, place + count, BLOCK_COLUMNS):
        block = table[column // block_size]
        offset = column % block_size
        keys = data[block, 0, head]
        values = data[block, 1, head]
        scores[:rows] = 0.0
        block_tile(rows, queries_at, dim, keys.ctypes.data + offset * 4, block_size, scores_at, BLOCK_COLUMNS, dim)
        for row in range(rows):
            position = place + row // group
            low = max(0, position - window + 1 - column)
            high = min(BLOCK_COLUMNS, position + 1 - column)
            _softmax_row(scores[row], low, high, peaks, totals, sums[row], row)
        for i in range(0, dim, BLOCK_COLUMNS):
            block_tile(
                rows, scores_at, BLOCK_COLUMNS, values.ctypes.data + (offset * dim + i) * 4, dim,
                sums_at + i * 4, dim, BLOCK_COLUMNS,
            )  # fmt: skip
    for row in range(rows):
        share = numba.float32(1.0) / totals[row]
        for i in range(dim):
            out[token + row // group, head * group + row % group, i] = sums[row, i] * share


@njit(nogil=True, fastmath=True)
def _softmax_row(
    scores: np.ndarray, low: int, high: int, peaks: np.ndarray, totals: np.ndarray, sums: np.ndarray, row: int
) -> None:
    """Turn one row's scores of a block into weights, rescaling what came before if a higher score appears."""
    for i in range(low):
        scores[i] = -3.0e38
    for i in range(high, BLOCK_COLUMNS):
        scores[i] = -3.0e38
    peak = peaks[row]
    for i in range(BLOCK_COLUMNS):
        peak = max(peak, scores[i])
    if peak > peaks[row]:
        fade = exp(peaks[row] - peak)
        totals[row] *= fade
        for i in range(sums.size):
            sums[i] *= fade
        peaks[row] = peak
    total = numba.float32(0.0)
    for i in range(BLOCK_COLUMNS):
        weight = exp(scores[i] - peak)
        scores[i] = weight
        total += weight
    totals[row] += total
