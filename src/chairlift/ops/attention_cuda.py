"""Paged attention in Triton: one kernel for prompt chunks and decodes, with long contexts split among programs.

A program owns a tile of queries of one KV head: some tokens of one slice times all query heads that share that KV head,
so that keys and values are read once for the group. Decodes are tiles of one token; when there are too few of them to
fill the device, each one's context is cut into parts whose results a second kernel joins (flash-decoding).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from chairlift.ops.batch import Batch
from chairlift.ops.kv_cache import KvCache
from chairlift.ops.kv_quant import TOPS

_ROWS = 128  # queries (tokens x heads) in a tile of a prompt
_LEAST = 16  # rows of the smallest tile that the matrix units take
_KEYS = 64  # keys that a program takes at a time
_PROGRAMS = 264  # two for each multiprocessor of a large GPU: fewer, and contexts are split
_LEAST_PART = 256  # tokens of a context that are worth a program of their own


def attend(qkv: torch.Tensor, heads: int, cache: KvCache, layer: int, batch: Batch, window: int) -> torch.Tensor:
    """What paged_attention gives, on a CUDA device."""
    out = torch.empty(qkv.shape[0], heads * cache.dim, dtype=qkv.dtype, device=qkv.device)
    group = heads // cache.kv_heads
    decodes = batch.decodes
    if decodes:
        parts = _parts(decodes * cache.kv_heads, int(batch.host.contexts[:decodes].max()), window)
        _run(
            qkv,
            heads,
            cache,
            layer,
            batch,
            window,
            out,
            decodes,
            max(_LEAST, triton.next_power_of_2(group)),
            parts,
            None,
        )
    tiles = batch.tiles(max(1, _ROWS // group))
    if tiles is not None:
        rows = triton.next_power_of_2(max(_LEAST, max(1, _ROWS // group) * group))
        _run(qkv, heads, cache, layer, batch, window, out, tiles.shape[1], rows, 1, tiles)
    return out


def _parts(programs: int, longest: int, window: int) -> int:
    """Into how many parts each decode's context is cut: a power of two, so that few kernels are compiled."""
    seen = min(longest, window) if window else longest
    wanted = min(_PROGRAMS // max(1, programs), seen // _LEAST_PART, 32)
    return 1 << (max(1, wanted).bit_length() - 1)


def _run(
    qkv: torch.Tensor,
    heads: int,
    cache: KvCache,
    layer: int,
    batch: Batch,
    window: int,
    out: torch.Tensor,
    count: int,
    rows: int,
    parts: int,
    tiles: torch.Tensor | None,
) -> None:
    group, dim = heads // cache.kv_heads, cache.dim
    data = cache.data[layer]
    scales = data if cache.scales is None else cache.scales[layer].view(torch.int16)
    sums: Any = out
    peaks: Any = out
    if parts > 1:
        sums = torch.empty(count, heads, parts, dim, dtype=torch.float32, device=qkv.device)
        peaks = torch.empty(count, heads, parts, 2, dtype=torch.float32, device=qkv.device)
    width = triton.next_power_of_2(dim)
    _attend[(count, cache.kv_heads, parts)](
        qkv, data, scales, batch.tables, batch.starts, batch.contexts, tiles if tiles is not None else batch.starts,
        out, sums, peaks, 1.0 / math.sqrt(dim), window or 1 << 30, batch.tables.stride(0), qkv.stride(0),
        data.stride(0), data.stride(1), data.stride(2), count,
        GROUP=group, HEADS=heads, DIM=dim, WIDTH=width, BLOCK=cache.block_size, ROWS=rows, KEYS=_KEYS, PARTS=parts,
        TILED=tiles is not None, TOKENS=max(1, _ROWS // group) if tiles is not None else 1,
        EXACT=qkv.dtype == torch.float32, TOP=TOPS.get(cache.dtype, 0),
        num_warps=8 if rows >= _ROWS else 4, num_stages=2,
    )  # fmt: skip
    if parts > 1:
        _join[(count, heads)](sums, peaks, out, DIM=dim, WIDTH=width, HEADS=heads, PARTS=parts, num_warps=1)


@triton.jit
def _attend(
    q_at, data_at, scales_at, tables_at, starts_at, contexts_at, tiles_at, out_at, sums_at, peaks_at, scale, window,
    table_stride, q_stride, block_stride, side_stride, head_stride, count,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr, TILED: tl.constexpr, TOKENS: tl.constexpr,
    EXACT: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """One tile of queries against the keys and values of one KV head, or a part of them.

    TOP is the largest code of an 8-bit cache, 0 where numbers are stored as they are. Products are of codes: the scales
    of the keys are put into the scores, those of the values into the weights.
    """
    tile, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if TILED:
        piece, first = tl.load(tiles_at + tile), tl.load(tiles_at + count + tile)
    else:
        piece, first = tile, 0
    begin = tl.load(starts_at + piece)
    tokens = tl.load(starts_at + piece + 1) - begin
    context = tl.load(contexts_at + piece)
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    is_query = (token < tokens) & (row < TOKENS * GROUP)
    place = context - tokens + token  # each query's position
    column = tl.arange(0, WIDTH)
    is_column = column < DIM
    query_head = head * GROUP + row % GROUP
    q = tl.load(
        q_at + (begin + token)[:, None] * q_stride + query_head[:, None] * DIM + column[None, :],
        mask=is_query[:, None] & is_column[None, :],
        other=0.0,
    )
    low = tl.maximum(context - tokens + first - window + 1, 0) // KEYS * KEYS
    high = tl.minimum(context, context - tokens + first + TOKENS)
    if PARTS > 1:
        share = tl.cdiv(tl.cdiv(high - low, PARTS), KEYS) * KEYS
        low = low + part * share
        high = tl.minimum(high, low + share)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    key = tl.arange(0, KEYS)
    for start in range(low, high, KEYS):
        position = start + key
        is_key = position < high
        block = tl.load(tables_at + piece * table_stride + position // BLOCK, mask=is_key, other=0).to(tl.int64)
        place_of = block * block_stride + head * head_stride
        at = data_at + place_of + (position % BLOCK) * DIM
        wanted = is_key[:, None] & is_column[None, :]
        k = tl.load(at[:, None] + column[None, :], mask=wanted, other=0)
        if TOP:
            k = _numbers(k, q.dtype, TOP)
            scale_at = scales_at + place_of // 2 + position % BLOCK
            key_scale = _widened(tl.load(scale_at, mask=is_key, other=0))
            # Times TOP, which is taken out at the end: in float16 small scales would make the smallest weights vanish.
            value_scale = _widened(tl.load(scale_at + side_stride // 2, mask=is_key, other=0)) * TOP
        scores = tl.dot(q, tl.trans(k), input_precision="ieee" if EXACT else "tf32") * scale
        if TOP:
            scores = scores * key_scale[None, :]
        seen = (position[None, :] <= place[:, None]) & (position[None, :] > place[:, None] - window) & is_key[None, :]
        scores = tl.where(seen, scores, -float("inf"))
        top = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(top == -float("inf"), 0.0, top)  # a row that has seen no key yet
        weights = tl.exp(scores - shift[:, None])
        fade = tl.exp(peak - shift)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(at[:, None] + side_stride + column[None, :], mask=wanted, other=0)
        if TOP:
            v = _numbers(v, q.dtype, TOP)
            weights = weights * value_scale[None, :]
        sums = sums * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee" if EXACT else "tf32")
        peak = top
    if TOP:
        sums = sums * (1 / TOP)
    written = is_query[:, None] & is_column[None, :]
    if PARTS == 1:
        sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        to = out_at + (begin + token)[:, None] * (HEADS * DIM) + query_head[:, None] * DIM + column[None, :]
        tl.store(to, sums.to(out_at.dtype.element_ty), mask=written)
    else:
        line = (tile * HEADS + query_head) * PARTS + part
        tl.store(sums_at + line[:, None] * DIM + column[None, :], sums, mask=written)
        tl.store(peaks_at + line * 2, peak, mask=is_query)
        tl.store(peaks_at + line * 2 + 1, total, mask=is_query)


@triton.jit
def _numbers(codes, kind: tl.constexpr, TOP: tl.constexpr):
    """What codes stand for, in the type of the queries, which holds every one of them exactly."""
    if TOP == 127:
        numbers = codes.to(kind)
    else:  # sign, exponent and mantissa moved to where a float32 has them; its exponents begin 120 lower
        bits = (codes.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000
        numbers = (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(kind)
    return numbers


@triton.jit
def _widened(bits):
    """Float32 numbers from the bits of bfloat16 ones."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _join(
    sums_at, peaks_at, out_at, DIM: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Join the parts of one decode's head."""
    line = tl.program_id(0) * HEADS + tl.program_id(1)
    part = tl.arange(0, PARTS)
    column = tl.arange(0, WIDTH)
    peaks = tl.load(peaks_at + (line * PARTS + part) * 2)
    totals = tl.load(peaks_at + (line * PARTS + part) * 2 + 1)
    weight = tl.exp(peaks - tl.max(peaks, 0))
    sums = tl.load(
        sums_at + (line * PARTS + part)[:, None] * DIM + column[None, :], mask=(column < DIM)[None, :], other=0.0
    )
    answer = tl.sum(sums * weight[:, None], 0) / tl.sum(totals * weight, 0)
    tl.store(out_at + line * DIM + column, answer.to(out_at.dtype.element_ty), mask=column < DIM)
