"""The kernels of few rows against plain torch: on the GPU, or in Triton's interpreter without one."""

from __future__ import annotations

import pytest
import torch

from mostly_long import mostly_long

pytest.importorskip("triton")

from chairlift.ops import skinny_cuda
from chairlift.ops.dense import linear_reference
from chairlift.ops.norm import Norm
from chairlift.ops.weight import GELU_TANH, SILU, Gate

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEAR = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of the largest value


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    assert torch.isfinite(got).all()
    error = (got.double() - expected.double()).abs().max() / expected.double().abs().max()
    return bool(error < 2 * NEAR[got.dtype])


def check(
    rows: int, width: int, depth: int, dtype: torch.dtype, normed: bool, biased: bool, gate: Gate | None, added: bool
) -> None:
    if DEVICE.type == "cpu" and dtype != torch.float32:
        pytest.skip("the interpreter computes in NumPy, which has no bfloat16 and is slow with float16")

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).to(dtype)

    x, weight = draw(rows, depth) * (10 if normed else 1), draw(width, depth) / 8
    bias = draw(width) if biased else None
    norm = Norm(draw(depth), 1e-6) if normed else None
    residual = draw(rows, width // 2 if gate else width) if added else None
    wide = Norm(norm.weight.double(), norm.eps) if norm else None
    expected = linear_reference(
        x.double(),
        weight.double(),
        None if bias is None else bias.double(),
        wide,
        gate,
        None if residual is None else residual.double(),
    )
    got = skinny_cuda.linear(
        x, weight, bias, norm.weight if norm else None, 1e-6, gate and (gate.linear, gate.cubic), residual
    )
    assert got.dtype == dtype
    assert residual is None or got is residual
    assert close(got, expected)


DTYPES = pytest.mark.parametrize("dtype", NEAR, ids=["f32", "bf16", "f16"])


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize(("width", "depth"), [(50, 96), (130, 80), (64, 1024), (6, 5000)])
@DTYPES
def test_a_plain_product_matches(rows: int, width: int, depth: int, dtype: torch.dtype) -> None:
    check(rows, width, depth, dtype, normed=False, biased=False, gate=None, added=False)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("gate", mostly_long([SILU, None, GELU_TANH]), ids=["silu", "plain", "gelu"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
@DTYPES
def test_all_fused_operations_match(
    rows: int, normed: bool, biased: bool, gate: Gate | None, added: bool, dtype: torch.dtype
) -> None:
    check(rows, 50, 96, dtype, normed, biased, gate, added)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter has only float32, which has other tiles")
@pytest.mark.parametrize("rows", [2, 8, 16])
@pytest.mark.parametrize("depth", [200, 1024])
def test_a_weight_loaded_before_its_input_matches(rows: int, depth: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        check(rows, 2100, depth, dtype, normed=True, biased=True, gate=SILU, added=False)


@DTYPES
def test_many_programs_and_steps_match(dtype: torch.dtype) -> None:
    for rows in (1, 16):
        check(rows, 2 * 25, 5120, dtype, normed=True, biased=True, gate=SILU, added=True)


def test_large_numbers_do_not_overflow_before_the_norm() -> None:
    x, weight = torch.full((2, 64), 3e4, device=DEVICE).half(), torch.eye(64, device=DEVICE).half()
    got = skinny_cuda.linear(x, weight, None, torch.full((64,), 8.0, device=DEVICE).half(), 1e-6, None, None)
    assert (got == 8).all()


def test_a_row_has_the_same_bits_with_any_other_rows() -> None:
    weight, norm = torch.randn(50, 96, device=DEVICE), torch.randn(96, device=DEVICE)
    x = torch.randn(16, 96, device=DEVICE)
    whole = skinny_cuda.linear(x, weight, None, norm, 1e-6, None, None)
    x[2:] = float("nan")
    assert torch.equal(skinny_cuda.linear(x, weight, None, norm, 1e-6, None, None)[:2], whole[:2])
    assert close(skinny_cuda.linear(x[:2], weight, None, norm, 1e-6, None, None), whole[:2])
