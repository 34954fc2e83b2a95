"""Dense weights: packed in panels for products in float32 on a CPU, plain tensors elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from chairlift.ops.assistant import assistant
from chairlift.ops.compiled import CompiledProduct
from chairlift.ops.norm import Norm, normalize, rms_norm, rms_norm_reference
from chairlift.ops.packed import items_of, multiply, multiply_shared, pack
from chairlift.ops.triton_found import HAS_TRITON
from chairlift.ops.weight import Fused, Gate, Product, Weight, gate_mul, gate_mul_reference
from chairlift.ops.widen import KINDS


def concatenate(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate rows. On the meta device torch.cat is Python code that imports for two seconds at first."""
    first = tensors[0]
    if not first.is_meta:
        return torch.cat(list(tensors))
    return first.new_empty(sum(len(each) for each in tensors), *first.shape[1:])


class Dense(Weight):
    """A matrix in the model's own dtype, or in 16 bits in a float32 model on a CPU."""

    def __init__(
        self, tensor: torch.Tensor, dtype: torch.dtype | None = None, release: Callable[[], None] = lambda: None
    ) -> None:
        self.tensor = tensor
        self.dtype = dtype or tensor.dtype  # the model's
        self._release = release  # gives back the pages of the mapped file that `tensor` is a view of

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""
        return self.tensor.shape[0], self.tensor.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads."""
        return self.tensor.nbytes

    @property
    def device(self) -> torch.device:
        """The device that the matrix is on."""
        return self.tensor.device

    @property
    def format(self) -> str:
        """The format's name for users."""
        return str(self.tensor.dtype).removeprefix("torch.")

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ W^T."""
        return F.linear(x, self.tensor.to(self.dtype))

    def can_join(self, other: Weight) -> bool:
        """Whether the other weight has the same dtypes."""
        return isinstance(other, Dense) and (other.dtype, other.tensor.dtype) == (self.dtype, self.tensor.dtype)

    def join(self, others: Sequence[Dense]) -> Dense:
        """Concatenate the outputs of this weight and the others."""
        if not others:
            return self
        whole = self._like(concatenate([self.tensor, *(other.tensor for other in others)]))
        for each in (self, *others):
            each._release()
        return whole

    def rows(self, first: int, last: int) -> Dense:
        """Return outputs first..last."""
        return self._like(self.tensor[first:last])

    def columns(self, first: int, last: int) -> Dense:
        """Return inputs first..last."""
        return self._like(self.tensor[:, first:last].contiguous())

    def pad(self, outputs: int) -> Dense:
        """Return the matrix with rows of zeros after its own, `outputs` rows in all."""
        missing = outputs - self.tensor.shape[0]
        return self._like(F.pad(self.tensor, (0, 0, 0, missing))) if missing else self

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Return some rows in the model's dtype, as an embedding does."""
        return F.embedding(ids, self.tensor).to(self.dtype)

    def prepare(self, fused: Fused) -> Product:
        """Return the product that a linear layer runs."""
        is_mixed = fused.gate is not None and fused.bias is not None
        if self.device.type == "cpu" and self.dtype == torch.float32 and not is_mixed:
            return PackedProduct(self, fused)
        return DenseProduct(Dense(self.tensor.to(self.dtype)), fused)

    def _like(self, tensor: torch.Tensor) -> Dense:
        return Dense(tensor, self.dtype)


class DenseProduct(Product):
    """The product on a GPU, or in plain torch."""

    weight: Dense

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """Run one fused kernel for few rows on a GPU, else cuBLAS for the product and separate kernels around it."""
        weight, (norm, bias, gate) = self.weight.tensor, (self.fused.norm, self.fused.bias, self.fused.gate)
        if not (x.is_cuda and HAS_TRITON):
            return linear_reference(x, weight, bias, norm, gate, add_to)
        from chairlift.ops import skinny_cuda

        if skinny_cuda.is_faster(x.shape[0], weight.shape[0]):
            scale, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            numbers = None if gate is None else (gate.linear, gate.cubic)
            return skinny_cuda.linear(x, weight, bias, scale, eps, numbers, add_to)
        if norm is not None:
            x = rms_norm(x, norm)
        if add_to is not None and bias is None and gate is None:
            return add_to.addmm_(x, weight.t())
        y = F.linear(x, weight, bias)
        if gate is not None:
            y = gate_mul(y, gate)
        return y if add_to is None else add_to.add_(y)

    def into(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the output to `out`, without a copy."""
        assert self.fused.gate is None
        weight, bias = self.weight.tensor.t(), self.fused.bias
        if self.fused.norm is not None:
            x = rms_norm(x, self.fused.norm)
        return torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)


class PackedProduct(CompiledProduct):
    """The product in float32 on a CPU: one compiled kernel over the packed weight, on NumPy arrays."""

    def __init__(self, weight: Dense, fused: Fused) -> None:
        panels = pack(weight.tensor, fused.gate is not None, weight._release)
        super().__init__(weight.format, panels, weight.shape[0], fused)

    def _multiply(self, x: np.ndarray, normed: np.ndarray, out: np.ndarray, mode: int) -> None:
        rest = self._panels, KINDS[self._format], self._bias, out, mode, self._gate
        if (helper := assistant()) is None:
            multiply(torch.get_num_threads(), x, self._scale, self._eps, normed, *rest)
            return
        if self._scale.size:
            normalize(x, self._scale, self._eps, normed, 0, len(x))
        helper.share(multiply_shared, items_of(x, self._panels, mode), normed, *rest)


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    gate: Gate | None = None,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute a linear layer in plain torch."""
    y = F.linear(x if norm is None else rms_norm_reference(x, norm.weight, norm.eps), weight, bias)
    if gate is not None:
        y = gate_mul_reference(y, gate)
    return y if add_to is None else add_to.add_(y)
