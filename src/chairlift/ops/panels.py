"""Panels: the layout of quantized weights that the CPU's integer micro-kernel (dot.py) reads, and packing into it.

A panel is PANEL adjacent outputs, and a run of blocks of groups of inputs. A block begins with its units of scale and
minimum, if groups have these as integers; a group has scales, minimums, the upper bits of its codes, then their lower
four bits, or codes of 8 bits. A vector holds four inputs of each of WIDTH outputs.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

import llvmlite.binding as llvm
import torch
from torch import Tensor

from chairlift.ops.block_codes import Codes
from chairlift.ops.tile import WIDTH


def _choose_dot() -> str:
    """Return the way in which this machine multiplies bytes: see dot.py."""
    features = llvm.get_host_cpu_features()
    if (WIDTH == 16 and features.get("avx512vnni")) or (WIDTH == 8 and features.get("avxvnni")):
        return "vnni"
    is_arm = platform.machine().lower() in ("aarch64", "arm64")
    return "sdot" if is_arm and features.get("dotprod") else "plain"


DOTS = ("vnni", "sdot", "plain")  # vpdpbusd of AVX512-VNNI or AVX-VNNI, sdot of ARM's dotprod, 16-bit multiply-adds
DOT = _choose_dot()
SIGNED = DOT == "sdot"  # whether codes of 8 bits are stored signed; vpdpbusd multiplies unsigned codes
# Rows and vectors of the largest tile: sums in int32 and in float32 beside the operands, in 32, 16 and 32 registers.
ROWS, VECTORS = {4: (4, 3), 8: (3, 2), 16: (6, 2)}[WIDTH]
PANEL = VECTORS * WIDTH  # adjacent outputs of a packed weight


@dataclass(frozen=True, slots=True)
class Panels:
    """The layout of one format. A weight is scale * (code - centre) + minimum."""

    bits: int  # of a code: 4, 5, 6 or 8
    group: int  # inputs that share a scale
    has_minimum: bool = False
    centre: int = 0
    groups: int = 1  # in a block with scales that are bytes in float16 units; 1: scales are float16 themselves

    @property
    def values(self) -> int:
        """Inputs of a block."""
        return self.groups * self.group

    @property
    def has_units(self) -> bool:
        """Whether scales and minimums are bytes, in units of the block."""
        return self.groups > 1

    @property
    def numbers(self) -> int:
        """Scales and minimums of one group and output."""
        return 2 if self.has_minimum else 1

    @property
    def unit_bytes(self) -> int:
        """Bytes at the start of a block, for each output."""
        return 2 * self.numbers if self.has_units else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes at the start of a group, for each output."""
        return self.numbers * (1 if self.has_units else 2)

    @property
    def group_bytes(self) -> int:
        """Bytes of a group, for each output."""
        return self.scale_bytes + self.group * self.bits // 8

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, for each output."""
        return self.unit_bytes + self.groups * self.group_bytes

    @property
    def record_bytes(self) -> int:
        """Bytes of a group of a row's inputs: codes, scale, sum."""
        return self.group + 8

    def pack(self, codes: Codes, out: Tensor) -> None:
        """Write the blocks of PANEL * n outputs, row by row, to n panels [n, blocks, PANEL * block_bytes] of bytes."""
        panels, blocks, _ = out.shape
        start, size = PANEL * self.unit_bytes, PANEL * self.scale_bytes
        if codes.units is not None:
            out[..., :start] = self._spread(codes.units, panels, blocks).view(panels, blocks, -1)
        groups = out[..., start:].view(panels, blocks, self.groups, -1)
        pair = (codes.scales,) if codes.minimums is None else (codes.scales, codes.minimums)
        numbers = torch.stack(pair, dim=-1)  # blocks of all rows, groups, scale and minimum
        groups[..., :size] = self._spread(numbers, panels, blocks).view(*groups.shape[:3], -1)
        groups[..., size:] = self._pack_codes(codes.codes, panels, blocks).view(*groups.shape[:3], -1)

    def _spread(self, numbers: Tensor, panels: int, blocks: int) -> Tensor:
        """Return the bytes of [rows * blocks, ..., numbers] as [panels, blocks, ..., numbers, PANEL]."""
        by_row = numbers.view(panels, PANEL, blocks, *numbers.shape[1:])
        return by_row.movedim(1, -1).contiguous().view(torch.uint8)

    def _pack_codes(self, codes: Tensor, panels: int, blocks: int) -> Tensor:
        """Return the codes' bytes as [panels, blocks * groups, upper bits and lower bits]."""
        words = codes.view(torch.int32).view(panels, PANEL, blocks * self.groups, self.group // 4)
        words = words.movedim(1, -1).contiguous()  # four inputs of an output are a word, WIDTH words a vector
        if self.bits == 8:
            return (words ^ _bytes(128) if SIGNED else words).view(torch.uint8)
        low = words & _bytes(15)
        parts = [low[:, :, 0::2] | low[:, :, 1::2] << 4]
        if more := self.bits - 4:
            high = (words >> 4).bitwise_and_(_bytes((1 << more) - 1))
            for quad in range(1, self.group // 4):
                high[:, :, 0] |= high[:, :, quad] << more * quad
            parts.insert(0, high[:, :, :1])
        return torch.cat(parts, dim=2).view(torch.uint8)


def _bytes(value: int) -> int:
    """Return the int32 with the same value in each byte."""
    return int.from_bytes(bytes([value] * 4), "little", signed=True)


_CENTRE = 0 if SIGNED else 128
FORMATS: dict[str, Panels] = {
    "Q8_0": Panels(8, 32, centre=_CENTRE),
    "Q4_0": Panels(4, 32, centre=8),
    "Q4_1": Panels(4, 32, has_minimum=True),
    "Q5_0": Panels(5, 32, centre=16),
    "Q5_1": Panels(5, 32, has_minimum=True),
    "Q4_K": Panels(4, 32, has_minimum=True, groups=8),
    "Q5_K": Panels(5, 32, has_minimum=True, groups=8),
    "Q6_K": Panels(6, 16, centre=32, groups=16),
}
"""The layout of each quantized GGUF format."""

LAYOUTS = list(FORMATS.values())  # a compiled tile is a function of a layout's place here
