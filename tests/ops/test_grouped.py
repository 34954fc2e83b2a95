"""Quantized weights against their numbers in plain torch: on the GPU, or in Triton's interpreter without one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from chairlift.ops.codes import Code, pack, unpack
from chairlift.ops.fp8 import DTYPE, Fp8, quantize_rows_reference
from chairlift.ops.grouped import Grouped
from chairlift.ops.linear import Linear
from chairlift.ops.norm import Norm
from chairlift.ops.weight import GELU_TANH, SILU, Fused, Gate, Mixed, MixedProduct, Product, join_weights
from mostly_long import mostly_long

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32] if DEVICE.type == "cpu" else [torch.float32, torch.bfloat16, torch.float16]
NEAR = {torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 8e-3}  # of the largest value


def make(code: Code, outputs: int, inputs: int, group: int, zeros: bool, dtype: torch.dtype) -> Grouped:
    """Draw codes, scales and zeros; the dtype of scales is the model's."""
    torch.manual_seed(outputs + inputs + group)
    scales = (torch.rand(outputs, inputs // group) + 0.5) / 16
    if code is Code.FP8:
        codes = torch.randn(outputs, inputs).to(DTYPE).view(torch.int8)
    elif code is Code.INT8:
        codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    else:
        codes = pack(torch.randint(0, 16, (outputs, inputs)))
    low, high = (0, 16) if code is Code.INT4 else (-20, 20)
    middle = torch.randint(low, high, scales.shape).to(DEVICE, dtype) if zeros else None
    return Grouped(code, codes.to(DEVICE), scales.to(DEVICE, dtype), middle, dtype)


def close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    assert got.dtype == dtype and torch.isfinite(got).all()
    return bool((got.double() - expected.double()).abs().max() / expected.double().abs().max() < NEAR[dtype])


KINDS = pytest.mark.parametrize(
    ("code", "zeros"),
    [
        (Code.INT4, False),
        (Code.INT4, True),
        (Code.INT8, False),
        (Code.INT8, True),
        (Code.FP8, False),
        (Code.FP4, False),
    ],
    ids=["int4", "int4 zeros", "int8", "int8 zeros", "fp8", "fp4"],
)


def test_4_bit_codes_keep_their_places() -> None:
    codes = torch.randint(0, 16, (3, 96))
    assert torch.equal(unpack(pack(codes)), codes.int())
    words = pack(torch.arange(32).view(1, 32) % 16)[0].to(torch.int32) & 0xFFFF
    assert [int(words[5]) >> 4 * i & 15 for i in range(4)] == [5, 13, 21 % 16, 29 % 16]


@KINDS
def test_numbers_are_codes_minus_zeros_times_scales(code: Code, zeros: bool) -> None:
    weight = make(code, 6, 96, 32, zeros, torch.float32)
    for row, column in ((0, 0), (3, 40), (5, 95)):
        if code is Code.INT4:
            number = float(unpack(weight.codes)[row, column]) - (0 if zeros else 8)
        elif code is Code.FP4:
            bits = int(unpack(weight.codes)[row, column])
            exponent, half = bits >> 1 & 3, bits & 1
            number = half / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + half / 2)
            number = -number if bits & 8 else number
        elif code is Code.INT8:
            number = float(weight.codes[row, column])
        else:
            number = float(weight.codes.view(DTYPE)[row, column].float())
        if weight.zeros is not None:
            number -= float(weight.zeros[row, column // 32])
        assert float(weight.numbers()[row, column]) == pytest.approx(number * float(weight.scales[row, column // 32]))


@KINDS
@pytest.mark.parametrize("group", [32, 64, 192], ids=["32", "64", "whole rows"])
def test_parts_of_a_weight_have_the_numbers_of_the_whole(code: Code, zeros: bool, group: int) -> None:
    weight = make(code, 8, 192, group, zeros, torch.float32)
    whole = weight.numbers()
    assert torch.equal(weight.rows(2, 5).numbers(), whole[2:5])
    assert torch.equal(weight.columns(64, 192).numbers(), whole[:, 64:])
    assert torch.equal(weight.rows(0, 3).join([weight.rows(3, 8)]).numbers(), whole)
    assert torch.equal(weight.pad(10).numbers(), F.pad(whole, (0, 0, 0, 2)))
    ids = torch.tensor([[7, 0], [3, 3]], device=DEVICE)
    assert torch.equal(weight.lookup(ids), whole[ids])
    assert weight.rows(0, 4).nbytes * 2 == weight.nbytes
    meta = Grouped.outline(code, 8, 192, group, torch.float32, torch.float32, zeros=zeros)
    assert (meta.shape, meta.nbytes, meta.group) == (weight.shape, weight.nbytes, weight.group)


def test_weights_of_different_formats_are_joined_as_they_are() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 128, device=DEVICE)
    some = [
        make(Code.INT4, 4, 128, 32, False, torch.float32),
        make(Code.INT4, 6, 128, 64, False, torch.float32),
        make(Code.INT8, 2, 128, 64, True, torch.float32),
    ]
    joined = join_weights(some)
    assert isinstance(joined, Mixed) and joined.nbytes == sum(each.nbytes for each in some)
    assert torch.equal(joined.multiply(x), torch.cat([each.multiply(x) for each in some], 1))
    assert isinstance(join_weights([some[0], some[0]]), Grouped)
    fused = Fused(Norm(torch.rand(128, device=DEVICE), 1e-6), torch.randn(12, device=DEVICE), SILU)
    assert isinstance(joined.prepare(fused), MixedProduct)
    layer = Linear(joined, fused.bias, norm=fused.norm, gate=SILU)
    expected = Product(joined, fused)(x) + 1
    error = (layer(x, torch.ones(2, 6, device=DEVICE)) - expected).norm() / expected.norm()
    assert error < (0.1 if DEVICE.type == "cpu" else 1e-4), "a CPU rounds the inputs to 8 bits"


def test_rows_are_quantized_to_their_own_largest_number() -> None:
    x = torch.randn(5, 64) * 10 ** torch.linspace(-4, 4, 5).unsqueeze(1)
    codes, scales = quantize_rows_reference(x)
    assert (codes.float().abs().amax(1) == 448).all()
    assert ((codes.float() * scales - x).abs() <= torch.maximum(x.abs() / 16, scales / 2**9)).all()


# ---- the kernels


def check(
    rows: int, weight: Grouped, dtype: torch.dtype, *, normed: bool, biased: bool, gate: Gate | None, added: bool
) -> None:
    from chairlift.ops import grouped_cuda

    outputs, inputs = weight.shape

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).to(dtype)

    fused = Fused(Norm(draw(inputs), 1e-6) if normed else None, draw(outputs) if biased else None, gate)
    x, residual = draw(rows, inputs) * 10, draw(rows, outputs // 2 if gate else outputs) if added else None
    wide = Fused(
        None if fused.norm is None else Norm(fused.norm.weight.double(), 1e-6),
        None if fused.bias is None else fused.bias.double(),
        gate,
    )
    exact = Product(weight, wide)(x.double(), None if residual is None else residual.double())
    got = grouped_cuda.linear(
        x, weight, fused.bias, fused.norm and fused.norm.weight, 1e-6, gate and (gate.linear, gate.cubic), residual
    )
    assert residual is None or got is residual
    assert close(got, exact, dtype)


KERNELS = pytest.importorskip("triton") and pytest.mark.parametrize("dtype", DTYPES, ids=str)


@KERNELS
@pytest.mark.parametrize("group", mostly_long([32, 128, 64, 256], 2), ids=["32", "128", "64", "whole rows"])
@pytest.mark.parametrize("rows", [1, 3])
@KINDS
def test_few_rows_match(code: Code, zeros: bool, rows: int, group: int, dtype: torch.dtype) -> None:
    weight = make(code, 18, 256, group, zeros, dtype)
    check(rows, weight, dtype, normed=True, biased=False, gate=None, added=True)


@KERNELS
@pytest.mark.parametrize("gate", mostly_long([SILU, None, GELU_TANH]), ids=["silu", "plain", "gelu"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("code", [Code.INT4, Code.FP8, Code.FP4])
@pytest.mark.parametrize("rows", [1, 9])
def test_all_fused_operations_match(rows: int, code: Code, normed: bool, gate: Gate | None, dtype: torch.dtype) -> None:
    weight = make(code, 18, 256, 128, False, dtype)
    check(rows, weight, dtype, normed=normed, biased=True, gate=gate, added=gate is not None)


@KERNELS
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("code", [Code.INT4, Code.INT8])
def test_several_iterations_and_inputs_that_do_not_fill_the_last_match(
    code: Code, rows: int, dtype: torch.dtype
) -> None:
    weight = make(code, 6, 4096 + 512 + 32, 32, True, dtype)
    check(rows, weight, dtype, normed=True, biased=True, gate=None, added=False)


@KERNELS
@pytest.mark.parametrize("group", mostly_long([128, 32, 512]), ids=["128", "32", "whole rows"])
@KINDS
def test_more_rows_match_and_so_does_the_dense_matrix(code: Code, zeros: bool, group: int, dtype: torch.dtype) -> None:
    from chairlift.ops import grouped_cuda

    weight = make(code, 50, 512, group, zeros, dtype)
    x, bias = torch.randn(40, 512, device=DEVICE).to(dtype), torch.randn(50, device=DEVICE).to(dtype)
    exact = F.linear(x.double(), weight.numbers().double(), bias.double())
    assert close(grouped_cuda.multiply(x, weight, bias), exact, dtype)
    assert torch.equal(grouped_cuda.dense(weight, dtype), weight.numbers().to(dtype))


@KERNELS
@pytest.mark.parametrize("normed", [False, True])
def test_rows_are_quantized_after_their_norm(normed: bool, dtype: torch.dtype) -> None:
    from chairlift.ops import fused_cuda

    x = (torch.randn(3, 96, device=DEVICE) * 30).to(dtype)
    norm = Norm(torch.randn(96, device=DEVICE).to(dtype), 1e-6) if normed else None
    codes, scales = fused_cuda.quantize_rows(x, norm and norm.weight, 1e-6)
    expected, steps = quantize_rows_reference(x, norm)
    assert torch.allclose(scales, steps, rtol=1e-2 if dtype == torch.bfloat16 else 1e-3)
    step = torch.maximum(expected.float().abs() / 8, torch.full_like(steps, 2**-9))
    assert ((codes.float() - expected.float()).abs() <= step).all(), "at most one code away, where rounding differs"


@pytest.mark.skipif(DEVICE.type == "cpu", reason="torch's products in 8 bits need a GPU")
@pytest.mark.parametrize("rows", [17, 256])
def test_many_rows_in_8_bits_are_near(rows: int) -> None:
    plain = make(Code.FP8, 96, 256, 256, False, torch.bfloat16)
    weight = Fp8(Code.FP8, plain.codes, plain.scales.float(), None, torch.bfloat16)
    norm = Norm(torch.randn(256, device=DEVICE).bfloat16(), 1e-6)
    x = torch.randn(rows, 256, device=DEVICE).bfloat16()
    for fused in (Fused(), Fused(norm, torch.randn(96, device=DEVICE).bfloat16(), SILU)):
        got, exact = weight.prepare(fused)(x), Product(weight, fused)(x)
        away = (got.float() - exact.float()).square().mean().sqrt() / exact.float().square().mean().sqrt()
        assert away < 0.04, "rows in e4m3 have errors of 3% of their numbers"
