"""Products with quantized weights in Triton: codes become numbers in registers, and memory is read at their size.

One row is multiplied in float32. Two rows and more are multiplied on tensor cores, with the weight as the left side:
its lines (rows) are many where the input's rows are few. Up to FEW rows, norm, bias, gate and residual are in the same
kernel, as in skinny_cuda; very many rows are cuBLAS's, after the weight was converted.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from chairlift.ops import fused_cuda
from chairlift.ops.codes import PACKED, Code, Coded
from chairlift.ops.codes_cuda import byte_numbers, four_numbers, scaled
from chairlift.ops.early_cuda import early, wait
from chairlift.ops.one_row_cuda import multiply_one
from chairlift.ops.skinny_cuda import bias_of, lines_of, load, places, residual_of, store

FEW = 16  # most rows of the fused kernels
SOME = 64  # most rows of `multiply`; for more, converting the weight once is faster
_CONVERTED = 2048  # numbers per program of `dense`


def linear(
    x: torch.Tensor,
    weight: Coded,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    eps: float,
    gate: tuple[float, float] | None,
    add_to: torch.Tensor | None,
) -> torch.Tensor:
    """Compute a linear layer for at most FEW rows; `scale` is a norm's weight, `gate` linear and cubic of a Gate."""
    if scale is not None and x.shape[0] > 1 and (x.dtype == torch.float16 or weight.code.bits == 4):
        # An input times the norm's weight, before its scale, may overflow float16. With 4 bits the inputs are loaded in
        # another order, which norms in the same kernel would load without overlap.
        x, scale = fused_cuda.rms_norm(x, scale, eps), None
    (rows, depth), lines = x.shape, weight.shape[0]
    width = lines if gate is None else lines // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device) if add_to is None else add_to
    shape = one_shape(weight, lines, depth) if rows == 1 else few_shape(weight, rows, lines, depth, x.dtype)
    run(x.contiguous(), weight, out, bias, scale, eps, gate, add_to is not None, shape)
    return out


def run(
    x: torch.Tensor,
    weight: Coded,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    eps: float,
    gate: tuple[float, float] | None,
    added: bool,
    shape: dict[str, Any],
) -> None:
    """Launch a fused kernel with a given tile."""
    (rows, depth), lines, zeros = x.shape, weight.shape[0], weight.zeros
    width = lines if gate is None else lines // 2
    linear, cubic = gate or (0.0, 0.0)
    is_one = "ROWS" not in shape
    kernel, step = (multiply_one, shape["DEPTH"]) if is_one else (_few, shape["DEPTH"] * shape["SPLIT"])
    codes = weight.codes.view(torch.int32) if is_one else _loadable(weight)
    kernel[(triton.cdiv(lines, shape["COLUMNS"]),)](
        x, codes, weight.scales, x if zeros is None else zeros, x if bias is None else bias,
        x if scale is None else scale, out, eps, rows, width, out.stride(0), K=depth, GROUP=weight.group,
        BITS=weight.code.bits, ZEROS=zeros is not None, EVEN=depth % step == 0, NORMED=scale is not None,
        BIASED=bias is not None, GATED=gate is not None, LINEAR=linear, CUBIC=cubic, ADDED=added,
        FLOATS=_is_float(weight), **shape, **early(),
    )  # fmt: skip


# COLUMNS, DEPTH and warps of the kernel for one row, by the lines and the depth of the weight.
ONE_TILES = {
    Code.INT4: {"short": (16, 2048, 4), "many": (8, 4096, 4), "deep": (8, 2048, 2)},
    Code.INT8: {"short": (4, 2048, 4), "many": (4, 2048, 4), "deep": (4, 2048, 4)},
    Code.FP4: {"short": (16, 2048, 4), "many": (8, 4096, 4), "deep": (8, 2048, 2)},
    Code.FP8: {"short": (4, 1024, 1), "many": (4, 1024, 1), "deep": (8, 2048, 4)},
}
_MANY, _DEEP = 16384, 8192  # lines from which there are many programs, inputs from which a line takes many iterations


def one_shape(weight: Coded, lines: int, depth: int) -> dict[str, Any]:
    """Return the tile for one row: COLUMNS lines per program, DEPTH inputs of each per iteration."""
    kind = "deep" if depth > _DEEP else "many" if lines >= _MANY else "short"
    columns, deep, warps = ONE_TILES[weight.code][kind]
    whole = triton.next_power_of_2(depth)
    if whole < deep:
        deep, warps = max(whole, PACKED), max(1, warps * whole // deep)
    return {"COLUMNS": columns, "DEPTH": deep, "num_warps": warps}


def few_shape(weight: Coded, rows: int, lines: int, depth: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the tile for 2 to FEW rows: each of SPLIT warps multiplies DEPTH inputs of an iteration."""
    deep = weight.group if weight.group in (64, 128) else 128 if weight.code.bits == 4 else 64
    if dtype == torch.float32:
        deep, stages = 64, 2
    else:
        stages = 4
    tile = {"COLUMNS": 16 if lines <= 2048 else 32, "DEPTH": deep, "SPLIT": 4, "num_warps": 4, "num_stages": stages}
    return {**tile, "ROWS": 8 if rows <= 8 else FEW}


def multiply(x: torch.Tensor, weight: Coded, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x @ W^T + bias on tensor cores, for more than FEW rows."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    run_some(x.contiguous(), weight, bias, out, some_shape(weight, x.shape[0], weight.shape[0], x.dtype))
    return out


def some_shape(weight: Coded, rows: int, lines: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the tile for more than FEW rows."""
    deep = weight.group if weight.group in (64, 128) else 128 if weight.code.bits == 4 else 64
    if dtype == torch.float32:
        return {"COLUMNS": 32, "ROWS": 32, "DEPTH": 64, "num_warps": 4, "num_stages": 2}
    wide = 32 if rows <= 32 else 64 if rows <= 64 else 128
    return {"COLUMNS": 64 if lines <= 8192 else 128, "ROWS": wide, "DEPTH": deep, "num_warps": 4, "num_stages": 3}


def run_some(
    x: torch.Tensor, weight: Coded, bias: torch.Tensor | None, out: torch.Tensor, shape: dict[str, Any]
) -> None:
    """Launch `multiply` with a given tile."""
    (rows, depth), lines, zeros = x.shape, weight.shape[0], weight.zeros
    _some[(triton.cdiv(lines, shape["COLUMNS"]), triton.cdiv(rows, shape["ROWS"]))](
        x, _loadable(weight), weight.scales, x if zeros is None else zeros, x if bias is None else bias, out, rows,
        lines, K=depth, GROUP=weight.group, BITS=weight.code.bits, ZEROS=zeros is not None,
        EVEN=depth % shape["DEPTH"] == 0, BIASED=bias is not None, FLOATS=_is_float(weight), **shape, **early(),
    )  # fmt: skip


def dense(weight: Coded, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix in a plain dtype."""
    (lines, depth), zeros = weight.shape, weight.zeros
    out = torch.empty(lines, depth, dtype=dtype, device=weight.device)
    _dense[(lines, triton.cdiv(depth, _CONVERTED))](
        _loadable(weight), weight.scales, out if zeros is None else zeros, out, K=depth, GROUP=weight.group,
        BITS=weight.code.bits, FLOATS=_is_float(weight), ZEROS=zeros is not None, COUNT=_CONVERTED, num_warps=4,
        **early(),
    )  # fmt: skip
    return out


def _is_float(weight: Coded) -> bool:
    """Whether the codes are floats."""
    return weight.code in (Code.FP8, Code.FP4)


def _loadable(weight: Coded) -> torch.Tensor:
    """Return the codes in the dtype that says what they are."""
    return weight.codes.view(torch.float8_e4m3fn) if weight.code is Code.FP8 else weight.codes


@triton.jit(do_not_specialize=["rows"])
def _few(
    x_at, codes_at, scales_at, zeros_at, bias_at, norm_at, out_at, eps, rows, width, out_stride,
    K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr, ZEROS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr,
    NORMED: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr, LINEAR: tl.constexpr, CUBIC: tl.constexpr,
    ADDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows by COLUMNS lines of the weight, on tensor cores.

    Warps divide K, not the columns, which are too few: each multiplies DEPTH of an iteration's SPLIT * DEPTH.
    """
    EACH: tl.constexpr = 4 if BITS == 4 else 1  # codes of an element of the tile
    COUNT: tl.constexpr = DEPTH // EACH
    lines = lines_of(width, COLUMNS, GATED)
    bias = bias_of(bias_at, lines, BIASED)
    warp = tl.arange(0, SPLIT)
    place = (warp * COUNT)[:, None, None] + tl.arange(0, COUNT)[None, None, :]
    at = codes_at + lines[None, :, None] * (K // EACH) + place
    # Scales of a whole tile are loaded an iteration ahead: they are too small for asynchronous copies.
    ON_SUMS: tl.constexpr = GROUP % DEPTH == 0 and GROUP < K
    scale = _tile_scales(scales_at, lines[None, :], (warp * DEPTH)[:, None], K, GROUP, ON_SUMS)
    wait(EARLY)
    row = tl.arange(0, ROWS)
    to, inside = places(out_at, row, rows, width, out_stride, COLUMNS, GATED)
    residual = residual_of(to, inside, ADDED)
    is_row = (row < rows)[None, :, None]
    x_row = x_at + row[None, :, None] * K
    sums = tl.zeros([SPLIT, COLUMNS, ROWS], tl.float32)
    squares = tl.zeros([SPLIT, ROWS], tl.float32)
    for start in range(0, K // EACH, SPLIT * COUNT):
        here = start + place
        first = (start + SPLIT * COUNT) * EACH + warp * DEPTH
        next_scale = _tile_scales(scales_at, lines[None, :], first[:, None], K, GROUP, ON_SUMS)
        tile = load(at + start, here, K // EACH, EVEN)
        part = tl.zeros([SPLIT, COLUMNS, ROWS], tl.float32)
        if BITS == 4:
            numbers = four_numbers(tile, x_at.dtype.element_ty, FLOATS, ZEROS, EARLY)
        else:
            numbers = (byte_numbers(tile, x_at.dtype.element_ty, EARLY),)
        for i in tl.static_range(EACH):
            k = here // 8 * 32 + i * 8 + here % 8 if BITS == 4 else here
            x = tl.load(x_row + k, mask=is_row if EVEN else is_row & (k < K), other=0.0)
            if NORMED:
                wide = x.to(tl.float32)
                squares += tl.sum(wide * wide, 2)
                x = (wide * load(norm_at + k, k, K, EVEN).to(tl.float32)).to(x.dtype)
            group_of = lines[None, :, None] * (K // GROUP) + k // GROUP
            left = scaled(numbers[i], scales_at, zeros_at, group_of, k, K, GROUP % DEPTH != 0, ZEROS, EVEN)
            part = tl.dot(left, tl.permute(x, (0, 2, 1)), part, input_precision="ieee")
        if ON_SUMS:
            part *= scale[:, :, None]
            scale = next_scale
        sums += part
    y = tl.sum(sums, 0)
    if GROUP == K:
        y = y * tl.load(scales_at + lines).to(tl.float32)[:, None]
    if NORMED:
        y = y * tl.rsqrt(tl.sum(squares, 0) / K + eps)[None, :]
    store(to, inside, tl.trans(y + bias[:, None]), residual, GATED, LINEAR, CUBIC)


@triton.jit
def _tile_scales(scales_at, lines, first, K: tl.constexpr, GROUP: tl.constexpr, NEEDED: tl.constexpr):
    """Load the scales of the groups of some lines that begin at inputs `first`, or of the last group after it."""
    group = tl.minimum(first // GROUP, K // GROUP - 1)
    return tl.load(scales_at + lines * (K // GROUP) + group).to(tl.float32) if NEEDED else 1.0


@triton.jit(do_not_specialize=["rows"])
def _some(
    x_at, codes_at, scales_at, zeros_at, bias_at, out_at, rows, lines, K: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, FLOATS: tl.constexpr, ZEROS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, EVEN: tl.constexpr, BIASED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows by COLUMNS lines of the weight, on tensor cores."""
    EACH: tl.constexpr = 4 if BITS == 4 else 1  # codes of an element of the tile
    COUNT: tl.constexpr = DEPTH // EACH
    line = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    own = tl.minimum(line, lines - 1)
    wait(EARLY)
    x_row = x_at + tl.minimum(row, rows - 1)[None, :] * K
    place = tl.arange(0, COUNT)
    at = codes_at + own[:, None] * (K // EACH) + place[None, :]
    IS_WHOLE: tl.constexpr = GROUP % DEPTH == 0 and GROUP < K  # a tile is within one group
    SCALED: tl.constexpr = GROUP % DEPTH != 0
    scale = _tile_scales(scales_at, own, 0, K, GROUP, IS_WHOLE)
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(0, K // EACH, COUNT):
        here = start + place
        next_scale = _tile_scales(scales_at, own, (start + COUNT) * EACH, K, GROUP, IS_WHOLE)
        tile = load(at + start, here[None, :], K // EACH, EVEN)
        if BITS == 4:
            numbers = four_numbers(tile, x_at.dtype.element_ty, FLOATS, ZEROS, EARLY)
        else:
            numbers = (byte_numbers(tile, x_at.dtype.element_ty, EARLY),)
        for i in tl.static_range(EACH):
            k = here // 8 * 32 + i * 8 + here % 8 if BITS == 4 else here
            x = load(x_row + k[:, None], k[:, None], K, EVEN)
            group_of = own[:, None] * (K // GROUP) + (k // GROUP)[None, :]
            left = scaled(numbers[i], scales_at, zeros_at, group_of, k[None, :], K, SCALED, ZEROS, EVEN)
            if IS_WHOLE:
                left = (left * scale[:, None].to(left.dtype)).to(left.dtype)
            sums = tl.dot(left, x, sums, input_precision="ieee")
        if IS_WHOLE:
            scale = next_scale
    if GROUP == K:
        sums = sums * tl.load(scales_at + own).to(tl.float32)[:, None]
    sums += bias_of(bias_at, own, BIASED)[:, None]
    inside = (row < rows)[:, None] & (line < lines)[None, :]
    tl.store(out_at + row[:, None] * lines + line[None, :], tl.trans(sums).to(out_at.dtype.element_ty), mask=inside)


@triton.jit
def _dense(
    codes_at, scales_at, zeros_at, out_at, K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    FLOATS: tl.constexpr, ZEROS: tl.constexpr, COUNT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Convert COUNT numbers of a line."""
    EACH: tl.constexpr = 4 if BITS == 4 else 1
    line = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * (COUNT // EACH) + tl.arange(0, COUNT // EACH)
    inside = place < K // EACH
    wait(EARLY)
    tile = tl.load(codes_at + line * (K // EACH) + place, mask=inside, other=0.0)
    group_of = line * (K // GROUP) + place * EACH // GROUP
    scale = tl.load(scales_at + group_of, mask=inside, other=0.0).to(tl.float32)
    zero = tl.load(zeros_at + group_of, mask=inside, other=0.0).to(tl.float32) if ZEROS else 0.0
    numbers = four_numbers(tile, tl.float32, FLOATS, ZEROS, EARLY) if BITS == 4 else (tile.to(tl.float32),)
    for i in tl.static_range(EACH):
        k = place // 8 * 32 + i * 8 + place % 8 if BITS == 4 else place
        tl.store(out_at + line * K + k, ((numbers[i] - zero) * scale).to(out_at.dtype.element_ty), mask=inside)
