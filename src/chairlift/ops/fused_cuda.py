"""The small operations of a layer in Triton, each one pass over its data: norm, gate, and what precedes attention."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chairlift.ops.batch import Batch
from chairlift.ops.kv_cache import KvCache
from chairlift.ops.kv_quant import LEAST, TOPS

_GATED = 1024  # elements of a gate that a program takes


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension."""
    out = torch.empty_like(x)
    size = x.shape[-1]
    width = triton.next_power_of_2(size)
    _norm[(x.numel() // size,)](x, weight, out, eps, SIZE=size, WIDTH=width, num_warps=min(16, max(1, width // 256)))
    return out


def silu_mul(y: torch.Tensor) -> torch.Tensor:
    """silu of the first half of the columns, times the second half."""
    rows, width = y.shape[0], y.shape[1] // 2
    out = torch.empty(rows, width, dtype=y.dtype, device=y.device)
    _gate[(rows, triton.cdiv(width, _GATED))](y, out, width, COUNT=_GATED, num_warps=4)
    return out


def rotate_and_store(
    qkv: torch.Tensor,
    cache: KvCache,
    layer: int,
    batch: Batch,
    turns: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
) -> None:
    """Norm and rotate queries and keys in place, and write keys and values to the cache."""
    tokens, heads, dim = qkv.shape
    data, (cos, sin) = cache.data[layer], turns
    scales = data if cache.scales is None else cache.scales[layer].view(torch.int16)
    q_norm, k_norm = norms if norms is not None else (qkv, qkv)
    _rotate[(tokens, heads)](
        qkv, data, scales, batch.positions, batch.slots, cos, sin, q_norm, k_norm, eps, data.stride(0), data.stride(1),
        data.stride(2), QUERIES=heads - 2 * cache.kv_heads, KEYS=cache.kv_heads, HEADS=heads, DIM=dim, HALF=dim // 2,
        WIDTH=triton.next_power_of_2(dim // 2), BLOCK=cache.block_size, NORMED=norms is not None,
        TOP=TOPS.get(cache.dtype, 0), LEAST=LEAST, num_warps=1,
    )  # fmt: skip


@triton.jit
def _norm(x_at, weight_at, out_at, eps, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < SIZE
    x = tl.load(x_at + row * SIZE + column, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    scaled = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)).to(x.dtype)
    weight = tl.load(weight_at + column, mask=inside, other=0.0)
    tl.store(out_at + row * SIZE + column, scaled * weight, mask=inside)


@triton.jit
def _gate(y_at, out_at, width, COUNT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    inside = column < width
    gate = tl.load(y_at + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(y_at + row * 2 * width + width + column, mask=inside, other=0.0)
    tl.store(out_at + row * width + column, (gate / (1.0 + tl.exp(-gate))).to(up.dtype) * up, mask=inside)


@triton.jit
def _rotate(
    qkv_at, data_at, scales_at, positions_at, slots_at, cos_at, sin_at, q_norm_at, k_norm_at, eps, block_stride,
    side_stride, head_stride, QUERIES: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, NORMED: tl.constexpr, TOP: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """One head of one token; TOP is the largest code of an 8-bit cache, 0 where numbers are stored as they are."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, WIDTH)
    inside = column < HALF
    at = qkv_at + (token * HEADS + head) * DIM + column
    first = tl.load(at, mask=inside, other=0.0)
    second = tl.load(at + HALF, mask=inside, other=0.0)
    is_value = head >= QUERIES + KEYS
    if not is_value:
        kind = first.dtype
        a, b = first.to(tl.float32), second.to(tl.float32)
        if NORMED:
            weight_at = q_norm_at if head < QUERIES else k_norm_at
            scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / DIM + eps)
            a = (a * scale).to(kind).to(tl.float32) * tl.load(weight_at + column, mask=inside, other=0.0)
            b = (b * scale).to(kind).to(tl.float32) * tl.load(weight_at + HALF + column, mask=inside, other=0.0)
        position = tl.load(positions_at + token)
        c = tl.load(cos_at + position * HALF + column, mask=inside, other=0.0)
        s = tl.load(sin_at + position * HALF + column, mask=inside, other=0.0)
        first, second = (a * c - b * s).to(kind), (b * c + a * s).to(kind)
        tl.store(at, first, mask=inside)
        tl.store(at + HALF, second, mask=inside)
    if head >= QUERIES:
        slot = tl.load(slots_at + token)
        side = tl.where(is_value, 1, 0)
        own = head - QUERIES - side * KEYS
        place = slot // BLOCK * block_stride + side * side_stride + own * head_stride
        to = data_at + place + slot % BLOCK * DIM
        if TOP:
            low, high = first.to(tl.float32), second.to(tl.float32)
            peak = tl.maximum(tl.maximum(tl.max(tl.abs(low), 0), tl.max(tl.abs(high), 0)), LEAST)
            bits = ((peak * (1 / TOP)).to(tl.int32, bitcast=True) + 0xFFFF) >> 16
            tl.store(scales_at + place // 2 + slot % BLOCK, bits.to(tl.int16))
            step = tl.zeros([WIDTH], tl.float32) + (bits << 16).to(tl.float32, bitcast=True)
            tl.store(to + column, _nearest(tl.div_rn(low, step), TOP), mask=inside)
            tl.store(to + HALF + column, _nearest(tl.div_rn(high, step), TOP), mask=inside)
        else:
            tl.store(to + column, first, mask=inside)
            tl.store(to + HALF + column, second, mask=inside)


@triton.jit
def _nearest(x, TOP: tl.constexpr):
    """The codes next to float32 numbers, as kv_quant has them."""
    if TOP == 127:
        codes = (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)  # 1.5 * 2**23: the last bits count ones
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + ((size >> 20) & 1) + 0x7FFFF) >> 20) - (120 << 3)
        tiny = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - ((127 + 14) << 23)
        codes = (tl.where(size < (127 - 6) << 23, tiny, normal) | (bits >> 24 & 0x80)).to(tl.uint8)
    return codes
