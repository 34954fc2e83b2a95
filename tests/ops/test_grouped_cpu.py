"""Integer codes on a CPU: equal to integer sums by group, near the numbers' product, whatever the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from chairlift.ops import dot
from chairlift.ops.codes import Code, pack, unpack
from chairlift.ops.grouped import Grouped
from chairlift.ops.linear import Linear
from chairlift.ops.norm import Norm
from chairlift.ops.panel_product import PanelProduct
from chairlift.ops.panels import PANEL
from chairlift.ops.quantized import quantize_reference
from chairlift.ops.weight import SILU, Fused, Product, join_weights
from mostly_long import mostly_long

# The formats of the checkpoints that are common: AWQ, GPTQ, W4A16, W8A16, W8A8, and what --quantization makes.
KINDS = {
    "awq": (Code.INT4, 128, True, torch.float16),
    "gptq 4": (Code.INT4, 128, False, torch.float16),
    "gptq 8": (Code.INT8, 32, True, torch.float16),
    "w4a16": (Code.INT4, 64, False, torch.bfloat16),
    "w8a16": (Code.INT8, 64, True, torch.bfloat16),
    "mxfp4": (Code.FP4, 32, False, torch.bfloat16),
    "w8a8": (Code.INT8, 576, False, torch.float32),
    "int4": (Code.INT4, 128, False, torch.float32),
    "int8": (Code.INT8, 128, False, torch.float32),
}
EACH = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, outputs: int, inputs: int = 0, seed: int = 0) -> Grouped:
    """Draw codes, scales and zeros."""
    code, group, has_zeros, scale = KINDS[kind]
    generator, inputs = torch.Generator().manual_seed(seed), inputs or max(group, 512)
    least, most = (0, 16) if code.bits == 4 else (-128, 128)
    codes = torch.randint(least, most, (outputs, inputs), generator=generator)
    scales = ((torch.rand(outputs, inputs // group, generator=generator) + 0.5) / 64).to(scale)
    if code is Code.FP4:
        scales = torch.exp2(torch.randint(-9, -5, scales.shape, generator=generator)).to(scale)
    zeros = torch.randint(least, most, scales.shape, generator=generator).to(scale) if has_zeros else None
    return Grouped(code, pack(codes) if code.bits == 4 else codes.to(torch.int8), scales, zeros, torch.float32)


def integer_product(weight: Grouped, x: torch.Tensor) -> torch.Tensor:
    """Quantize the inputs as the kernel does, sum integers of 32 inputs, and add these in order, in plain torch."""
    (outputs, inputs), size = weight.shape, 32
    quantized, steps = (torch.from_numpy(each) for each in quantize_reference(x.numpy(), size))
    codes = (unpack(weight.codes) if weight.code is Code.INT4 else weight.codes).long()
    if weight.code is Code.FP4:
        codes = (weight.numbers() / weight.scales.float().repeat_interleave(weight.group, 1) * 2).long()
    if weight.zeros is not None:
        middle = weight.zeros.long().repeat_interleave(weight.group, 1)
    else:
        middle = torch.full((1, inputs), 8 if weight.code is Code.INT4 else 0)
    scales = weight.scales.float().repeat_interleave(weight.group // size, 1)
    scales = scales / 2 if weight.code is Code.FP4 else scales
    total = torch.zeros(len(x), outputs)
    for i in range(inputs // size):
        part = slice(i * size, (i + 1) * size)
        whole = quantized[:, part].long() @ (codes - middle)[:, part].T
        total = (total.double() + (whole.float() * steps[:, i : i + 1]).double() * scales[:, i].double()).float()
    return total


@EACH
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 40])
def test_a_product_equals_the_integer_reference(kind: str, rows: int) -> None:
    weight = make(kind, 75)
    x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(rows))
    layer = Linear(weight)
    assert layer.is_compiled
    got, expected = layer(x), integer_product(weight, x)
    assert (got - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert (got == expected).float().mean() > 0.99  # a float64 sum rounds like a fused multiply-add, almost always


@EACH
def test_a_product_is_near_that_of_the_numbers(kind: str) -> None:
    weight = make(kind, 64)
    x = torch.randn(9, weight.shape[1])
    exact = x.double() @ weight.numbers().double().T
    assert (Linear(weight)(x) - exact).norm() < 0.01 * exact.norm()


@EACH
def test_a_row_has_the_same_bits_alone_and_in_any_batch(kind: str) -> None:
    weight = make(kind, 100)
    layer, x = Linear(weight, norm=Norm(torch.randn(weight.shape[1]), 1e-5)), torch.randn(70, weight.shape[1])
    whole = layer(x)
    for rows in (1, 2, 5, 8, 13):
        assert torch.equal(layer(x[:rows]), whole[:rows])
        assert torch.equal(layer(x[-rows:]), whole[-rows:])


@pytest.mark.parametrize("kind", mostly_long(KINDS))
def test_machines_without_byte_products_compute_the_same_bits(kind: str) -> None:
    weight = make(kind, 64)
    layer, x = weight.prepare(Fused()), torch.randn(11, weight.shape[1]).numpy()
    assert isinstance(layer, PanelProduct)
    fast = layer(x)
    layer._tile = dot.compile_tile(layer._layout, "plain")
    assert np.array_equal(layer(x), fast)


@pytest.mark.parametrize("kind", ["awq", "w8a8"])
def test_norm_bias_gate_and_residual_match_plain_torch(kind: str) -> None:
    weight = make(kind, 90)
    x, bias = torch.randn(7, weight.shape[1]), torch.randn(90)
    norm, residual = Norm(torch.rand(weight.shape[1]) + 0.5, 1e-5), torch.randn(7, 90)
    for fused, added in (
        (Fused(bias=bias), None),
        (Fused(norm), None),
        (Fused(norm, gate=SILU), None),
        (Fused(bias=bias), residual),
    ):
        exact = Product(weight, fused)(x, None if added is None else added.clone())
        got = Linear(weight, fused.bias, norm=fused.norm, gate=fused.gate)(x, None if added is None else added.clone())
        assert got.shape == exact.shape and (got - exact).norm() < 0.02 * exact.norm()


def test_projections_of_several_groups_are_one_compiled_layer() -> None:
    weights = [make("awq", 48, 512, 1), make("gptq 4", 16, 512, 2), make("gptq 4", 16, 512, 3)]
    joined = join_weights(weights)
    layer, x = Linear(joined), torch.randn(5, 512)
    assert layer.is_compiled
    assert torch.equal(layer(x), torch.cat([Linear(weight)(x) for weight in weights], 1))


def test_layers_that_integers_cannot_multiply_use_the_numbers() -> None:
    odd = Grouped(Code.INT8, torch.randint(-128, 128, (6, 40), dtype=torch.int8), torch.rand(6, 1), None, torch.float32)
    half = make("awq", 6)
    half.dtype = torch.bfloat16
    for weight in (odd, half):
        x = torch.randn(3, weight.shape[1], dtype=weight.dtype)
        expected = x.float() @ weight.numbers().T
        assert torch.allclose(Linear(weight)(x).float(), expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


@EACH
def test_packed_codes_take_the_bytes_of_the_checkpoint(kind: str) -> None:
    weight = make(kind, 4 * PANEL)
    repeated = 1.06 if weight.group > 128 else 1.0  # each 64 or 128 inputs have their scale again
    assert weight.prepare(Fused()).nbytes <= repeated * weight.nbytes
