"""The block formats of GGUF weights, unpacked with torch on the device of the bytes.

A block is a few scales and a run of small integers, and each format here is one function from blocks, `(n, nbytes)`
uint8, to weights, `(n, values)` float32. Products and sums stay separate operations: a fused multiply-add rounds once
instead of twice, and weights would differ in the last bit from other readers and between machines.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from chairlift.models.gguf_formats import BlockFormat

CHUNK = 1 << 20
"""Weights unpacked at a time: few enough that intermediate tensors fit the cache, enough that calls cost little."""


def dequantize(raw: Tensor, form: BlockFormat, dtype: torch.dtype) -> Tensor:
    """Unpack the bytes of a tensor into a flat tensor of weights.

    >>> half = torch.tensor([1.0, -2.0], dtype=torch.float16)
    >>> from chairlift.models.gguf_formats import FORMATS
    >>> dequantize(half.view(torch.uint8), FORMATS[1], torch.float32)
    tensor([ 1., -2.])
    """
    blocks, unpack = raw.view(-1, form.nbytes), UNPACK[form.name]
    if form.plain is not None:
        return unpack(blocks).view(-1).to(dtype)
    weights = torch.empty(len(blocks), form.values, dtype=dtype, device=raw.device)
    step = CHUNK // form.values
    for start in range(0, len(blocks), step):
        weights[start : start + step] = unpack(blocks[start : start + step])
    return weights.view(-1)


def f32(blocks: Tensor) -> Tensor:
    """Unpack float32."""
    return blocks.view(torch.float32)


def f16(blocks: Tensor) -> Tensor:
    """Unpack float16."""
    return blocks.view(torch.float16)


def bf16(blocks: Tensor) -> Tensor:
    """Unpack bfloat16."""
    return blocks.view(torch.bfloat16)


def q8_0(blocks: Tensor) -> Tensor:
    """Unpack a scale, then 32 signed bytes."""
    return blocks[:, 2:].view(torch.int8).float().mul_(_halves(blocks, 0))


def q4_0(blocks: Tensor) -> Tensor:
    """Unpack a scale, then 32 nibbles centred on 8."""
    return _centred(_nibbles(blocks[:, 2:]), 8).mul_(_halves(blocks, 0))


def q4_1(blocks: Tensor) -> Tensor:
    """Unpack a scale and a minimum, then 32 nibbles."""
    return _nibbles(blocks[:, 4:]).float().mul_(_halves(blocks, 0)).add_(_halves(blocks, 2))


def q5_0(blocks: Tensor) -> Tensor:
    """Unpack a scale, 32 fifth bits, then 32 nibbles; centred on 16."""
    numbers = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _centred(numbers, 16).mul_(_halves(blocks, 0))


def q5_1(blocks: Tensor) -> Tensor:
    """Unpack a scale and a minimum, 32 fifth bits, then 32 nibbles."""
    numbers = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return numbers.float().mul_(_halves(blocks, 0)).add_(_halves(blocks, 2))


def q4_k(blocks: Tensor) -> Tensor:
    """Unpack 256 nibbles in 8 groups, each with a 6-bit scale and a 6-bit minimum in units of two float16 per block."""
    scales, minimums = _group_scales(blocks)
    numbers = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32)
    return numbers.float().mul_(scales).sub_(minimums).view(-1, 256)


def q5_k(blocks: Tensor) -> Tensor:
    """Unpack Q4_K with fifth bits: those of group g are bit g of 32 bytes."""
    scales, minimums = _group_scales(blocks)
    numbers = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    high = blocks[:, 16:48].contiguous()
    for group in range(8):
        numbers[:, group] |= (high >> group & 1) << 4
    return numbers.float().mul_(scales).sub_(minimums).view(-1, 256)


def q6_k(blocks: Tensor) -> Tensor:
    """Unpack 256 six-bit numbers centred on 32, in 16 groups with int8 scales in units of one float16 per block."""
    scales = blocks[:, 192:208].view(torch.int8).float().mul_(_halves(blocks, 208))
    # Each half block is four runs of 32: the low nibbles of 64 bytes, then their high nibbles; a byte of `high` holds
    # the upper two bits of one number of each run.
    numbers = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    high = blocks[:, 128:192].contiguous().view(-1, 2, 32)
    for run in range(4):
        numbers[:, :, run] |= (high >> 2 * run & 3) << 4
    return _centred(numbers, 32).view(-1, 16, 16).mul_(scales.unsqueeze(-1)).view(-1, 256)


def _halves(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 at byte `start` of every block, as a float32 column."""
    return blocks[:, start : start + 2].view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Return the low nibbles of each run of bytes, then the high nibbles."""
    packed = packed.contiguous()  # shifting many short rows takes ten times as long as one long run
    return torch.stack((packed & 15, packed >> 4), dim=-2).flatten(-2)


def _centred(numbers: Tensor, zero: int) -> Tensor:
    """Subtract `zero` from unsigned numbers and return float32."""
    return numbers.view(torch.int8).sub_(zero).float()


def _fifth_bits(packed: Tensor) -> Tensor:
    """Return the bits of four bytes, lowest first, each times 16."""
    shifts = torch.arange(32, dtype=torch.int32, device=packed.device)
    return (packed.contiguous().view(torch.int32) >> shifts & 1).to(torch.uint8) << 4


def _group_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and 8 minimums of a K block, unpacked from 12 bytes."""
    # Bytes 0-3 and 4-7 hold the first four scales and minimums in their low 6 bits, and in their top 2 bits the upper
    # bits of the last four; their lower nibbles share bytes 8-11.
    first, second, shared = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (shared & 15) | (first >> 6) << 4), dim=1)
    minimums = torch.cat((second & 63, (shared >> 4) | (second >> 6) << 4), dim=1)
    return (
        (_halves(blocks, 0) * scales.float()).unsqueeze(-1),
        (_halves(blocks, 2) * minimums.float()).unsqueeze(-1),
    )


UNPACK: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": f32,
    "F16": f16,
    "BF16": bf16,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
"""The function of each format, by name."""
