"""The data of quantized matrices: 4- or 8-bit codes with a scale, and perhaps a zero, per group of inputs of an output.

A number is (code - zero) * scale. Codes are integers of 4 or 8 bits, floats of 8 bits (e4m3) or of 4 (e2m1). A group is
some inputs of one output, or all of them.

Codes of 4 bits are stored in 16-bit words, 32 of them in 8 words: bits 4i..4i+3 of word h are input 8i + h of the
32. So a kernel that takes the same bits of 8 consecutive words has 8 consecutive inputs.
"""

from __future__ import annotations

from enum import Enum

import torch

PACKED = 32  # inputs with 4-bit codes that are stored together
MIDDLE = 8  # the zero of 4-bit integers without zeros of their own
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # 4-bit floats by code


class Code(Enum):
    """The kinds of codes, by the bits and the largest number that a code without zero stands for."""

    INT4 = (4, 7)
    INT8 = (8, 127)
    FP8 = (8, 448)
    FP4 = (4, 6)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.value[0]

    @property
    def most(self) -> int:
        """The largest code's number."""
        return self.value[1]


class Coded:
    """A matrix of codes.

    `codes` is int16 [outputs, inputs / 4] for 4 bits, else int8 [outputs, inputs], with the bits of e4m3 for FP8.
    Scales and zeros are [outputs, groups]; zeros are integers in the dtype of the scales. 8-bit integers are signed.
    """

    def __init__(self, code: Code, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
        self.code, self.codes, self.scales, self.zeros = code, codes, scales, zeros

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""
        return self.codes.shape[0], self.codes.shape[1] * (4 if self.code.bits == 4 else 1)

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    @property
    def device(self) -> torch.device:
        """The device that the matrix is on."""
        return self.codes.device

    def numbers(self) -> torch.Tensor:
        """Return the matrix in float32."""
        outputs, inputs = self.shape
        wide = numbers_of(self.codes, self.code).view(outputs, -1, self.group)
        if self.zeros is not None:
            wide = wide - self.zeros.float().unsqueeze(-1)
        elif self.code is Code.INT4:
            wide = wide - MIDDLE
        return (wide * self.scales.float().unsqueeze(-1)).view(outputs, inputs)


def numbers_of(codes: torch.Tensor, code: Code) -> torch.Tensor:
    """Return the number of each code in float32, without scales and zeros."""
    if code is Code.INT4:
        return unpack(codes).float()
    if code is Code.FP4:
        return torch.tensor(E2M1, device=codes.device)[unpack(codes)]
    return (codes.view(torch.float8_e4m3fn) if code is Code.FP8 else codes).float()


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit codes [outputs, inputs] of any integer dtype in 16-bit words [outputs, inputs / 4].

    >>> [hex(word) for word in pack(torch.arange(32).view(1, 32) // 8)[0, :2].tolist()]
    ['0x3210', '0x3210']
    """
    four = codes.to(torch.int32).view(codes.shape[0], -1, 4, PACKED // 4)
    words = four[:, :, 0] | four[:, :, 1] << 4 | four[:, :, 2] << 8 | four[:, :, 3] << 12
    return words.to(torch.int16).flatten(1)


def unpack(words: torch.Tensor) -> torch.Tensor:
    """Return the 4-bit codes [outputs, inputs] of 16-bit words as int32."""
    of_32 = words.to(torch.int32).view(words.shape[0], -1, 1, PACKED // 4)
    shifts = torch.arange(0, 16, 4, device=words.device, dtype=torch.int32).view(1, 1, 4, 1)
    return ((of_32 >> shifts) & 15).flatten(1)
