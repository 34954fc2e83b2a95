"""Linear layers of few rows in Triton, with norm, bias, gate and residual in the same kernel.

With few rows a layer takes as long as reading its weight from memory, so loads should start early and be many. Each
program loads some lines (rows) of the weight, and starts to do so before it waits for the kernel that computes its
input: see early_cuda. The norm needs no pass of its own, since its scale is one number per row: every program computes
it while reading the input, and multiplies its results by it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from chairlift.ops import fused_cuda
from chairlift.ops.early_cuda import early, wait
from chairlift.ops.fused_cuda import gated

FEW = 16  # most rows that these kernels take
_MANY = 8192  # lines of a weight from which cuBLAS is as fast, except for a single row
_LONGEST = 3072  # elements of a line that a program of _one loads at once
_DEEP = {"COLUMNS": 4, "DEPTH": 2048, "num_warps": 4}  # per iteration, for longer lines


def is_faster(rows: int, lines: int) -> bool:
    """Whether these kernels are faster than cuBLAS for a layer of `rows` rows and `lines` outputs."""
    return rows == 1 or (1 < rows <= FEW and lines < _MANY)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    gate: tuple[float, float] | None,
    add_to: torch.Tensor | None,
) -> torch.Tensor:
    """Compute linear_reference for at most FEW rows on a CUDA device; `gate` is linear and cubic of weight.Gate."""
    (rows, depth), lines = x.shape, weight.shape[0]
    assert rows <= FEW and weight.is_contiguous()
    if norm_weight is not None and rows > 1 and x.dtype == torch.float16:
        # An input times the norm's weight, before its scale, may overflow float16.
        x, norm_weight = fused_cuda.rms_norm(x, norm_weight, eps), None
    is_gated = gate is not None
    linear, cubic = gate or (0.0, 0.0)
    width = lines // 2 if is_gated else lines
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device) if add_to is None else add_to
    shape = shape_for(rows, lines, depth, is_gated, x.dtype == torch.float32)
    kernel, step = (_one, shape["DEPTH"]) if rows == 1 else (_few, shape["DEPTH"] * shape["num_warps"])
    if rows > 1:
        shape |= {"ROWS": 8 if rows <= 8 else FEW, "SPLIT": shape["num_warps"], "AHEAD": shape.get("AHEAD", 0)}
    kernel[(triton.cdiv(lines, shape["COLUMNS"]),)](
        x.contiguous(), weight, x if bias is None else bias, x if norm_weight is None else norm_weight, out, eps, rows,
        width, out.stride(0), K=depth, EVEN=depth % step == 0, NORMED=norm_weight is not None, BIASED=bias is not None,
        GATED=is_gated, LINEAR=linear, CUBIC=cubic, ADDED=add_to is not None, **shape, **early(),
    )  # fmt: skip
    return out


def shape_for(rows: int, lines: int, depth: int, is_gated: bool, is_wide: bool) -> dict[str, Any]:
    """Return the tile of a weight [lines, depth]: COLUMNS lines per program, DEPTH elements of each per iteration.

    The tile is the same for any number of rows above one. Float32 (`is_wide`) has half of it.
    """
    if rows == 1:
        if depth <= _LONGEST:
            whole = max(32, triton.next_power_of_2(depth))
            return {"COLUMNS": 4 if is_wide else 8, "DEPTH": whole, "num_warps": max(1, whole // 512)}
        return {"COLUMNS": 4, "DEPTH": 1024, "num_warps": 2} if depth <= 8192 else {**_DEEP}
    if is_wide:
        return {"COLUMNS": 16, "DEPTH": 32, "num_warps": 4, "num_stages": 3}
    if lines <= 2048:
        return {"COLUMNS": 16, "DEPTH": 128, "num_warps": 4, "num_stages": 5, "AHEAD": 2048}
    if 64 <= depth <= 1024:
        return {"COLUMNS": 32, "DEPTH": triton.next_power_of_2(depth) // 4, "num_warps": 4, "num_stages": 1}
    if lines <= 4096:
        return {"COLUMNS": 32, "DEPTH": 64, "num_warps": 4, "num_stages": 4, "AHEAD": 1024 if depth <= 2048 else 0}
    return {"COLUMNS": 64, "DEPTH": 64, "num_warps": 4, "num_stages": 4}


@triton.jit(do_not_specialize=["rows"])
def _one(
    x_at, weight_at, bias_at, norm_at, out_at, eps, rows, width, out_stride,
    K: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, NORMED: tl.constexpr,
    BIASED: tl.constexpr, GATED: tl.constexpr, LINEAR: tl.constexpr, CUBIC: tl.constexpr, ADDED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply one row by COLUMNS lines of the weight."""
    lines = lines_of(width, COLUMNS, GATED)
    k = tl.arange(0, DEPTH)
    at = weight_at + lines[:, None] * K + k[None, :]
    tile = load(at, k[None, :], K, EVEN)
    scale = load(norm_at + k, k, K, EVEN) if NORMED else 0.0
    bias = bias_of(bias_at, lines, BIASED)
    wait(EARLY)
    to, inside = places(out_at, tl.zeros([1], tl.int32), rows, width, out_stride, COLUMNS, GATED)
    residual = residual_of(to, inside, ADDED)
    sums = tl.zeros([COLUMNS, DEPTH], tl.float32)
    squares = tl.zeros([DEPTH], tl.float32)
    for start in range(DEPTH, K, DEPTH):
        following = load(at + start, start + k[None, :], K, EVEN)
        following_scale = load(norm_at + start + k, start + k, K, EVEN) if NORMED else 0.0
        sums, squares = _multiply(sums, squares, tile, scale, x_at, start - DEPTH + k, K, EVEN, NORMED, EARLY)
        tile, scale = following, following_scale
    last = (K - 1) // DEPTH * DEPTH + k
    sums, squares = _multiply(sums, squares, tile, scale, x_at, last, K, EVEN, NORMED, EARLY)
    y = tl.sum(sums, 1)
    if NORMED:
        y = y * tl.rsqrt(tl.sum(squares, 0) / K + eps)
    store(to, inside, (y + bias)[None, :], residual, GATED, LINEAR, CUBIC)


@triton.jit
def _multiply(
    sums, squares, tile, scale, x_at, k, K: tl.constexpr, EVEN: tl.constexpr, NORMED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    x = load(x_at + k, k, K, EVEN).to(tl.float32)
    if NORMED:
        squares += x * x
        x = x * scale.to(tl.float32)
    return sums + _widened(tile, EARLY) * x[None, :], squares


@triton.jit
def _widened(tile, EARLY: tl.constexpr):
    """Convert to float32 at this point of the program: the compiler would move the conversion up, and so wait for the
    weight before it has issued the load of the input."""
    if EARLY and tile.dtype == tl.bfloat16:
        wide = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [tile],
            dtype=tl.float32,
            is_pure=False,
            pack=2,
        )
    else:
        wide = tile.to(tl.float32)
    return wide


@triton.jit(do_not_specialize=["rows"])
def _few(
    x_at, weight_at, bias_at, norm_at, out_at, eps, rows, width, out_stride,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr,
    EVEN: tl.constexpr, NORMED: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr, LINEAR: tl.constexpr,
    CUBIC: tl.constexpr, ADDED: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows by COLUMNS lines of the weight, on tensor cores.

    Warps divide K, not the columns, which are too few: each multiplies DEPTH of an iteration's SPLIT * DEPTH.
    """
    lines = lines_of(width, COLUMNS, GATED)
    bias = bias_of(bias_at, lines, BIASED)
    k = (tl.arange(0, SPLIT) * DEPTH)[:, None, None] + tl.arange(0, DEPTH)[None, None, :]
    at = weight_at + lines[None, :, None] * K + k
    IS_WHOLE: tl.constexpr = (
        K <= SPLIT * DEPTH
    )  # one iteration, so that the whole weight tile can be loaded before the input is ready
    if IS_WHOLE:
        tile = load(at, k, K, EVEN)
        scale = load(norm_at + k, k, K, EVEN) if NORMED else 0.0
    elif EARLY and AHEAD > 0:
        # Loads of a pipelined loop cannot move before the wait: prefetch, so that they hit the cache.
        _prefetch(weight_at, lines, K, AHEAD)
    wait(EARLY)
    row = tl.arange(0, ROWS)
    to, inside = places(out_at, row, rows, width, out_stride, COLUMNS, GATED)
    residual = residual_of(to, inside, ADDED)
    is_row = (row < rows)[None, :, None]
    x_row = x_at + row[None, :, None] * K + k
    sums = tl.zeros([SPLIT, COLUMNS, ROWS], tl.float32)
    squares = tl.zeros([SPLIT, ROWS], tl.float32)
    if IS_WHOLE:
        x = tl.load(x_row, mask=is_row if EVEN else is_row & (k < K), other=0.0)
        sums, squares = _multiply_few(sums, squares, tile, scale, x, NORMED)
    else:
        for start in range(0, K, SPLIT * DEPTH):
            part = load(at + start, start + k, K, EVEN)
            x = tl.load(x_row + start, mask=is_row if EVEN else is_row & (start + k < K), other=0.0)
            part_scale = load(norm_at + start + k, start + k, K, EVEN) if NORMED else 0.0
            sums, squares = _multiply_few(sums, squares, part, part_scale, x, NORMED)
    y = tl.sum(sums, 0)
    if NORMED:
        y = y * tl.rsqrt(tl.sum(squares, 0) / K + eps)[None, :]
    store(to, inside, tl.trans(y + bias[:, None]), residual, GATED, LINEAR, CUBIC)


@triton.jit
def _multiply_few(sums, squares, tile, scale, x, NORMED: tl.constexpr):
    if NORMED:
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 2)
        x = (wide * scale.to(tl.float32)).to(x.dtype)
    return tl.dot(tile, tl.permute(x, (0, 2, 1)), sums, input_precision="ieee"), squares


@triton.jit
def lines_of(width, COLUMNS: tl.constexpr, GATED: tl.constexpr):
    """Return this program's lines of the weight; gate and up lines alternate if it is gated.

    Lines beyond the last are clamped to it: reading it twice is cheaper than a mask on every load.
    """
    line = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    return tl.minimum(line // 2, width - 1) + line % 2 * width if GATED else tl.minimum(line, width - 1)


@triton.jit
def load(at, k, K: tl.constexpr, EVEN: tl.constexpr):
    return tl.load(at) if EVEN else tl.load(at, mask=k < K, other=0.0)


@triton.jit
def bias_of(bias_at, lines, BIASED: tl.constexpr):
    return tl.load(bias_at + lines).to(tl.float32) if BIASED else tl.zeros(lines.shape, tl.float32)


@triton.jit
def _prefetch(at, lines, K: tl.constexpr, AHEAD: tl.constexpr):
    """Prefetch the first AHEAD elements of some lines to the L2 cache."""
    SIZE: tl.constexpr = 1024 // at.dtype.element_ty.primitive_bitwidth  # elements in a cache line
    k = tl.arange(0, triton.next_power_of_2(triton.cdiv(min(K, AHEAD), SIZE))) * SIZE
    place = at + lines[:, None] * K + tl.minimum(k, K - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def places(out_at, row, rows, width, out_stride, COLUMNS: tl.constexpr, GATED: tl.constexpr):
    """Return the addresses of a program's results, and the mask of valid ones."""
    COUNT: tl.constexpr = COLUMNS // 2 if GATED else COLUMNS
    column = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    return out_at + row[:, None] * out_stride + column[None, :], (row < rows)[:, None] & (column < width)[None, :]


@triton.jit
def residual_of(to, inside, ADDED: tl.constexpr):
    """Load the residual, long before it is added."""
    return tl.load(to, mask=inside, other=0.0) if ADDED else tl.zeros(inside.shape, to.dtype.element_ty)


@triton.jit
def store(to, inside, y, residual, GATED: tl.constexpr, LINEAR: tl.constexpr, CUBIC: tl.constexpr):
    if GATED:
        gate, up = tl.split(tl.reshape(y, [y.shape[0], y.shape[1] // 2, 2]))
        y = gated(gate, LINEAR, CUBIC) * up
    tl.store(to, (y + residual.to(tl.float32)).to(to.dtype.element_ty), mask=inside)
