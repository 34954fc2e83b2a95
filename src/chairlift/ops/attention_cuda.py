"""Paged attention in Triton: decode_cuda has decodes, this file prompts; cuDNN computes whole long prompts.

A program computes a tile of queries of one KV head: some tokens of one slice times all query heads that share the KV
head, so that keys and values are read once for the group.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

from chairlift.ops.batch import Batch
from chairlift.ops.decode_cuda import attend_decodes, with_sink
from chairlift.ops.early_cuda import early, wait
from chairlift.ops.kv_cache import KvCache
from chairlift.ops.kv_codes_cuda import capped, numbers, widened
from chairlift.ops.kv_quant import MAX_CODES
from chairlift.ops.scoring import Scoring

_ROWS = 64  # queries (tokens x heads) in a tile
_LONG_ROWS = 128  # queries in a tile for contexts above LONG
_LEAST_ROWS = 16  # of the smallest tile that tensor cores take
_KEYS = 64  # keys per iteration
_EXACT = 32  # queries and keys in float32
LONG = 2048  # tokens; from this length on a whole prompt is computed by cuDNN, which is 1.5 times as fast
_STEP = 1024  # cuDNN's lengths are rounded up to this: preparing for a new length takes 50 ms


def attend(
    qkv: torch.Tensor,
    heads: int,
    cache: KvCache,
    layer: int,
    batch: Batch,
    window: int = 0,
    scoring: Scoring | None = None,
) -> torch.Tensor:
    """Compute paged_attention on a CUDA device."""
    scoring = scoring or Scoring.default(cache.dim)
    out = torch.empty(qkv.shape[0], heads * cache.dim, dtype=qkv.dtype, device=qkv.device)
    if batch.decodes:
        attend_decodes(qkv, heads, cache, layer, batch, window, scoring, out)
    if batch.decodes < batch.host.contexts.size:
        _attend_prompts(qkv, heads, cache, layer, batch, window, scoring, out)
    return out


def _attend_prompts(
    qkv: torch.Tensor,
    heads: int,
    cache: KvCache,
    layer: int,
    batch: Batch,
    window: int,
    scoring: Scoring,
    out: torch.Tensor,
) -> None:
    group, dim = heads // cache.kv_heads, cache.dim
    is_exact = qkv.dtype == torch.float32
    is_long = batch.longest_prompt > LONG and dim <= 128
    tokens = tokens_of_tile(group, is_exact, is_long)
    is_odd = is_exact or window or cache.scales is not None or scoring.softcap or scoring.sinks is not None
    left = qkv.is_cuda and not is_odd and dim in (64, 128)
    tiles, whole = batch.tiles(tokens, LONG if left else 1 << 30)
    for first, last in whole:
        _attend_whole(qkv, heads, cache.kv_heads, first, last, scoring.scale, out)
    if not tiles.shape[0]:
        return
    data = cache.data[layer]
    scales = data if cache.scales is None else cache.scales[layer].view(torch.int16)
    rows = triton.next_power_of_2(max(_LEAST_ROWS, tokens * group))
    _attend[(tiles.shape[0], cache.kv_heads)](
        qkv, data, scales, batch.tables, tiles, qkv if scoring.sinks is None else scoring.sinks, out,
        math.log2(math.e) * scoring.scale, window or 1 << 30, batch.tables.stride(0), qkv.stride(0),
        data.stride(0), data.stride(1), data.stride(2),
        GROUP=group, HEADS=heads, DIM=dim, WIDTH=triton.next_power_of_2(dim), BLOCK=cache.block_size, ROWS=rows,
        KEYS=_EXACT if is_exact else _KEYS, WINDOWED=window > 0, EXACT=is_exact,
        CAP=scoring.softcap, SINKS=scoring.sinks is not None, MAX_CODE=MAX_CODES.get(cache.dtype, 0), num_warps=4,
        num_stages=3 if is_long else 2, **early(),
    )  # fmt: skip


def tokens_of_tile(group: int, is_exact: bool, is_long: bool = False) -> int:
    """Return the number of prompt tokens in a tile, which has all query heads that share a KV head."""
    return max(1, (_EXACT if is_exact else _LONG_ROWS if is_long else _ROWS) // group)


def _attend_whole(
    qkv: torch.Tensor, heads: int, kv_heads: int, first: int, last: int, scale: float, out: torch.Tensor
) -> None:
    """Compute a prompt that begins at position 0, so that qkv has all its keys and values: tokens first..last.

    The rows after `last`, up to a multiple of _STEP, may be other sequences' tokens: causal queries ignore them.
    """
    count = last - first
    rows = qkv[first : first + -(-count // _STEP) * _STEP]
    if rows.shape[0] % _STEP:
        rows = F.pad(rows, (0, 0, 0, 0, 0, -rows.shape[0] % _STEP))
    q, k, v = rows.transpose(0, 1).unsqueeze(0).split([heads, kv_heads, kv_heads], dim=1)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    out[first:last] = found[0].transpose(0, 1)[:count].flatten(1)


# The width of the tables differs from step to step: do not compile a kernel per stride.
@triton.jit(do_not_specialize=["table_stride", "window"])
def _attend(
    q_at, data_at, scales_at, tables_at, tiles_at, sinks_at, out_at, scale, window,
    table_stride, q_stride, block_stride, side_stride, head_stride,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr, EXACT: tl.constexpr,
    CAP: tl.constexpr, SINKS: tl.constexpr, MAX_CODE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one tile of queries over the keys and values of one KV head.

    Tiles are ordered by context, longest first; a tile without tokens is padding. Scores are base-2 exponents.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    wait(EARLY)
    piece, first = tl.load(tiles_at + tile * 4), tl.load(tiles_at + tile * 4 + 1)
    edge, tokens = tl.load(tiles_at + tile * 4 + 2), tl.load(tiles_at + tile * 4 + 3)
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (row < tokens * GROUP)[:, None] & (column < DIM)[None, :]
    place = edge + row // GROUP
    query_head = head * GROUP + row % GROUP
    line = (first + row // GROUP).to(tl.int64)
    q_from = q_at + line[:, None] * q_stride + query_head[:, None] * DIM + column[None, :]
    q = tl.load(q_from, mask=inside, other=0.0)
    low = 0
    if WINDOWED:
        low = tl.maximum(edge - window + 1, 0) // KEYS * KEYS
    high = edge + tokens
    seen_by_all = tl.maximum(edge + 1, 0) // KEYS * KEYS
    if WINDOWED:
        seen_by_all = low
    table_at = tables_at + piece.to(tl.int64) * table_stride
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(low, seen_by_all, KEYS):
        peak, total, sums = _take(
            q, peak, total, sums, data_at, scales_at, table_at, start, high, place, head, scale, window,
            block_stride, side_stride, head_stride, DIM, WIDTH, BLOCK, KEYS, False, WINDOWED, EXACT, CAP, MAX_CODE,
        )  # fmt: skip
    for start in range(seen_by_all, high, KEYS):
        peak, total, sums = _take(
            q, peak, total, sums, data_at, scales_at, table_at, start, high, place, head, scale, window,
            block_stride, side_stride, head_stride, DIM, WIDTH, BLOCK, KEYS, True, WINDOWED, EXACT, CAP, MAX_CODE,
        )  # fmt: skip
    if MAX_CODE:
        sums = sums * (1 / MAX_CODE)
    if SINKS:
        total = with_sink(total, peak, sinks_at + query_head, row < tokens * GROUP)
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    to = out_at + line[:, None] * (HEADS * DIM) + query_head[:, None] * DIM + column[None, :]
    tl.store(to, sums.to(out_at.dtype.element_ty), mask=inside)


@triton.jit
def _take(
    q, peak, total, sums, data_at, scales_at, table_at, start, high, place, head, scale, window,
    block_stride, side_stride, head_stride, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, EXACT: tl.constexpr, CAP: tl.constexpr,
    MAX_CODE: tl.constexpr,
):  # fmt: skip
    """Add KEYS more keys and values to the running softmax; MASKED where some query does not attend to all of them."""
    column = tl.arange(0, WIDTH)
    position = start + tl.arange(0, KEYS)
    if MASKED:
        is_key = position < high
        inside = is_key[:, None] & (column < DIM)[None, :]
        block = tl.load(table_at + position // BLOCK, mask=is_key, other=0).to(tl.int64)
    else:
        inside = (position >= 0)[:, None] & (column < DIM)[None, :]
        block = tl.load(table_at + position // BLOCK).to(tl.int64)
    at_block = block * block_stride + head * head_stride
    at = data_at + at_block + (position % BLOCK) * DIM
    if MASKED or WIDTH > DIM:
        k = tl.load(at[:, None] + column[None, :], mask=inside, other=0)
        v = tl.load(at[:, None] + side_stride + column[None, :], mask=inside, other=0)
    else:
        k = tl.load(at[:, None] + column[None, :])
        v = tl.load(at[:, None] + side_stride + column[None, :])
    if MAX_CODE:
        k, v = numbers(k, q.dtype, MAX_CODE), numbers(v, q.dtype, MAX_CODE)
        scale_at = scales_at + at_block // 2 + position % BLOCK
        key_scale = widened(tl.load(scale_at, mask=position < high, other=0))
        # Times MAX_CODE, which is divided out at the end: in float16 small scales would round small weights to 0.
        value_scale = widened(tl.load(scale_at + side_stride // 2, mask=position < high, other=0)) * MAX_CODE
    scores = tl.dot(q, tl.trans(k), input_precision="ieee" if EXACT else "tf32") * scale
    if MAX_CODE:
        scores = scores * key_scale[None, :]
    if CAP > 0:
        scores = capped(scores, CAP)
    if MASKED:
        seen = (position[None, :] <= place[:, None]) & is_key[None, :]
        if WINDOWED:
            seen = seen & (position[None, :] > place[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
    top = tl.maximum(peak, tl.max(scores, 1))
    shift = top
    if WINDOWED:
        shift = tl.where(top == -float("inf"), 0.0, top)  # a row that has seen no key yet
    weights = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(peak - shift)
    total = total * rescale + tl.sum(weights, 1)
    if MAX_CODE:
        weights = weights * value_scale[None, :]
    sums = sums * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee" if EXACT else "tf32")
    return top, total, sums
