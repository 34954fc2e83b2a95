"""Format: how a model's matrices are stored, and the weights made of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch

from chairlift.models.cut import Cut
from chairlift.ops.grouped import Grouped
from chairlift.ops.weight import Weight


class Stored(Protocol):
    """The tensors of a checkpoint as they are in its files."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor."""
        ...

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it; raise ModelError if it does not exist."""
        ...

    def stored(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored: a view of its file."""
        ...


class Format(ABC):
    """The format of a quantized model. `name` is always the Hugging Face name of a matrix, which ends in .weight."""

    expands = False  # whether matrices are dense when they have been read: only their numbers are quantized
    has_cpu_product = True  # whether a CPU multiplies it as it is
    multiplies_8_bits = False  # whether prompts are multiplied in 8 bits, at twice the rate of 16

    @abstractmethod
    def covers(self, name: str) -> bool:
        """Whether a matrix has this format; the others are dense."""

    @abstractmethod
    def outline(self, outputs: int, inputs: int, dtype: torch.dtype) -> Weight:
        """Return a matrix on the meta device, for its sizes."""


class StoredFormat(Format):
    """A format that a checkpoint is written in: its files say which matrices have it."""

    marks: str  # the tensor that every matrix of this format has, by the end of its name

    def __init__(self, source: Stored) -> None:
        self.source = source

    def covers(self, name: str) -> bool:
        """Whether a matrix has this format; those on the config's ignore list do not, nor have they its tensors."""
        return self.source.has(self.part(name, self.marks))

    @staticmethod
    def part(name: str, end: str) -> str:
        """Return the name of one of a matrix's tensors."""
        return f"{name.removesuffix('.weight')}.{end}"

    @abstractmethod
    def shape(self, name: str) -> tuple[int, int]:
        """Return the outputs and inputs of a matrix."""

    @abstractmethod
    def read(self, name: str, dtype: torch.dtype, device: torch.device, cut: Cut | None) -> Grouped:
        """Read a matrix, or a part of it, onto its device, as it is stored."""
