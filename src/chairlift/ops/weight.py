"""Weights: a matrix [out, in] that can multiply, concatenate, slice and size itself. A storage format is one class.

`Weight` is the matrix as loaded; `Product` is the matrix on its device with the norm, bias and gate of its linear
layer. A format must define a Weight; Product has a default that runs anywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F

from chairlift.ops.norm import Norm, rms_norm
from chairlift.ops.packed import gate_halves
from chairlift.ops.triton_found import HAS_TRITON


@dataclass(frozen=True, slots=True)
class Gate:
    """An activation g * sigmoid(g * (linear + cubic * g^2)), which covers SiLU and the tanh version of GELU."""

    linear: float = 1.0
    cubic: float = 0.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the activation in plain torch."""
        return F.gelu(x, approximate="tanh") if self.cubic else F.silu(x)


SILU = Gate()
GELU_TANH = Gate(1.5957691216057308, 0.07135481282050026)  # 2 * sqrt(2 / pi), and 0.044715 of it


@dataclass(frozen=True, slots=True)
class Fused:
    """The operations that a linear layer fuses with its product, where possible in one kernel."""

    norm: Norm | None = None  # applied to the input
    bias: torch.Tensor | None = None
    gate: Gate | None = None  # the weight's rows are [gate; up]; the output is gate(first half) * second half


class Weight(ABC):
    """A matrix in its storage format."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that one product reads."""

    @property
    def format(self) -> str:
        """The format's name for users."""
        return type(self).__name__

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device that the matrix is on."""

    @abstractmethod
    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ W^T."""

    def can_join(self, other: Weight) -> bool:
        """Whether `join` takes the other weight: it has the same format."""
        return type(self) is type(other)

    @abstractmethod
    def join(self, others: Sequence[Self]) -> Self:
        """Concatenate the outputs of this weight and the others."""

    @abstractmethod
    def rows(self, first: int, last: int) -> Self:
        """Return outputs first..last."""

    @abstractmethod
    def columns(self, first: int, last: int) -> Self:
        """Return inputs first..last."""

    @abstractmethod
    def pad(self, outputs: int) -> Self:
        """Return the matrix with rows of zeros after its own, `outputs` rows in all."""

    @abstractmethod
    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Return some rows in the model's dtype, as an embedding does."""

    def prepare(self, fused: Fused) -> Product:
        """Return the product that a linear layer runs."""
        return Product(self, fused)


class Mixed(Weight):
    """Matrices of several formats with the same inputs, one above the other."""

    def __init__(self, parts: Sequence[Weight]) -> None:
        self.parts = tuple(parts)

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads."""
        return sum(part.nbytes for part in self.parts)

    @property
    def device(self) -> torch.device:
        """The device that the matrices are on."""
        return self.parts[0].device

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ W^T."""
        return torch.cat([part.multiply(x) for part in self.parts], dim=-1)

    def join(self, others: Sequence[Mixed]) -> Mixed:
        """Concatenate the outputs of this weight and the others."""
        return Mixed([part for weight in (self, *others) for part in weight.parts])

    def rows(self, first: int, last: int) -> Mixed:
        """Return outputs first..last."""
        kept, begin = [], 0
        for part in self.parts:
            end = begin + part.shape[0]
            if max(first, begin) < min(last, end):
                kept.append(part.rows(max(first, begin) - begin, min(last, end) - begin))
            begin = end
        return Mixed(kept)

    def columns(self, first: int, last: int) -> Mixed:
        """Return inputs first..last."""
        return Mixed([part.columns(first, last) for part in self.parts])

    def pad(self, outputs: int) -> Mixed:
        """Return the matrices with rows of zeros after the last, `outputs` rows in all."""
        *before, last = self.parts
        return Mixed([*before, last.pad(outputs - sum(part.shape[0] for part in before))])

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Return some rows, each from the matrix that has it."""
        found, begin = self.parts[0].lookup(ids.clamp(max=self.parts[0].shape[0] - 1)), self.parts[0].shape[0]
        for part in self.parts[1:]:
            own = part.lookup((ids - begin).clamp(0, part.shape[0] - 1))
            found = torch.where((ids >= begin)[..., None], own, found)
            begin += part.shape[0]
        return found

    def prepare(self, fused: Fused) -> Product:
        """Return the product that a linear layer runs: each part with its own kernels, if these are compiled ones."""
        if self.device.type == "meta":
            return Product(self, fused)
        products, first = [], 0
        for part in self.parts:
            last = first + part.shape[0]
            products.append(part.prepare(Fused(fused.norm, None if fused.bias is None else fused.bias[first:last])))
            first = last
        if self.device.type == "cuda" or all(product.is_compiled for product in products):
            return MixedProduct(products, fused)
        return Product(self, fused)


def join_weights(weights: Sequence[Weight]) -> Weight:
    """Concatenate the outputs of weights: in their own format if it is one, else as a Mixed of their formats."""
    parts: list[list[Weight]] = []
    for weight in weights:
        if parts and parts[-1][0].can_join(weight):
            parts[-1].append(weight)
        else:
            parts.append([weight])
    joined = [first.join(rest) for first, *rest in parts]
    return joined[0] if len(joined) == 1 else Mixed(joined)


class Product:
    """A weight with its fused operations, run one after the other."""

    is_compiled = False  # whether it takes and returns NumPy arrays

    def __init__(self, weight: Weight, fused: Fused) -> None:
        self.weight = weight
        self.fused = fused

    @property
    def formats(self) -> dict[str, int]:
        """Bytes that one call reads, by format."""
        return {self.weight.format: self.weight.nbytes}

    @property
    def nbytes(self) -> int:
        """Bytes that one call reads."""
        return sum(self.formats.values())

    def __call__(self, x: Any, add_to: Any = None) -> Any:
        """Return the output; with `add_to`, add the output there in place and return that."""
        fused = self.fused
        y = self.weight.multiply(x if fused.norm is None else rms_norm(x, fused.norm))
        if fused.bias is not None:
            y = y + fused.bias
        if fused.gate is not None:
            y = gate_mul(y, fused.gate)
        return y if add_to is None else add_to.add_(y)

    def into(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the output to `out`."""
        return out.copy_(self(x))


class MixedProduct(Product):
    """The products of several formats, side by side."""

    def __init__(self, products: Sequence[Product], fused: Fused) -> None:
        self.products, self.fused = products, fused
        self.is_compiled = all(product.is_compiled for product in products)

    @property
    def formats(self) -> dict[str, int]:
        """Bytes that one call reads, by format."""
        return sum((Counter(product.formats) for product in self.products), Counter())

    def __call__(self, x: Any, add_to: Any = None) -> Any:
        """Return the output; with `add_to`, add the output there in place and return that."""
        parts, gate = [product(x) for product in self.products], self.fused.gate
        y: Any = np.concatenate(parts, axis=1) if self.is_compiled else torch.cat(parts, dim=-1)
        if gate is not None:
            y = _gate_compiled(y, gate) if self.is_compiled else gate_mul(y, gate)
        if add_to is None:
            return y
        add_to += y
        return add_to


def _gate_compiled(y: np.ndarray, gate: Gate) -> np.ndarray:
    """Compute gate_mul on a CPU. The bits of torch's activations depend on how it divides the work among threads."""
    out = np.empty((len(y), y.shape[1] // 2), np.float32)
    gate_halves(torch.get_num_threads(), y, out, (gate.linear, gate.cubic))
    return out


def gate_mul(y: torch.Tensor, gate: Gate) -> torch.Tensor:
    """Return gate(first half of the columns) times the second half."""
    if y.is_cuda and HAS_TRITON:
        from chairlift.ops import fused_cuda

        return fused_cuda.gate_mul(y, gate.linear, gate.cubic)
    return gate_mul_reference(y, gate)


def gate_mul_reference(y: torch.Tensor, gate: Gate) -> torch.Tensor:
    """Compute gate_mul in plain torch."""
    first, second = y.chunk(2, dim=-1)
    return gate(first) * second
