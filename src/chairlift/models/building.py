"""Building a decoder: what a family's file asks for its tensors, and the linear layers it makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Protocol

import torch

from chairlift.ops.dense import Dense
from chairlift.ops.linear import Linear, Reduce
from chairlift.ops.norm import Norm
from chairlift.ops.weight import Weight

Parts = int | tuple[int, ...]  # the outputs of a matrix, or of each of several projections that are stored as one


class Split(Enum):
    """How ranks share a matrix [outputs, inputs]."""

    OUTPUTS = 0
    INPUTS = 1


class Take(Protocol):
    """Hands out a model's tensors by their Hugging Face names; a tensor of another shape is an error."""

    reduce: Reduce | None  # sums the partial output of a row-parallel layer over all ranks; None: there is one

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a whole tensor, in the model's dtype by default."""
        ...

    def weight(self, name: str, outputs: Parts, inputs: int, split: Split) -> Weight:
        """Return a matrix, or this rank's part of it: its share of each projection that is stored in it."""
        ...


class RecordingTake:
    """Gives tensors without memory, and records what was asked for: a model's names and shapes without its weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.reduce: Reduce | None = None
        self._dtype = dtype

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Record a tensor."""
        self.shapes[name] = shape
        return torch.empty(shape, dtype=dtype or self._dtype, device="meta")

    def weight(self, name: str, outputs: Parts, inputs: int, split: Split) -> Weight:
        """Record a matrix."""
        return Dense(self.tensor(name, total(outputs), inputs))


def total(outputs: Parts) -> int:
    """Return the outputs of all projections."""
    return outputs if isinstance(outputs, int) else sum(outputs)


def column_linear(
    take: Take, prefix: str, outputs: Mapping[str, Parts], inputs: int, *, bias: bool = False, **around: Any
) -> Linear:
    """Return several projections of one input as one layer: ranks have a part of the outputs of each.

    `around` is what Linear computes beside the product: the norm before it, the gate behind it.
    """
    first, *rest = (
        take.weight(f"{prefix}{name}.weight", count, inputs, Split.OUTPUTS) for name, count in outputs.items()
    )
    biases = [take.tensor(f"{prefix}{name}.bias", total(count)) for name, count in outputs.items()] if bias else []
    return Linear(first.join(rest), torch.cat(biases) if bias else None, **around)


def row_linear(
    take: Take, name: str, outputs: int, inputs: int, *, bias: bool = False, output_norm: Norm | None = None
) -> Linear:
    """Return a layer that adds to the residual stream: ranks have a part of the inputs, and sum what they get."""
    weight = take.weight(f"{name}.weight", outputs, inputs, Split.INPUTS)
    own = take.tensor(f"{name}.bias", outputs) if bias else None
    return Linear(weight, own, output_norm=output_norm, reduce=take.reduce)
