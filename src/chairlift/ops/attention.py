"""Attention over the paged KV cache, for any mix of prompt chunks and decodes in one flat batch."""

from __future__ import annotations

import numba
import numpy as np
import torch
import torch.nn.functional as F
from numba import njit, prange

from chairlift.ops.batch import Array, Batch
from chairlift.ops.kv_cache import KvCache
from chairlift.ops.kv_quant import score_narrow, weigh_narrow
from chairlift.ops.scoring import Scoring
from chairlift.ops.tile import BLOCK_COLUMNS, block_tile, exp
from chairlift.ops.triton_found import HAS_TRITON

_NOTHING = np.empty(0, np.float32)


def paged_attention(
    qkv: Array,
    heads: int,
    cache: KvCache,
    layer: int,
    batch: Batch,
    window: int = 0,
    scoring: Scoring | None = None,
) -> Array:
    """Return [tokens, heads * dim]: causal attention of the first `heads` heads of qkv over the sequences' cached KV.

    qkv is [tokens, heads, dim]. With a window, a token attends to the last `window` tokens, itself included. The keys
    and values of this step must be in the cache already.
    """
    scoring = scoring or Scoring.default(cache.dim)
    if isinstance(qkv, torch.Tensor):
        if qkv.is_cuda and HAS_TRITON:
            from chairlift.ops.attention_cuda import attend

            return attend(qkv, heads, cache, layer, batch, window, scoring)
        return paged_attention_reference(qkv, heads, cache, layer, batch, window, scoring)
    if not _fits_tiles(cache):
        tensor = torch.from_numpy(qkv)
        return paged_attention_reference(tensor, heads, cache, layer, batch, window, scoring).numpy()
    out = np.empty((qkv.shape[0], heads * cache.dim), np.float32)
    host = batch.host
    _attend(
        torch.get_num_threads(),
        qkv,
        heads,
        cache.arrays[layer],
        cache.scale_arrays[layer],
        host.tables,
        host.starts,
        host.contexts,
        cache.block_size,
        window or 1 << 30,
        scoring.scale,
        scoring.softcap,
        _NOTHING if scoring.sinks is None else scoring.sinks.numpy(),
        out,
    )
    return out


def paged_attention_reference(
    qkv: torch.Tensor,
    heads: int,
    cache: KvCache,
    layer: int,
    batch: Batch,
    window: int = 0,
    scoring: Scoring | None = None,
) -> torch.Tensor:
    """Compute paged_attention in plain torch: slice by slice, with keys and values gathered from the blocks."""
    scoring = scoring or Scoring.default(cache.dim)
    q = qkv[:, :heads]
    out = torch.empty_like(q)
    bounds, contexts = batch.host.starts.tolist(), batch.host.contexts.tolist()
    for i, context in enumerate(contexts):
        blocks = batch.tables[i, : -(-context // cache.block_size)].long()
        # Contiguous: the rounding of torch's product depends on strides, and tokens must not depend on the block size.
        k = cache.keys(layer, blocks).permute(1, 0, 3, 2).flatten(1, 2)[:, :context].contiguous()
        v = cache.values(layer, blocks).permute(1, 0, 2, 3).flatten(1, 2)[:, :context].contiguous()
        rows = slice(bounds[i], bounds[i + 1])
        place = torch.arange(context - (bounds[i + 1] - bounds[i]), context, device=q.device).unsqueeze(1)
        seen = torch.arange(context, device=q.device).unsqueeze(0)
        mask = seen <= place
        if window:
            mask &= seen > place - window
        queries = q[rows].to(k.dtype).transpose(0, 1)
        if scoring.softcap or scoring.sinks is not None:
            answer = _weigh_reference(queries, k, v, mask, scoring)
        else:
            answer = F.scaled_dot_product_attention(
                queries.unsqueeze(0),
                k.unsqueeze(0),
                v.unsqueeze(0),
                attn_mask=mask,
                scale=scoring.scale,
                enable_gqa=True,
            )[0]
        out[rows] = answer.transpose(0, 1)
    return out.flatten(1)


def _weigh_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """Return [heads, tokens, dim]: attention in separate steps, for softcap and sinks, which torch's SDPA lacks."""
    k, v = (each.repeat_interleave(q.shape[0] // each.shape[0], 0) for each in (k, v))
    scores = (q @ k.transpose(1, 2)).float() * scoring.scale
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if scoring.sinks is not None:
        scores = torch.cat([scores, scoring.sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[1]].to(v.dtype) @ v


def _fits_tiles(cache: KvCache) -> bool:
    return cache.block_size % BLOCK_COLUMNS == 0 and cache.dim % BLOCK_COLUMNS == 0


_QUERY_ROWS = 32  # query rows that share one pass over the keys


@njit(nogil=True, parallel=True, fastmath=True, error_model="numpy", cache=True)
def _attend(
    pieces: int,
    q: np.ndarray,
    heads: int,
    data: np.ndarray,
    scales: np.ndarray | None,
    tables: np.ndarray,
    starts: np.ndarray,
    contexts: np.ndarray,
    block_size: int,
    window: int,
    scale: float,
    softcap: float,
    sinks: np.ndarray,
    out: np.ndarray,
) -> None:
    for piece in prange(pieces):
        _attend_items(
            q, heads, data, scales, tables, starts, contexts, block_size, window, scale, softcap, sinks, out,
            piece, pieces,
        )  # fmt: skip


@njit(nogil=True, fastmath=True, error_model="numpy")
def _attend_items(
    q: np.ndarray,
    heads: int,
    data: np.ndarray,
    scales: np.ndarray | None,
    tables: np.ndarray,
    starts: np.ndarray,
    contexts: np.ndarray,
    block_size: int,
    window: int,
    scale: float,
    softcap: float,
    sinks: np.ndarray,
    out: np.ndarray,
    piece: int,
    pieces: int,
) -> None:
    """Compute the work items with number `piece` modulo `pieces`."""
    dim = q.shape[2]
    kv_heads = data.shape[2]
    group = heads // kv_heads
    stride = max(1, _QUERY_ROWS // group)  # tokens in one work item
    rows = max(min(stride, starts[-1]) * group, heads)
    longest = -(-contexts.max() // BLOCK_COLUMNS) * BLOCK_COLUMNS
    # A decode's KV heads are one item, since they are adjacent in memory, unless a thread would then have no item.
    together = kv_heads if contexts.size >= pieces else 1
    queries = np.empty((rows, dim), np.float32)
    sums = np.empty((rows, dim), np.float32)
    weights = np.empty((rows, longest), np.float32)
    item = 0
    for part in range(contexts.size):
        first, last = starts[part], starts[part + 1]
        span = together if last - first == 1 else 1
        for token in range(first, last, stride):
            count = min(stride, last - token)
            place = contexts[part] - (last - token)  # the first query's position
            for head in range(0, kv_heads, span):
                item += 1
                if item % pieces == piece:
                    _attend_item(
                        q, data, scales, tables, part, block_size, window, scale, softcap, sinks, out,
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
    scale: float,
    softcap: float,
    sinks: np.ndarray,
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
    """Compute `count` tokens from `token` on, for all query heads of `span` KV heads: scores, softmax, weighted sum."""
    dim = q.shape[2]
    rows = count * group  # per KV head; the queries are ordered by KV head
    factor, cap = numba.float32(scale), numba.float32(softcap)
    for h in range(span):
        for t in range(count):
            for g in range(group):
                for i in range(dim):
                    queries[h * rows + t * group + g, i] = q[token + t, (head + h) * group + g, i] * factor
    begin = max(0, place - window + 1) // BLOCK_COLUMNS * BLOCK_COLUMNS
    end = place + count
    queries_at, sums_at = queries.ctypes.data, sums.ctypes.data
    if scales is None:  # Numba decides by the type and compiles only one branch
        _score(queries_at, rows, dim, data, tables, piece, block_size, begin, end, head, span, weights)
    else:
        score_narrow(queries_at, rows, dim, data, tables, piece, block_size, begin, end, head, span, weights)
    for h in range(span):
        for t in range(count):
            position = place + t
            for g in range(group):
                row = h * rows + t * group + g
                sink = sinks[(head + h) * group + g] if sinks.size else numba.float32(-1e30)
                _softmax(weights, row, max(begin, position - window + 1), position + 1, begin, end, cap, sink)
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
    """Write the scores begin..end of `rows` queries for each of `span` KV heads."""
    # Addresses instead of array slices: in these loops making a slice costs more than its arithmetic.
    head_bytes = data.shape[3] * 4
    block_bytes = 2 * data.shape[2] * head_bytes
    keys_at, weights_at, pitch = data.ctypes.data + head * head_bytes, weights.ctypes.data, weights.shape[1]
    block_floats = block_bytes // 4
    for column in range(begin, end, BLOCK_COLUMNS):
        block = tables[piece, column // block_size]
        # Blocks are scattered, so the hardware cannot predict the next read: the tile prefetches it.
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
    """Write the weighted sums of the values begin..end."""
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
def _softmax(weights: np.ndarray, row: int, low: int, high: int, begin: int, end: int, cap: float, sink: float) -> None:
    """Replace the scores low..high of a row by softmax weights, and the masked columns around them by 0.

    A sink adds to the softmax's denominator; -1e30 means no sink.
    """
    # Unsigned: for signed indices Numba tests for counting from the end, which keeps LLVM from vectorizing the loop.
    line, first, last = numba.uintp(row), numba.uintp(low), numba.uintp(high)
    if cap > numba.float32(0.0):
        one, two = numba.float32(1.0), numba.float32(2.0)
        for i in range(first, last):
            weights[line, i] = cap - two * cap / (exp(two / cap * weights[line, i]) + one)  # cap * tanh(score / cap)
    peak = max(weights[line, first], sink)
    for i in range(first, last):
        peak = max(peak, weights[line, i])
    total = exp(sink - peak)
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
