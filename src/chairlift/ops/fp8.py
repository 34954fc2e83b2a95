"""8-bit float weights (e4m3) with a scale per output, multiplied by rows that are quantized to 8-bit floats too.

More rows than a fused kernel takes are quantized, each with its own scale, in the kernel of the norm before the layer,
and multiplied by tensor cores in 8 bits: twice the rate of 16. Few rows stay in 16 bits, which costs nothing there,
since reading the weight takes the time. Weights with a scale for each block of 128 x 128 are plain `Grouped`.
"""

from __future__ import annotations

import torch

from chairlift.ops.codes import Code
from chairlift.ops.grouped import Grouped, GroupedProduct
from chairlift.ops.norm import Norm, rms_norm_reference
from chairlift.ops.triton_found import HAS_TRITON
from chairlift.ops.weight import Fused, Product, gate_mul

DTYPE = torch.float8_e4m3fn
_ALIGNED = 16  # sizes of a product in 8 bits are multiples of this


class Fp8(Grouped):
    """A matrix of e4m3 codes with a float32 scale per output, [outputs, 1]."""

    def __init__(
        self, code: Code, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        assert code is Code.FP8 and zeros is None and scales.shape[1] == 1
        super().__init__(code, codes, scales, zeros, dtype)

    def prepare(self, fused: Fused) -> Product:
        """Return the product that a linear layer runs: on a CPU, that of the dense matrix."""
        return self.dense().prepare(fused) if self.device.type == "cpu" else Fp8Product(self, fused)


class Fp8Product(GroupedProduct):
    """The product on a GPU, in 8 bits for many rows."""

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """Run one fused kernel for few rows, else quantize the rows and multiply in 8 bits."""
        from chairlift.ops import grouped_cuda

        fused, weight = self.fused, self.weight
        is_narrow = x.shape[0] <= grouped_cuda.FEW or any(size % _ALIGNED for size in weight.shape)
        if is_narrow or x.dtype != torch.bfloat16 or not x.is_cuda:  # torch's kernels return bfloat16 alone
            return super().__call__(x, add_to)
        codes, scales = quantize_rows(x, fused.norm)
        left = weight.codes.view(DTYPE).t()
        y = torch._scaled_mm(codes, left, scales, weight.scales.t(), fused.bias, out_dtype=x.dtype, use_fast_accum=True)
        if fused.gate is not None:
            y = gate_mul(y, fused.gate)
        return y if add_to is None else add_to.add_(y)


def quantize_rows(x: torch.Tensor, norm: Norm | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the e4m3 codes of x, or of its norm, and float32 scales [rows, 1]: a row's largest number is 448."""
    if x.is_cuda and HAS_TRITON:
        from chairlift.ops import fused_cuda

        return fused_cuda.quantize_rows(x, None if norm is None else norm.weight, 0.0 if norm is None else norm.eps)
    return quantize_rows_reference(x, norm)


def quantize_rows_reference(x: torch.Tensor, norm: Norm | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute quantize_rows in plain torch."""
    wide = (x if norm is None else rms_norm_reference(x, norm.weight, norm.eps)).float()
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / Code.FP8.most
    return (wide / scales).to(DTYPE), scales
