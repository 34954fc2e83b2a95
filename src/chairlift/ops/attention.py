"""Attention over the paged KV cache, for any mix of prompt chunks and decodes in one flat batch."""

from __future__ import annotations

import math

import numba
import numpy as np
import torch
import torch.nn.functional as F
from numba import njit, prange

from chairlift.ops.batch import Array, Batch
from chairlift.ops.kv_cache import KvCache
from chairlift.ops.kv_quant import score_narrow, weigh_narrow
from chairlift.ops.tile import BLOCK_COLUMNS, block_tile, exp
from chairlift.ops.triton_found import HAS_TRITON


def paged_attention(qkv: Array, heads: int, cache: KvCache, layer: int, batch: Batch, window: int = 0) -> Array:
    """Causal attention of the first `heads` of qkv [tokens, heads, dim] to all that their sequences have in the cache.

    With a window, a token sees the last `window` tokens only, itself among them. The keys and values of this step must
    be written already. Gives [tokens, heads * dim].
    """
    if isinstance(qkv, torch.Tensor):
        if qkv.is_cuda and HAS_TRITON:
            from chairlift.ops.attention_cuda import attend

            return attend(qkv, heads, cache, layer, batch, window)
        return paged_attention_reference(qkv, heads, cache, layer, batch, window)
    if not _fits_tiles(cache):
        return paged_attention_reference(torch.from_numpy(qkv), heads, cache, layer, batch, window).numpy()
    out = np.empty((qkv.shape[0], heads * cache.dim), np.float32)
    host = batch.host
    _attend(
        qkv,
        heads,
        cache.arrays[layer],
        cache.scale_arrays[layer],
        host.tables,
        host.starts,
        host.contexts,
        cache.block_size,
        window or 1 << 30,
        out,
        torch.get_num_threads(),
    )
    return out


def paged_attention_reference(
    qkv: torch.Tensor, heads: int, cache: KvCache, layer: int, batch: Batch, window: int = 0
) -> torch.Tensor:
    """The same in plain torch: slice by slice, with its keys and values gathered from the pages."""
    q = qkv[:, :heads]
    out = torch.empty_like(q)
    bounds, contexts = batch.host.starts.tolist(), batch.host.contexts.tolist()
    for i, context in enumerate(contexts):
        blocks = batch.tables[i, : -(-context // cache.block_size)].long()
        # Contiguous: torch's product rounds by how its factors lie, and a token must not depend on the size of blocks.
        k = cache.keys(layer, blocks).permute(1, 0, 3, 2).flatten(1, 2)[:, :context].contiguous()
        v = cache.values(layer, blocks).permute(1, 0, 2, 3).flatten(1, 2)[:, :context].contiguous()
        rows = slice(bounds[i], bounds[i + 1])
        place = torch.arange(context - (bounds[i + 1] - bounds[i]), context, device=q.device).unsqueeze(1)
        seen = torch.arange(context, device=q.device).unsqueeze(0)
        mask = seen <= place
        if window:
            mask &= seen > place - window
        answer = F.scaled_dot_product_attention(
            q[rows].to(k.dtype).transpose(0, 1).unsqueeze(0),
            k.unsqueeze(0),
            v.unsqueeze(0),
            attn_mask=mask,
            enable_gqa=True,
        )
        out[rows] = answer[0].transpose(0, 1)
    return out.flatten(1)


def _fits_tiles(cache: KvCache) -> bool:
    return cache.block_size % BLOCK_COLUMNS == 0 and cache.dim % BLOCK_COLUMNS == 0


_QUERY_ROWS = 32  # query rows that share one pass over the keys


@njit(nogil=True, parallel=True, fastmath=True, error_model="numpy", cache=True)
def _attend(
    q: np.ndarray,
    heads: int,
    data: np.ndarray,
    scales: np.ndarray | None,
    tables: np.ndarray,
    starts: np.ndarray,
    contexts: np.ndarray,
    block_size: int,
    window: int,
    out: np.ndarray,
    threads: int,
) -> None:
    dim = q.shape[2]
    kv_heads = data.shape[2]
    group = heads // kv_heads
    stride = max(1, _QUERY_ROWS // group)  # tokens in one item of work
    rows = max(min(stride, starts[-1]) * group, heads)
    longest = -(-contexts.max() // BLOCK_COLUMNS) * BLOCK_COLUMNS
    # A decode's heads are one item, for they lie side by side in memory; unless that leaves a thread without work.
    together = kv_heads if contexts.size >= 4 * threads else 1
    for thread in prange(threads):
        queries = np.empty((rows, dim), np.float32)
        sums = np.empty((rows, dim), np.float32)
        weights = np.empty((rows, longest), np.float32)
        item = 0
        for piece in range(contexts.size):
            first, last = starts[piece], starts[piece + 1]
            span = together if last - first == 1 else 1
            for token in range(first, last, stride):
                count = min(stride, last - token)
                place = contexts[piece] - (last - token)  # the first query's position
                for head in range(0, kv_heads, span):
                    item += 1
                    if item % threads == thread:
                        _attend_item(
                            q, data, scales, tables, piece, block_size, window, out,
                            token, count, place, head, span, group, queries, sums, weights,
                        )  # fmt: skip


@njit(nogil=True, fastmath=True, error_model="numpy")
def _attend_item(
    q: np.ndarray,
    data: np.ndarray,
    scales: np.ndarray | None,
    tables: np.ndarray,
    piece: int,
    block_size: int,
    window: int,
    out: np.ndarray,
    token: int,
    count: int,
    place: int,
    head: int,
    span: int,
    group: int,
    queries: np.ndarray,
    sums: np.ndarray,
    weights: np.ndarray,
) -> None:
    """`count` tokens from `token` on, all query heads of `span` KV heads: scores, softmax, weighted values."""
    dim = q.shape[2]
    rows = count * group  # of each KV head; their queries lie one KV head after the other
    scale = numba.float32(1.0 / math.sqrt(dim))
    for h in range(span):
        for t in range(count):
            for g in range(group):
                for i in range(dim):
                    queries[h * rows + t * group + g, i] = q[token + t, (head + h) * group + g, i] * scale
    begin = max(0, place - window + 1) // BLOCK_COLUMNS * BLOCK_COLUMNS
    end = place + count
    queries_at, sums_at = queries.ctypes.data, sums.ctypes.data
    if scales is None:  # Numba knows it from the type, and compiles only one of the two
        _score(queries_at, rows, dim, data, tables, piece, block_size, begin, end, head, span, weights)
    else:
        score_narrow(queries_at, rows, dim, data, tables, piece, block_size, begin, end, head, span, weights)
    for h in range(span):
        for t in range(count):
            position = place + t
            for g in range(group):
                row = h * rows + t * group + g
                _softmax(weights, row, max(begin, position - window + 1), position + 1, begin, end)
    if scales is None:
        _weigh(weights, rows, dim, data, tables, piece, block_size, begin, end, head, span, sums_at)
    else:
        weigh_narrow(weights, rows, dim, data, tables, piece, block_size, begin, end, head, span, sums_at)
    for h in range(span):
        for t in range(count):
            for g in range(group):
                for i in range(dim):
                    out[token + t, ((head + h) * group + g) * dim + i] = sums[h * rows + t * group + g, i]


@njit(nogil=True, fastmath=True, error_model="numpy")
def _score(
    queries_at: int, rows: int, dim: int, data: np.ndarray, tables: np.ndarray, piece: int, block_size: int,
    begin: int, end: int, head: int, span: int, weights: np.ndarray,
) -> None:  # fmt: skip
    """The scores begin..end of `rows` queries for each of `span` KV heads."""
    # Addresses instead of array slices: in these loops the bookkeeping of a slice costs more than its arithmetic.
    head_bytes = data.shape[3] * 4
    block_bytes = 2 * data.shape[2] * head_bytes
    keys_at, weights_at, pitch = data.ctypes.data + head * head_bytes, weights.ctypes.data, weights.shape[1]
    block_floats = block_bytes // 4
    for column in range(begin, end, BLOCK_COLUMNS):
        block = tables[piece, column // block_size]
        # Pages are scattered, so no hardware foresees where to read next: the tile asks for it as it goes.
        if column + BLOCK_COLUMNS < end:
            ahead = (tables[piece, min(column + block_size, end - 1) // block_size] - block) * block_floats
        else:  # the first values
            ahead = (tables[piece, begin // block_size] - block) * block_floats + block_floats // 2
        for h in range(span):
            a, c = queries_at + h * rows * dim * 4, weights_at + (h * rows * pitch + column) * 4
            b = keys_at + block * block_bytes + h * head_bytes + column % block_size * 4
            block_tile(rows, a, dim, b, block_size, c, pitch, dim, 0, ahead)


@njit(nogil=True, fastmath=True, error_model="numpy")
def _weigh(
    weights: np.ndarray, rows: int, dim: int, data: np.ndarray, tables: np.ndarray, piece: int, block_size: int,
    begin: int, end: int, head: int, span: int, sums_at: int,
) -> None:  # fmt: skip
    """The sums of the values begin..end, weighted."""
    head_bytes = data.shape[3] * 4
    block_bytes = 2 * data.shape[2] * head_bytes
    values_at, weights_at = data.ctypes.data + (data.shape[2] + head) * head_bytes, weights.ctypes.data
    block_floats, pitch = block_bytes // 4, weights.shape[1]
    for column in range(begin, end, BLOCK_COLUMNS):
        block = tables[piece, column // block_size]
        ahead = (tables[piece, min(column + block_size, end - 1) // block_size] - block) * block_floats
        for h in range(span):
            a, c = weights_at + (h * rows * pitch + column) * 4, sums_at + h * rows * dim * 4
            b = values_at + block * block_bytes + h * head_bytes + column % block_size * dim * 4
            for i in range(0, dim * 4, BLOCK_COLUMNS * 4):
                block_tile(rows, a, pitch, b + i, dim, c + i, dim, BLOCK_COLUMNS, column - begin, ahead)


@njit(nogil=True, fastmath=True, error_model="numpy")
def _softmax(weights: np.ndarray, row: int, low: int, high: int, begin: int, end: int) -> None:
    """Turn the scores low..high of a row into weights that add up to 1; what is masked around them becomes 0."""
    # Unsigned: Numba lets a signed index count from the end, and that test in a loop keeps LLVM from vectors.
    line, first, last = numba.uintp(row), numba.uintp(low), numba.uintp(high)
    peak = weights[line, first]
    for i in range(first, last):
        peak = max(peak, weights[line, i])
    total = numba.float32(0.0)
    for i in range(first, last):
        weight = exp(weights[line, i] - peak)
        weights[line, i] = weight
        total += weight
    share = numba.float32(1.0) / total
    for i in range(first, last):
        weights[line, i] *= share
    for i in range(numba.uintp(begin), first):
        weights[line, i] = 0.0
    for i in range(last, numba.uintp(-(-end // BLOCK_COLUMNS) * BLOCK_COLUMNS)):
        weights[line, i] = 0.0
