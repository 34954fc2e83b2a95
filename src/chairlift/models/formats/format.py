"""Format: how a model's matrices are stored, and the weights made of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch

from chairlift.models.cut import Cut
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

    expands = False  # whether the device's products need a dense matrix, as on a CPU: only its numbers are quantized

    multiplies_8_bits = False  # whether prompts are multiplied in 8 bits, at twice the rate of 16

    @abstractmethod
    def covers(self, name: str) -> bool:
        """Whether a matrix has this format; the others are dense."""

    @abstractmethod
    def outline(self, outputs: int, inputs: int, dtype: torch.dtype) -> Weight:
        """Return a matrix on the meta device, for its sizes."""


class StoredFormat(Format):
    """A format that a checkpoint is written in."""

    @abstractmethod
    def shape(self, source: Stored, name: str) -> tuple[int, int]:
        """Return the outputs and inputs of a matrix."""

    @abstractmethod
    def read(self, source: Stored, name: str, dtype: torch.dtype, device: torch.device, cut: Cut | None) -> Weight:
        """Read a matrix, or a part of it, onto its device."""
