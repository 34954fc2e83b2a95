"""Reading the tensors of a quantized matrix, with their dtypes, shapes and numbers checked, and making a weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chairlift.core.errors import ModelError
from chairlift.models.cut import Cut
from chairlift.models.formats.format import Stored
from chairlift.ops.codes import PACKED, Code, pack
from chairlift.ops.fp8 import Fp8
from chairlift.ops.grouped import Grouped

REFETCH = "the checkpoint is damaged or of a format that only looks like this one"


def read(source: Stored, name: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> torch.Tensor:
    """Return a stored tensor of one of the dtypes and shapes; ModelError with its name if it has another."""
    found = source.stored_shape(name)
    if found not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise ModelError(f"tensor {name} has shape {list(found)}, but {wanted} was expected: {REFETCH}")
    tensor = source.stored(name)
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        have = str(tensor.dtype).removeprefix("torch.")
        raise ModelError(f"tensor {name} is {have}, but {wanted} was expected: {REFETCH}")
    return tensor


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def read_scales(source: Stored, name: str, *shapes: tuple[int, ...]) -> torch.Tensor:
    """Return scales; ModelError if one is not a number."""
    scales = read(source, name, FLOATS, *shapes)
    if not bool(torch.isfinite(scales).all()):
        raise ModelError(f"tensor {name} has scales that are not finite numbers: {REFETCH}")
    return scales


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of int32 words [rows, words] as uint8 [rows, words * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(1)


@dataclass(frozen=True, slots=True)
class Parts:
    """A matrix before it is a weight: unsigned codes [outputs, inputs], scales and zeros [outputs, groups]."""

    name: str
    code: Code  # INT4, INT8 or FP4
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None  # unsigned too; None: the middle of the codes

    def cut(self, cut: Cut | None) -> Parts:
        """Return a rank's part; columns must be whole groups."""
        if cut is None:
            return self
        codes, zeros = cut.of(self.codes), self.zeros
        if cut.dimension == 0:
            return Parts(self.name, self.code, codes, cut.of(self.scales), None if zeros is None else cut.of(zeros))
        groups = group_cut(self.name, cut, self.codes.shape[1], self.scales.shape[1])
        scales, zeros = (
            each if each is None or groups is None else groups.of(each) for each in (self.scales, self.zeros)
        )
        assert scales is not None
        return Parts(self.name, self.code, codes, scales, zeros)

    def weight(self, dtype: torch.dtype) -> Grouped:
        """Return the weight; scales keep their dtype."""
        zeros = self.zeros
        if self.code is Code.INT8:  # 8-bit codes are signed
            signed = (self.codes ^ 0x80).view(torch.int8)
            middle = None if zeros is None else (zeros.to(self.scales.dtype) - 128)
            return Grouped(self.code, signed, self.scales.contiguous(), middle, dtype)
        zeros = None if zeros is None else zeros.to(self.scales.dtype).contiguous()
        return Grouped(self.code, pack(self.codes), self.scales.contiguous(), zeros, dtype)


def group_cut(name: str, cut: Cut, inputs: int, groups: int) -> Cut | None:
    """Return the groups of a cut's columns, or None if one group is the whole row; ModelError if one is divided."""
    ((first, last),) = cut.ranges
    size = PACKED if groups == 1 else inputs // groups
    if first % size or last % size:
        ranks = [str(count) for count in range(1, 65) if inputs % count == 0 and inputs // count % size == 0]
        raise ModelError(
            f"tensor {name} has {inputs:,} inputs in groups of {size} with common scales, of which one rank would have "
            f"{first:,} to {last:,}: set tensor_parallel to one of {', '.join(ranks)}"
        )
    return None if groups == 1 else Cut(1, ((first // size, last // size),))


def group_size(name: str, wanted: int, inputs: int, bits: int) -> int:
    """Return the inputs of a group, where -1 is the whole row; ModelError if they do not divide."""
    size = inputs if wanted <= 0 or wanted > inputs else wanted
    if inputs % size or (bits == 4 and size % PACKED):
        raise ModelError(
            f"tensor {name} has {inputs:,} inputs in groups of {wanted}: groups must divide the inputs"
            + (f" and be multiples of {PACKED}" if bits == 4 else "")
        )
    return size


def fp8_weight(
    name: str, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, device: torch.device, cut: Cut | None
) -> Grouped:
    """Return the weight of e4m3 codes with a scale for the matrix, each output, or each block of 128 x 128."""
    outputs, inputs = codes.shape
    whole = scales.numel() in (1, outputs) and (scales.dim() < 2 or scales.shape[-1] == 1)
    if whole:
        spread = scales.float().reshape(-1, 1).expand(outputs, 1)
    else:
        block = -(-outputs // scales.shape[0])
        spread = scales.float().repeat_interleave(block, 0)[:outputs]
    bits = codes.view(torch.uint8).view(torch.int8)  # torch's indexing does not support e4m3
    if cut is not None and cut.dimension == 0:
        bits, spread = cut.of(bits), cut.of(spread)
    elif cut is not None:
        bits, groups = cut.of(bits), None if whole else group_cut(name, cut, inputs, spread.shape[1])
        spread = spread if groups is None else groups.of(spread)
    kind = Fp8 if whole else Grouped
    return kind(Code.FP8, bits.to(device), spread.contiguous().to(device), None, dtype)
