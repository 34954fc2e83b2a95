"""The block formats of GGUF weights, unpacked with torch on the device of the bytes.

A block is a few scales and a run of small integers, and each format here is one function from blocks, `(n, nbytes)`
uint8, to their codes, scales and minimums. `dequantize` makes weights of these. Products and sums stay separate
operations: a fused multiply-add rounds once instead of twice, and weights would differ in the last bit from other
readers and between machines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from chairlift.ops.block_formats import BlockFormat

CHUNK = 1 << 20
"""Weights unpacked at a time: few enough that intermediate tensors fit the cache, enough that calls cost little."""


@dataclass(frozen=True, slots=True)
class Codes:
    """The numbers of n blocks: a weight is scale * (code - centre) + minimum."""

    codes: Tensor  # (n, values), uint8
    scales: Tensor  # (n, groups), float16; int8 where blocks have units
    minimums: Tensor | None = None  # of the shape and dtype of scales
    units: Tensor | None = None  # (n, 1 or 2), float16: what scales and minimums are multiplied by
    centre: int = 0

    def weights(self) -> Tensor:
        """Return the weights (n, values) in float32."""
        scales, minimums = self.scales.float(), None if self.minimums is None else self.minimums.float()
        if self.units is not None:
            scales = scales * self.units[:, :1].float()
            minimums = None if minimums is None else minimums * self.units[:, 1:].float()
        count, groups = scales.shape
        centred = self.codes.sub(self.centre).view(torch.int8) if self.centre else self.codes
        weights = centred.view(count, groups, -1).float().mul_(scales.unsqueeze(-1))
        if minimums is not None:
            weights.add_(minimums.unsqueeze(-1))
        return weights.view(count, -1)


def dequantize(raw: Tensor, form: BlockFormat, dtype: torch.dtype) -> Tensor:
    """Unpack the bytes of a tensor into a flat tensor of weights.

    >>> half = torch.tensor([1.0, -2.0], dtype=torch.float16)
    >>> from chairlift.ops.block_formats import FORMATS
    >>> dequantize(half.view(torch.uint8), FORMATS[1], torch.float32)
    tensor([ 1., -2.])
    """
    if form.plain is not None:
        return raw.view(getattr(torch, form.plain)).to(dtype)
    blocks, unpack = raw.view(-1, form.nbytes), UNPACK[form.name]
    weights = torch.empty(len(blocks), form.values, dtype=dtype, device=raw.device)
    step = CHUNK // form.values
    for start in range(0, len(blocks), step):
        weights[start : start + step] = unpack(blocks[start : start + step]).weights()
    return weights.view(-1)


def q8_0(blocks: Tensor) -> Codes:
    """Unpack a scale, then 32 signed bytes."""
    return Codes(blocks[:, 2:] ^ 128, _halves(blocks, 0), centre=128)


def q4_0(blocks: Tensor) -> Codes:
    """Unpack a scale, then 32 nibbles centred on 8."""
    return Codes(_nibbles(blocks[:, 2:]), _halves(blocks, 0), centre=8)


def q4_1(blocks: Tensor) -> Codes:
    """Unpack a scale and a minimum, then 32 nibbles."""
    return Codes(_nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2))


def q5_0(blocks: Tensor) -> Codes:
    """Unpack a scale, 32 fifth bits, then 32 nibbles; centred on 16."""
    return Codes(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), _halves(blocks, 0), centre=16)


def q5_1(blocks: Tensor) -> Codes:
    """Unpack a scale and a minimum, 32 fifth bits, then 32 nibbles."""
    return Codes(_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _halves(blocks, 0), _halves(blocks, 2))


def q4_k(blocks: Tensor) -> Codes:
    """Unpack 256 nibbles in 8 groups, each with a 6-bit scale and a 6-bit minimum in units of two float16 per block."""
    return Codes(_nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 256), *_group_scales(blocks))


def q5_k(blocks: Tensor) -> Codes:
    """Unpack Q4_K with fifth bits: those of group g are bit g of 32 bytes."""
    numbers = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    high = blocks[:, 16:48].contiguous()
    for group in range(8):
        numbers[:, group] |= (high >> group & 1) << 4
    return Codes(numbers.view(-1, 256), *_group_scales(blocks))


def q6_k(blocks: Tensor) -> Codes:
    """Unpack 256 six-bit numbers centred on 32, in 16 groups with int8 scales in units of one float16 per block."""
    # Each half block is four runs of 32: the low nibbles of 64 bytes, then their high nibbles; a byte of `high` holds
    # the upper two bits of one number of each run.
    numbers = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    high = blocks[:, 128:192].contiguous().view(-1, 2, 32)
    for run in range(4):
        numbers[:, :, run] |= (high >> 2 * run & 3) << 4
    scales = blocks[:, 192:208].view(torch.int8)
    return Codes(numbers.view(-1, 256), scales, units=_halves(blocks, 208), centre=32)


def _halves(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 at byte `start` of every block, as a column."""
    return blocks[:, start : start + 2].view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """Return the low nibbles of each run of bytes, then the high nibbles."""
    packed = packed.contiguous()  # shifting many short rows takes ten times as long as one long run
    return torch.stack((packed & 15, packed >> 4), dim=-2).flatten(-2)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Return the bits of four bytes, lowest first, each times 16."""
    shifts = torch.arange(32, dtype=torch.int32, device=packed.device)
    return (packed.contiguous().view(torch.int32) >> shifts & 1).to(torch.uint8) << 4


def _group_scales(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the 8 scales and 8 minimums of a K block, unpacked from 12 bytes, and their units."""
    # Bytes 0-3 and 4-7 hold the first four scales and minimums in their low 6 bits, and in their top 2 bits the upper
    # bits of the last four; their lower nibbles share bytes 8-11.
    first, second, shared = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (shared & 15) | (first >> 6) << 4), dim=1)
    minimums = torch.cat((second & 63, (shared >> 4) | (second >> 6) << 4), dim=1)
    units = torch.cat((_halves(blocks, 0), -_halves(blocks, 2)), dim=1)  # minimums are subtracted in these formats
    return scales.view(torch.int8), minimums.view(torch.int8), units


UNPACK: dict[str, Callable[[Tensor], Codes]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
"""The function of each quantized format, by name."""
