"""One row times a quantized weight in Triton, with norm, bias, gate and residual in the same kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from chairlift.ops.codes_cuda import float4
from chairlift.ops.early_cuda import wait
from chairlift.ops.skinny_cuda import bias_of, lines_of, load, places, residual_of, store


@triton.jit(do_not_specialize=["rows"])
def multiply_one(
    x_at, codes_at, scales_at, zeros_at, bias_at, norm_at, out_at, eps, rows, width, out_stride,
    K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr, ZEROS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, NORMED: tl.constexpr, BIASED: tl.constexpr,
    GATED: tl.constexpr, LINEAR: tl.constexpr, CUBIC: tl.constexpr, ADDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply one row by COLUMNS lines of the weight.

    Every iteration loads the codes of the next one before it computes.
    """
    EACH: tl.constexpr = 32 // BITS  # codes of a word
    COUNT: tl.constexpr = DEPTH // EACH
    lines = lines_of(width, COLUMNS, GATED)
    place = tl.arange(0, COUNT)
    at = codes_at + lines[:, None] * (K // EACH) + place[None, :]
    tile = load(at, place[None, :], K // EACH, EVEN)
    scale, zero = _scales(scales_at, zeros_at, lines, place * EACH, K, GROUP, ZEROS, EVEN)
    bias = bias_of(bias_at, lines, BIASED)
    wait(EARLY)
    to, inside = places(out_at, tl.zeros([1], tl.int32), rows, width, out_stride, COLUMNS, GATED)
    residual = residual_of(to, inside, ADDED)
    sums = tl.zeros([COLUMNS, COUNT], tl.float32)
    squares = tl.zeros([COUNT], tl.float32)
    for start in range(COUNT, K // EACH, COUNT):
        following = load(at + start, start + place[None, :], K // EACH, EVEN)
        next_scale, next_zero = _scales(scales_at, zeros_at, lines, (start + place) * EACH, K, GROUP, ZEROS, EVEN)
        sums, squares = _add_one(
            sums,
            squares,
            tile,
            scale,
            zero,
            x_at,
            norm_at,
            start - COUNT + place,
            K,
            BITS,
            FLOATS,
            ZEROS,
            EVEN,
            NORMED,
            EARLY,
        )
        tile, scale, zero = following, next_scale, next_zero
    last = (K // EACH - 1) // COUNT * COUNT + place
    sums, squares = _add_one(
        sums, squares, tile, scale, zero, x_at, norm_at, last, K, BITS, FLOATS, ZEROS, EVEN, NORMED, EARLY
    )
    y = tl.sum(sums, 1)
    if GROUP == K:
        y = y * tl.load(scales_at + lines).to(tl.float32)
    if NORMED:
        y = y * tl.rsqrt(tl.sum(squares, 0) / K + eps)
    store(to, inside, (y + bias)[None, :], residual, GATED, LINEAR, CUBIC)


@triton.jit
def _scales(
    scales_at, zeros_at, lines, k, K: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, EVEN: tl.constexpr
):
    """Load the scales and zeros of some inputs k of some lines; scales of whole lines are applied at the end."""
    at = lines[:, None] * (K // GROUP) + (k // GROUP)[None, :]
    scale = 1.0 if GROUP == K else load(scales_at + at, k[None, :], K, EVEN).to(tl.float32)
    zero = load(zeros_at + at, k[None, :], K, EVEN).to(tl.float32) if ZEROS else 0.0
    return scale, zero


@triton.jit
def _add_one(
    sums, squares, tile, scale, zero, x_at, norm_at, place, K: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr,
    ZEROS: tl.constexpr, EVEN: tl.constexpr, NORMED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add the products of a tile of words and one row."""
    if BITS == 4:
        sums, squares = _add_eights(
            sums, squares, tile, scale, zero, x_at, norm_at, place, K, FLOATS, ZEROS, EVEN, NORMED, EARLY
        )
    else:
        sums, squares = _add_fours(
            sums, squares, tile, scale, zero, x_at, norm_at, place, K, FLOATS, ZEROS, EVEN, NORMED, EARLY
        )
    return sums, squares


@triton.jit
def _add_fours(
    sums, squares, tile, scale, zero, x_at, norm_at, place, K: tl.constexpr, FLOATS: tl.constexpr,
    ZEROS: tl.constexpr, EVEN: tl.constexpr, NORMED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add the products of a tile of words, of four 8-bit codes each, and one row."""
    x_0, x_1, x_2, x_3 = _fours(x_at, place, K, EVEN)
    squares += (x_0 * x_0 + x_1 * x_1) + (x_2 * x_2 + x_3 * x_3)
    if NORMED:
        n_0, n_1, n_2, n_3 = _fours(norm_at, place, K, EVEN)
        x_0, x_1, x_2, x_3 = x_0 * n_0, x_1 * n_1, x_2 * n_2, x_3 * n_3
    if FLOATS and EARLY:
        part = _floats(tile, x_0[None, :], x_1[None, :], x_2[None, :], x_3[None, :])
    else:
        part = _byte(tile, 0, FLOATS) * x_0[None, :] + _byte(tile, 8, FLOATS) * x_1[None, :]
        part += _byte(tile, 16, FLOATS) * x_2[None, :] + _byte(tile, 24, FLOATS) * x_3[None, :]
    if ZEROS:
        part -= zero * ((x_0 + x_1) + (x_2 + x_3))[None, :]
    return sums + part * scale, squares


@triton.jit
def _fours(at, place, K: tl.constexpr, EVEN: tl.constexpr):
    """Load four numbers of each place as float32; those of 16 bits with one load."""
    if at.dtype.element_ty == tl.float32:
        first = at + 4 * place
        x_0, x_1 = load(first, 4 * place, K, EVEN), load(first + 1, 4 * place, K, EVEN)
        x_2, x_3 = load(first + 2, 4 * place, K, EVEN), load(first + 3, 4 * place, K, EVEN)
    else:
        four = load(at.to(tl.pointer_type(tl.int64), bitcast=True) + place, 4 * place, K, EVEN)
        x_0, x_1 = _wide(four.to(tl.int32), at.dtype.element_ty)
        x_2, x_3 = _wide((four >> 32).to(tl.int32), at.dtype.element_ty)
    return x_0, x_1, x_2, x_3


@triton.jit
def _byte(words, FIRST: tl.constexpr, FLOATS: tl.constexpr):
    """Return the number of a word's 8 bits from FIRST on."""
    signed = (words << (24 - FIRST)) >> 24
    if FLOATS:  # shift sign, exponent and mantissa to their float32 bits; the exponent bias differs by 120
        number = ((signed << 20) & -0x78100000).to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        number = signed.to(tl.float32)
    return number


@triton.jit
def _floats(words, x_0, x_1, x_2, x_3):
    """Return the sums of a word's four e4m3 codes times four numbers."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 p, q, l, h;
        .reg .b32 a;
        .reg .f32 f;
        mov.b32 {p, q}, $1;
        cvt.rn.f16x2.e4m3x2 a, p;
        mov.b32 {l, h}, a;
        cvt.f32.f16 f, l;
        mul.f32 $0, f, $2;
        cvt.f32.f16 f, h;
        fma.rn.f32 $0, f, $3, $0;
        cvt.rn.f16x2.e4m3x2 a, q;
        mov.b32 {l, h}, a;
        cvt.f32.f16 f, l;
        fma.rn.f32 $0, f, $4, $0;
        cvt.f32.f16 f, h;
        fma.rn.f32 $0, f, $5, $0;
        }""",
        "=&r,r,r,r,r,r",
        [words, x_0, x_1, x_2, x_3],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _add_eights(
    sums, squares, tile, scale, zero, x_at, norm_at, place, K: tl.constexpr, FLOATS: tl.constexpr,
    ZEROS: tl.constexpr, EVEN: tl.constexpr, NORMED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add the products of a tile of words, of 8 codes each, and one row.

    Bits 4i..4i+3 of half h of a word are input 8i + 2 * word + h of 32.
    """
    pair = place // 4 * 16 + place % 4
    low_0, high_0, square_0 = _pairs(x_at, norm_at, pair, K, EVEN, NORMED)
    low_1, high_1, square_1 = _pairs(x_at, norm_at, pair + 4, K, EVEN, NORMED)
    low_2, high_2, square_2 = _pairs(x_at, norm_at, pair + 8, K, EVEN, NORMED)
    low_3, high_3, square_3 = _pairs(x_at, norm_at, pair + 12, K, EVEN, NORMED)
    squares += (square_0 + square_1) + (square_2 + square_3)
    total = ((low_0 + high_0) + (low_1 + high_1)) + ((low_2 + high_2) + (low_3 + high_3))
    if EARLY and not FLOATS and x_at.dtype.element_ty != tl.float32:
        size_0 = tl.maximum(tl.maximum(tl.abs(low_0), tl.abs(high_0)), tl.maximum(tl.abs(low_1), tl.abs(high_1)))
        size_1 = tl.maximum(tl.maximum(tl.abs(low_2), tl.abs(high_2)), tl.maximum(tl.abs(low_3), tl.abs(high_3)))
        largest = tl.maximum(tl.maximum(size_0, size_1), 1e-30).to(tl.int32, bitcast=True) & 0x7F800000
        shrink = ((254 << 23) - largest).to(tl.float32, bitcast=True) * 16384.0  # the largest becomes 2**14 to 2**15
        grow = (largest + (10 << 23)).to(tl.float32, bitcast=True)  # 2**24 / shrink: see _eight
        lower = shrink * 0.0625
        part = grow[None, :] * _eight(
            tile,
            _halves(low_0 * shrink, high_0 * shrink)[None, :],
            _halves(low_1 * lower, high_1 * lower)[None, :],
            _halves(low_2 * shrink, high_2 * shrink)[None, :],
            _halves(low_3 * lower, high_3 * lower)[None, :],
        )
    else:
        part = _bits(tile, 0, FLOATS) * low_0[None, :] + _bits(tile, 16, FLOATS) * high_0[None, :]
        part += _bits(tile, 4, FLOATS) * low_1[None, :] + _bits(tile, 20, FLOATS) * high_1[None, :]
        part += _bits(tile, 8, FLOATS) * low_2[None, :] + _bits(tile, 24, FLOATS) * high_2[None, :]
        part += _bits(tile, 12, FLOATS) * low_3[None, :] + _bits(tile, 28, FLOATS) * high_3[None, :]
    if not FLOATS:
        part -= (zero if ZEROS else 8.0) * total[None, :]
    return sums + part * scale, squares


@triton.jit
def _bits(words, FIRST: tl.constexpr, FLOATS: tl.constexpr):
    """Return the number of a word's 4 bits from FIRST on."""
    return float4(words, FIRST) if FLOATS else ((words >> FIRST) & 15).to(tl.float32)


@triton.jit
def _halves(low, high):
    """Round pairs of numbers to float16, in the halves of a word."""
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,r,r", [high, low], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _eight(words, x_0, x_1, x_2, x_3):
    """Return the sums of a word's 8 codes times 8 numbers in float16, times 2**-24.

    The bits of a code, alone in a float16, are a subnormal number: the code times 2**-24, or times 2**-20 four bits
    further up. So two codes take one instruction to extract and one to multiply.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t, w, a, b;
        .reg .b16 l, h;
        .reg .f32 f, g;
        and.b32 t, $1, 0x000F000F;
        mul.rn.f16x2 a, t, $2;
        and.b32 t, $1, 0x00F000F0;
        fma.rn.f16x2 a, t, $3, a;
        shr.u32 w, $1, 8;
        and.b32 t, w, 0x000F000F;
        mul.rn.f16x2 b, t, $4;
        and.b32 t, w, 0x00F000F0;
        fma.rn.f16x2 b, t, $5, b;
        mov.b32 {l, h}, a;
        cvt.f32.f16 f, l;
        cvt.f32.f16 g, h;
        add.f32 f, f, g;
        mov.b32 {l, h}, b;
        cvt.f32.f16 g, l;
        add.f32 f, f, g;
        cvt.f32.f16 g, h;
        add.f32 $0, f, g;
        }""",
        "=r,r,r,r,r,r",
        [words, x_0, x_1, x_2, x_3],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _pairs(x_at, norm_at, pair, K: tl.constexpr, EVEN: tl.constexpr, NORMED: tl.constexpr):
    """Load pairs of inputs, times the norm's weight, and return the sum of squares of the plain ones too."""
    low, high = _pair(x_at, pair, K, EVEN)
    square = low * low + high * high
    if NORMED:
        low_scale, high_scale = _pair(norm_at, pair, K, EVEN)
        low, high = low * low_scale, high * high_scale
    return low, high, square


@triton.jit
def _pair(at, pair, K: tl.constexpr, EVEN: tl.constexpr):
    """Load pairs of numbers as float32; those of 16 bits with one load for both."""
    if at.dtype.element_ty == tl.float32:
        low, high = load(at + 2 * pair, 2 * pair, K, EVEN), load(at + 2 * pair + 1, 2 * pair, K, EVEN)
    else:
        both = load(at.to(tl.pointer_type(tl.int32), bitcast=True) + pair, 2 * pair, K, EVEN)
        low, high = _wide(both, at.dtype.element_ty)
    return low, high


@triton.jit
def _wide(both, kind: tl.constexpr):
    """Return the 16-bit numbers in both halves of a word as float32."""
    if kind == tl.bfloat16:
        low, high = (both << 16).to(tl.float32, bitcast=True), (both & -0x10000).to(tl.float32, bitcast=True)
    else:
        low = both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high
