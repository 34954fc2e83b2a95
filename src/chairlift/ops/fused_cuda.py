"""The small operations of a layer in Triton, each one pass over its data: norm, gate, rotary embedding and KV write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chairlift.ops.batch import Batch
from chairlift.ops.early_cuda import early, wait
from chairlift.ops.kv_cache import KvCache
from chairlift.ops.kv_quant import LEAST, MAX_CODES

_GATE_ELEMENTS = 1024  # per program
_ROTATED_HEADS = 8  # per program
_COPIED = 128  # entries of a block table copied per iteration


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, add_to: torch.Tensor | None = None) -> torch.Tensor:
    """Return x / rms(x) * weight over the last dimension; with `add_to`, add it there in place and return that."""
    out = torch.empty_like(x) if add_to is None else add_to
    size = x.shape[-1]
    width = triton.next_power_of_2(size)
    warps = min(16, max(1, width // 256))
    _norm[(x.numel() // size,)](
        x, weight, out, eps, SIZE=size, WIDTH=width, ADDED=add_to is not None, num_warps=warps, **early()
    )
    return out


def quantize_rows(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute fp8.quantize_rows, with the norm before it if it has a weight, in one pass."""
    rows, size = x.shape
    codes = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(size)
    _quantize[(rows,)](
        x, x if weight is None else weight, codes.view(torch.uint8), scales, eps, x.stride(0), SIZE=size, WIDTH=width,
        NORMED=weight is not None, num_warps=min(16, max(1, width // 512)), **early(),
    )  # fmt: skip
    return codes, scales


def gate_mul(y: torch.Tensor, linear: float, cubic: float) -> torch.Tensor:
    """Return gate(first half of the columns) times the second half; weight.Gate has the numbers of a gate."""
    rows, width = y.shape[0], y.shape[1] // 2
    out = torch.empty(rows, width, dtype=y.dtype, device=y.device)
    _gate[(rows, triton.cdiv(width, _GATE_ELEMENTS))](
        y, out, width, COUNT=_GATE_ELEMENTS, LINEAR=linear, CUBIC=cubic, num_warps=4, **early()
    )
    return out


def rotate_and_store(
    qkv: torch.Tensor,
    cache: KvCache,
    layer: int,
    batch: Batch,
    cos_sin: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
) -> None:
    """Norm and rotate queries and keys in place, and write keys and values to the cache."""
    tokens, heads, dim = qkv.shape
    data, (cos, sin) = cache.data[layer], cos_sin
    scales = data if cache.scales is None else cache.scales[layer].view(torch.int16)
    q_norm, k_norm = norms if norms is not None else (qkv, qkv)
    _rotate[(tokens, triton.cdiv(heads, _ROTATED_HEADS))](
        qkv, data, scales, batch.positions, batch.slots, cos, sin, q_norm, k_norm, eps, data.stride(0), data.stride(1),
        data.stride(2), QUERIES=heads - 2 * cache.kv_heads, KEYS=cache.kv_heads, HEADS=heads, DIM=dim, HALF=dim // 2,
        WIDTH=triton.next_power_of_2(dim // 2), BLOCK=cache.block_size, NORMED=norms is not None,
        MAX_CODE=MAX_CODES.get(cache.dtype, 0), LEAST=LEAST, TILE=_ROTATED_HEADS, num_warps=2, **early(),
    )  # fmt: skip


def look_up(
    rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, tables: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the decodes' tokens, slots, contexts and block tables; tables are written up to the context's end only."""
    count, device = rows.numel(), rows.device
    found = torch.empty(2, count, dtype=torch.int32, device=device)
    slots = torch.empty(count, dtype=torch.int64, device=device)
    own = torch.empty(count, tables.shape[1], dtype=torch.int32, device=device)
    _look_up[(count,)](
        rows, positions, tokens, tables, found, slots, own, count, tokens.stride(0), tables.stride(0),
        BLOCK=block_size, COPIED=_COPIED, num_warps=4, **early(),
    )  # fmt: skip
    return found[0], slots, found[1], own


@triton.jit(do_not_specialize=["count"])
def _look_up(
    rows_at, positions_at, tokens_at, tables_at, found_at, slots_at, own_at, count, tokens_stride, table_stride,
    BLOCK: tl.constexpr, COPIED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    wait(EARLY)
    row, position = tl.load(rows_at + piece).to(tl.int64), tl.load(positions_at + piece)
    table_at = tables_at + row * table_stride
    tl.store(found_at + piece, tl.load(tokens_at + row * tokens_stride + position))
    tl.store(found_at + count + piece, position + 1)
    tl.store(slots_at + piece, tl.load(table_at + position // BLOCK).to(tl.int64) * BLOCK + position % BLOCK)
    lane = tl.arange(0, COPIED)
    to = own_at + piece.to(tl.int64) * table_stride
    for start in range(0, position // BLOCK + 1, COPIED):
        inside = start + lane <= position // BLOCK
        tl.store(to + start + lane, tl.load(table_at + start + lane, mask=inside), mask=inside)


@triton.jit
def _norm(
    x_at, weight_at, out_at, eps, SIZE: tl.constexpr, WIDTH: tl.constexpr, ADDED: tl.constexpr, EARLY: tl.constexpr
):
    """Norm one row. A weight of a wider dtype than x is applied before the result is rounded."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < SIZE
    weight = tl.load(weight_at + column, mask=inside, other=0.0)
    wait(EARLY)
    x = tl.load(x_at + row * SIZE + column, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    y = scaled.to(x.dtype) * weight if weight.dtype == x.dtype else (scaled * weight).to(x.dtype)
    to = out_at + row * SIZE + column
    if ADDED:
        y = y + tl.load(to, mask=inside, other=0.0)
    tl.store(to, y, mask=inside)


@triton.jit
def _quantize(
    x_at, weight_at, codes_at, scales_at, eps, stride, SIZE: tl.constexpr, WIDTH: tl.constexpr, NORMED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Quantize one row to e4m3, after its norm if it has one, rounded as in _norm."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < SIZE
    weight = tl.load(weight_at + column, mask=inside & NORMED, other=0.0)
    wait(EARLY)
    x = tl.load(x_at + row * stride + column, mask=inside, other=0.0)
    if NORMED:
        wide = x.to(tl.float32)
        scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
        x = scaled.to(x.dtype) * weight if weight.dtype == x.dtype else (scaled * weight).to(x.dtype)
    wide = x.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), 0), 1e-12) / 448.0
    tl.store(scales_at + row, scale)
    code = wide * (1.0 / scale)
    # On a GPU in hardware; Triton's interpreter does not round up to a power of two.
    found = code.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if EARLY else _nearest(code, 448)
    tl.store(codes_at + row * SIZE + column, found, mask=inside)


@triton.jit
def _gate(y_at, out_at, width, COUNT: tl.constexpr, LINEAR: tl.constexpr, CUBIC: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    inside = column < width
    wait(EARLY)
    gate = tl.load(y_at + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(y_at + row * 2 * width + width + column, mask=inside, other=0.0)
    tl.store(out_at + row * width + column, gated(gate, LINEAR, CUBIC).to(up.dtype) * up, mask=inside)


@triton.jit
def gated(gate, LINEAR: tl.constexpr, CUBIC: tl.constexpr):
    """Apply the activation of a gate in float32: SiLU, or with CUBIC the tanh version of GELU."""
    slope = LINEAR + CUBIC * gate * gate if CUBIC > 0 else LINEAR
    return gate / (1.0 + tl.exp(-gate * slope))


@triton.jit
def _rotate(
    qkv_at, data_at, scales_at, positions_at, slots_at, cos_at, sin_at, q_norm_at, k_norm_at, eps, block_stride,
    side_stride, head_stride, QUERIES: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, NORMED: tl.constexpr, MAX_CODE: tl.constexpr,
    LEAST: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rotate and store TILE heads of one token; MAX_CODE is the largest code of an 8-bit cache, 0 for other dtypes."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, column = tile * TILE + tl.arange(0, TILE), tl.arange(0, WIDTH)
    is_head, is_value, is_column = head < HEADS, head >= QUERIES + KEYS, column < HALF
    inside = is_head[:, None] & is_column[None, :]
    at = qkv_at + (token * HEADS + head[:, None]) * DIM + column[None, :]
    wait(EARLY)
    first, second = tl.load(at, mask=inside, other=0.0), tl.load(at + HALF, mask=inside, other=0.0)
    if tile * TILE < QUERIES + KEYS:
        kind = first.dtype
        a, b = first.to(tl.float32), second.to(tl.float32)
        if NORMED:
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
            low, high = _weights(q_norm_at, k_norm_at, head < QUERIES, column, HALF)
            a, b = (a * scale).to(kind).to(tl.float32) * low, (b * scale).to(kind).to(tl.float32) * high
        position = tl.load(positions_at + token)
        c = tl.load(cos_at + position * HALF + column, mask=is_column, other=0.0)[None, :]
        s = tl.load(sin_at + position * HALF + column, mask=is_column, other=0.0)[None, :]
        stays = is_value[:, None]
        first = tl.where(stays, first, (a * c - b * s).to(kind))
        second = tl.where(stays, second, (b * c + a * s).to(kind))
        tl.store(at, first, mask=inside & ~stays)
        tl.store(at + HALF, second, mask=inside & ~stays)
    if tile * TILE + TILE > QUERIES:
        slot = tl.load(slots_at + token).to(tl.int64)
        is_kept = inside & (head >= QUERIES)[:, None]
        side = tl.where(is_value, 1, 0)
        own = head - QUERIES - side * KEYS
        place = slot // BLOCK * block_stride + side * side_stride + own * head_stride
        to = data_at + (place + slot % BLOCK * DIM)[:, None] + column[None, :]
        if MAX_CODE:
            low, high = first.to(tl.float32), second.to(tl.float32)
            peak = tl.maximum(tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1)), LEAST)
            bits = ((peak * (1 / MAX_CODE)).to(tl.int32, bitcast=True) + 0xFFFF) >> 16
            tl.store(scales_at + place // 2 + slot % BLOCK, bits.to(tl.int16), mask=is_head & (head >= QUERIES))
            step = tl.zeros([TILE, WIDTH], tl.float32) + (bits << 16).to(tl.float32, bitcast=True)[:, None]
            tl.store(to, _nearest(tl.div_rn(low, step), MAX_CODE), mask=is_kept)
            tl.store(to + HALF, _nearest(tl.div_rn(high, step), MAX_CODE), mask=is_kept)
        else:
            tl.store(to, first, mask=is_kept)
            tl.store(to + HALF, second, mask=is_kept)


@triton.jit
def _weights(q_norm_at, k_norm_at, is_query, column, HALF: tl.constexpr):
    """Return the norm weights of both halves of each head, for queries or keys."""
    inside, is_query = column < HALF, is_query[:, None]
    low_q = tl.load(q_norm_at + column, mask=inside, other=0.0)[None, :]
    low_k = tl.load(k_norm_at + column, mask=inside, other=0.0)[None, :]
    high_q = tl.load(q_norm_at + HALF + column, mask=inside, other=0.0)[None, :]
    high_k = tl.load(k_norm_at + HALF + column, mask=inside, other=0.0)[None, :]
    return tl.where(is_query, low_q, low_k).to(tl.float32), tl.where(is_query, high_q, high_k).to(tl.float32)


@triton.jit
def _nearest(x, MAX_CODE: tl.constexpr):
    """Return the codes nearest to float32 numbers, as in kv_quant."""
    if MAX_CODE == 127:
        codes = (
            (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
        )  # 1.5 * 2**23: the last mantissa bits are the integer
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + ((size >> 20) & 1) + 0x7FFFF) >> 20) - (120 << 3)
        tiny = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - ((127 + 14) << 23)
        codes = (tl.where(size < (127 - 6) << 23, tiny, normal) | (bits >> 24 & 0x80)).to(tl.uint8)
    return codes
