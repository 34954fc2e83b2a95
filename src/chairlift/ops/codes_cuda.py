"""Codes of quantized weights as 16-bit numbers, in few instructions: for tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from chairlift.ops.skinny_cuda import load

_FOUR_TO_BFLOAT16_TEXT = """{{
    .reg .b32 w, one, less;
    mov.b32 one, 0x3F803F80;
    mov.b32 less, {less};
    lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, $0, one, less;
    shr.u32 w, $4, 4;
    lop3.b32 $1, w, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $1, $1, one, less;
    shr.u32 w, $4, 8;
    lop3.b32 $2, w, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $2, $2, one, less;
    shr.u32 w, $4, 12;
    lop3.b32 $3, w, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $3, $3, one, less;
}}"""
_FOUR_TO_BFLOAT16 = tl.constexpr(_FOUR_TO_BFLOAT16_TEXT.format(less="0xC308C308"))  # -136
_FOUR_TO_BFLOAT16_PLAIN = tl.constexpr(_FOUR_TO_BFLOAT16_TEXT.format(less="0xC300C300"))  # -128
_INT8_TO_BFLOAT16 = tl.constexpr("""{
    .reg .b32 t, a, b, minus;
    mov.b32 minus, 0xBF80BF80;
    prmt.b32 t, $2, 0, 0x4140;
    lop3.b32 a, t, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 b, t, 0x00800080, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, b, minus, a;
    prmt.b32 t, $2, 0, 0x4342;
    lop3.b32 a, t, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 b, t, 0x00800080, 0x43004300, 0xEA;
    fma.rn.bf16x2 $1, b, minus, a;
}""")
_FP8_TO_BFLOAT16 = tl.constexpr("""{
    .reg .b32 t, a, large, zero;
    mov.b32 large, 0x7B807B80;
    mov.b32 zero, 0x80008000;
    prmt.b32 t, $2, 0, 0x1404;
    shr.u32 a, t, 4;
    and.b32 a, a, 0x07F007F0;
    lop3.b32 a, t, 0x80008000, a, 0xEA;
    fma.rn.bf16x2 $0, a, large, zero;
    prmt.b32 t, $2, 0, 0x3424;
    shr.u32 a, t, 4;
    and.b32 a, a, 0x07F007F0;
    lop3.b32 a, t, 0x80008000, a, 0xEA;
    fma.rn.bf16x2 $1, a, large, zero;
}""")


@triton.jit
def float4(words, FIRST: tl.constexpr):
    """Return the numbers of 4-bit floats (e2m1), in bits FIRST..FIRST + 3 of words, as float32."""
    code = (words.to(tl.int32) >> FIRST) & 15
    size, half = code & 7, code & 1
    twice = tl.where(size < 2, size, (half + 2) << (tl.maximum(size >> 1, 1) - 1))
    return tl.where(code < 8, twice, -twice).to(tl.float32) * 0.5


@triton.jit
def four_numbers(words, kind: tl.constexpr, FLOATS: tl.constexpr, ZEROS: tl.constexpr, EARLY: tl.constexpr):
    """Convert the four 4-bit codes of each word to numbers without scale; of integers without zeros, minus 8."""
    if FLOATS:
        numbers = (
            float4(words, 0).to(kind),
            float4(words, 4).to(kind),
            float4(words, 8).to(kind),
            float4(words, 12).to(kind),
        )
    elif EARLY and kind == tl.bfloat16:
        # A code in the lowest bits of 128.0 is 128 + code.
        numbers = tl.inline_asm_elementwise(
            _FOUR_TO_BFLOAT16_PLAIN if ZEROS else _FOUR_TO_BFLOAT16,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        less: tl.constexpr = 0.0 if ZEROS else 8.0
        numbers = (
            ((words & 15).to(kind) - less).to(kind),
            (((words >> 4) & 15).to(kind) - less).to(kind),
            (((words >> 8) & 15).to(kind) - less).to(kind),
            (((words >> 12) & 15).to(kind) - less).to(kind),
        )
    return numbers


@triton.jit
def scaled(
    numbers, scales_at, zeros_at, group_of, k, K: tl.constexpr, SCALED: tl.constexpr, ZEROS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Subtract the zeros, and multiply by the scales if SCALED."""
    if ZEROS:
        numbers = numbers - load(zeros_at + group_of, k, K, EVEN).to(numbers.dtype)
    if SCALED:
        wide = numbers.to(tl.float32) * load(scales_at + group_of, k, K, EVEN).to(tl.float32)
        numbers = wide.to(numbers.dtype)
    return numbers


@triton.jit
def byte_numbers(codes, kind: tl.constexpr, EARLY: tl.constexpr):
    """Convert 8-bit codes to numbers without scale, which are exact in 16 bits."""
    if EARLY and kind == tl.bfloat16 and codes.dtype == tl.int8:
        # Seven bits in the lowest bits of 128.0 are 128 + code; the sign's bit makes another 128.0 a 256.0.
        numbers = tl.inline_asm_elementwise(
            _INT8_TO_BFLOAT16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    elif EARLY and kind == tl.bfloat16:
        # Shift exponent and mantissa to their bits in bfloat16; the exponent bias differs by 120.
        numbers = tl.inline_asm_elementwise(
            _FP8_TO_BFLOAT16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        numbers = codes.to(kind)
    return numbers
