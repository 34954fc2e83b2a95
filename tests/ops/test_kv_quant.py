"""Keys and values in 8 bits: accuracy, equal bytes from every writer, equal results of every reader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pages import CPU, PIECES, Pages

from chairlift.ops.attention import paged_attention, paged_attention_reference
from chairlift.ops.batch import Batch, HostBatch
from chairlift.ops.kv_cache import KvCache, bytes_per_token, write_kv_reference
from chairlift.ops.kv_quant import KV_DTYPES, dequantize_reference, quantize_reference
from chairlift.ops.rotate import rotate_and_store

SHAPES = [
    (4, 4, 32),
    pytest.param(2, 2, 80, marks=pytest.mark.long),
    *(pytest.param(*shape, marks=pytest.mark.long) for shape in ((9, 3, 64), (8, 1, 128))),
]
NARROW = pytest.mark.parametrize("dtype", KV_DTYPES.values(), ids=KV_DTYPES.keys())
# Largest error of attention over 8 bits, as a share of the root mean square of the exact result.
NEAR = {torch.int8: 0.02, torch.float8_e4m3fn: 0.06}


def away(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def test_the_error_of_a_number_is_at_most_half_a_step_of_its_code() -> None:
    x = torch.randn(500, 64) * 10 ** torch.linspace(-6, 5, 500).unsqueeze(1)
    largest = x.abs().amax(-1, keepdim=True)
    whole, small = (dequantize_reference(*unfold(x, dtype), dtype) for dtype in KV_DTYPES.values())
    assert ((whole - x).abs() <= largest / 127 * 0.505).all(), "half a step, plus 1% for a scale that is rounded up"
    assert ((small - x).abs() <= torch.maximum(x.abs() / 15.9, largest / 448 / 2**9)).all(), (
        "half a step of a 3-bit mantissa, or the smallest step"
    )


def unfold(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = quantize_reference(x, dtype)
    return codes, scales.unsqueeze(-1)


@NARROW
def test_the_largest_number_is_never_clipped_and_zeros_stay_zeros(dtype: torch.dtype) -> None:
    x = torch.rand(100_000, 1) + 1e-3
    codes, scales = quantize_reference(x, dtype)
    assert (codes.view(dtype).float().abs() <= {torch.int8: 127, torch.float8_e4m3fn: 448}[dtype]).all()
    assert (dequantize_reference(codes, scales.unsqueeze(-1), dtype) / x - 1).abs().max() < 1 / 16
    assert not dequantize_reference(*unfold(torch.zeros(3, 8), dtype), dtype).any()


@NARROW
def test_unwritten_blocks_are_zeros(dtype: torch.dtype) -> None:
    cache = KvCache(1, 3, 2, 32, 16, dtype, CPU, compiled=False)
    every = torch.arange(3)
    assert not cache.keys(0, every).any()
    assert not cache.values(0, every).any()


@pytest.mark.parametrize("dim", [pytest.param(24, marks=pytest.mark.long), 64, 80])
@NARROW
def test_the_compiled_writer_writes_the_bytes_of_the_reference(dtype: torch.dtype, dim: int) -> None:
    qkv = torch.randn(40, 4 + 2 + 2, dim) * 10 ** torch.linspace(-3, 3, 40).view(-1, 1, 1)
    qkv[7] = 0
    qkv[9], qkv[9, :, 0] = -102.81249237060547, 111  # x / scale is just above -117.5, x * (1 / scale) is not
    slots, nothing = np.random.permutation(8 * 16)[:40], np.empty(0, np.int32)
    batch = Batch.on(CPU, HostBatch(np.zeros(40, np.int64), slots, nothing, nothing, nothing))
    cache, expected = (KvCache(2, 8, 2, dim, 16, dtype, CPU, compiled=True) for _ in range(2))
    still = (
        np.ones((1, dim // 2), np.float32),
        np.zeros((1, dim // 2), np.float32),
    )  # no rotation: its last bit may differ
    rotate_and_store(qkv.numpy(), cache, 1, batch, still, None, 1e-6)
    write_kv_reference(expected, 1, qkv, batch)
    assert torch.equal(cache.data, expected.data)
    assert not cache.data[0].any(), "another layer's blocks are unchanged"


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@NARROW
def test_compiled_attention_matches_the_reference(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, pieces: list[tuple[int, int]], window: int
) -> None:
    pages = Pages(pieces, heads, kv_heads, dim, dtype=dtype)
    expected = pages.attend(window, paged_attention_reference)
    assert (pages.attend(window) - expected).abs().max() < 3e-6
    assert away(expected, pages.dense(window)) < NEAR[dtype]


@pytest.mark.parametrize(("dim", "block_size"), [(32, 32), (32, 48), (24, 16)])
@NARROW
def test_larger_blocks_and_head_sizes_without_a_tile_work_too(dtype: torch.dtype, dim: int, block_size: int) -> None:
    pages = Pages(PIECES["all mixed"], 4, 2, dim, block_size, dtype)
    assert (pages.attend() - pages.attend(attend=paged_attention_reference)).abs().max() < 3e-6
    assert away(pages.attend(), pages.dense(0)) < NEAR[dtype]


@pytest.mark.parametrize("attend", [paged_attention, paged_attention_reference], ids=["compiled", "reference"])
@NARROW
def test_every_token_has_its_own_scale(dtype: torch.dtype, attend: Any) -> None:
    pages = Pages([(100, 1), (0, 40)], 4, 2, 64, dtype=dtype, sizes=100.0)
    pages.q /= 100  # small scores, since errors grow with them
    assert away(pages.attend(attend=attend), pages.dense(0)) < NEAR[dtype]
    scales = pages.cache.scales
    assert scales is not None
    before = pages.attend(attend=attend)
    scales[:, :, 1] *= 2
    assert torch.equal(pages.attend(attend=attend), 2 * before), "doubled scales of values double the result"
    scales[:, :, 0] = 0
    mean = 2 * pages.values[0].double().mean(0).repeat_interleave(2, dim=0)
    assert away(pages.attend(attend=attend)[0], mean) < NEAR[dtype], "with keys of 0 every token has equal weight"


@NARROW
def test_a_token_has_the_same_bits_in_any_chunk_and_any_batch(dtype: torch.dtype) -> None:
    pages = Pages([(0, 60), (90, 1)], 6, 3, 64, dtype=dtype)
    whole, every = pages.attend(), pages.q
    for first, last in ((0, 1), (0, 16), (17, 23), (59, 60)):
        pages.batch = pages.of(np.arange(first, last), [0, last - first], [last], pages.batch.host.tables[:1])
        pages.q = every[first:last]
        assert torch.equal(pages.attend(), whole[first:last])


@pytest.mark.parametrize("model", [torch.bfloat16, torch.float16])
@NARROW
def test_the_reference_serves_models_of_16_bits(dtype: torch.dtype, model: torch.dtype) -> None:
    pages = Pages(PIECES["all mixed"], 4, 2, 32, dtype=dtype)
    expected = pages.attend(attend=paged_attention_reference)
    pages.q = pages.q.to(model)
    assert away(pages.attend(attend=paged_attention_reference), expected) < 0.01


@NARROW
def test_a_copied_block_includes_its_scales(dtype: torch.dtype) -> None:
    pages = Pages([(30, 2)], 4, 2, 32, dtype=dtype)
    cache, table = pages.cache, pages.batch.tables[0].long()
    others = torch.tensor([i for i in range(cache.blocks) if i not in table.tolist()])[: len(table)]
    before = cache.values(1, table)
    cache.copy(list(zip(table.tolist(), others.tolist(), strict=True)))
    assert torch.equal(cache.values(1, others), before)


@NARROW
def test_a_token_takes_one_byte_per_element_and_two_per_scale(dtype: torch.dtype) -> None:
    cache = KvCache(3, 5, 2, 64, 16, dtype, CPU, compiled=False)
    assert bytes_per_token(3, 2, 64, dtype) == 2 * 3 * 2 * (64 + 2) == cache.data.nbytes // (5 * 16)
    assert bytes_per_token(3, 2, 64, torch.bfloat16) / bytes_per_token(3, 2, 64, dtype) == pytest.approx(1.94, abs=0.01)
