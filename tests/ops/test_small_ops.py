"""Norm, rope, KV writes and the vector exponential against their references."""

import numba
import numpy as np
import pytest
import torch

from chairlift.ops.batch import Batch, HostBatch
from chairlift.ops.kv_cache import KvCache, write_kv, write_kv_reference
from chairlift.ops.norm import rms_norm, rms_norm_reference
from chairlift.ops.rope import rope_, rope_reference
from chairlift.ops.tile import exp

CPU = torch.device("cpu")


def batch(*, positions: torch.Tensor | None = None, slots: torch.Tensor | None = None) -> Batch:
    none = torch.empty(0, dtype=torch.int64)
    chosen = (none if positions is None else positions, none if slots is None else slots, none, none, none)
    return Batch.on(CPU, HostBatch(*(tensor.numpy() for tensor in chosen)))


@pytest.mark.parametrize("shape", [(1, 576), (64, 576), (5, 4, 32), (3, 7)])
def test_rms_norm_matches(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape) * 10, torch.randn(shape[-1])
    exact = rms_norm_reference(x.double(), weight.double(), 1e-6)
    assert (rms_norm(x, weight, 1e-6).double() - exact).abs().max() < 1e-5


def test_rms_norm_of_a_view_matches() -> None:
    x, weight = torch.randn(5, 9, 32), torch.randn(32)
    assert torch.allclose(rms_norm(x[:, 2:6], weight, 1e-6), rms_norm_reference(x[:, 2:6], weight, 1e-6), atol=1e-6)


def test_rope_rotates_the_first_heads_and_leaves_the_rest() -> None:
    x = torch.randn(11, 6, 32)
    angles = torch.randn(100, 16)
    positions = torch.randint(0, 100, (11,))
    expected = rope_reference(x[:, :4], positions, angles.cos(), angles.sin())
    untouched = x[:, 4:].clone()
    rope_(x, 4, batch(positions=positions), angles.cos(), angles.sin())
    assert torch.allclose(x[:, :4], expected, atol=1e-6)
    assert torch.equal(x[:, 4:], untouched)


def test_kv_writes_land_where_the_reference_puts_them() -> None:
    keys, values = torch.randn(20, 3, 32), torch.randn(20, 3, 32)
    slots = torch.randperm(8 * 16)[:20]
    caches = [KvCache(2, 8, 3, 32, 16, torch.float32, CPU) for _ in range(2)]
    qkv = torch.cat([torch.randn(20, 6, 32), keys, values], dim=1)
    write_kv(caches[0], 1, qkv, batch(slots=slots))
    write_kv_reference(caches[1], 1, qkv, batch(slots=slots))
    assert torch.equal(caches[0].data, caches[1].data)
    assert torch.equal(caches[0].keys(1)[slots // 16, :, :, slots % 16], keys)
    assert torch.equal(caches[0].values(1)[slots // 16, :, slots % 16], values)
    assert not caches[0].data[0].any()


def test_copies_read_every_source_before_any_target_is_written() -> None:
    cache = KvCache(2, 4, 1, 16, 16, torch.float32, CPU)
    cache.data.normal_()
    before = cache.data.clone()
    cache.copy([(0, 1), (1, 2)])
    assert torch.equal(cache.data[:, 1], before[:, 0])
    assert torch.equal(cache.data[:, 2], before[:, 1])


@numba.njit
def _exp_all(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(x.size):
        out[i] = exp(x[i])


def test_the_vector_exponential_is_accurate_and_zero_far_below() -> None:
    x = np.linspace(-86, 80, 100_003).astype(np.float32)
    out = np.empty_like(x)
    _exp_all(x, out)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(out / exact - 1).max() < 3e-7 * 80  # the rounding of x * log2(e) grows with x
    near = np.abs(x) < 1
    assert np.abs(out[near] / exact[near] - 1).max() < 3e-7
    low = np.array([-89, -1000, -3e38], np.float32)
    _exp_all(low, out[:3])
    assert (out[:3] == 0).all()
