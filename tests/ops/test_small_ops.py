"""Norm, rope, KV writes and the vector exponential against their references."""

from pathlib import Path

import numba
import numpy as np
import pytest
import torch

from chairlift.ops.batch import Batch, HostBatch
from chairlift.ops.kv_cache import KvCache
from chairlift.ops.norm import normalize, rms_norm_reference
from chairlift.ops.rotate import rope_reference, rotate_and_store
from chairlift.ops.tile import exp

CPU = torch.device("cpu")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the process's memory from /proc")
def test_the_first_block_of_each_layer_takes_little_memory() -> None:
    cache = KvCache(24, 800, 2, 128, 16, torch.float32, CPU)
    before = resident_bytes()
    for layer in cache.arrays:
        layer[0] = 1
    assert resident_bytes() - before < 3 * 24 * cache.arrays[0][0].nbytes < cache.data.nbytes / 100
    assert cache.data[:, 0].min() == 1 and not cache.data[:, 1].any()


def resident_bytes() -> int:
    """Return the bytes of this process's anonymous pages."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("tokens", [1, 20])
def test_queries_and_keys_are_rotated_and_stored_as_in_the_reference(
    tokens: int, norms: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    qkv = torch.randn(tokens, 6 + 3 + 3, 32) * 3
    angles = torch.randn(100, 16)
    places = torch.randint(0, 100, (tokens,)), torch.randperm(8 * 16)[:tokens]
    nothing = np.empty(0, np.int32)
    batch = Batch.on(CPU, HostBatch(places[0].numpy(), places[1].numpy(), nothing, nothing, nothing))
    weights = (torch.randn(32), torch.randn(32)) if norms else None
    results = []
    for compiled in (True, False):
        cache, x = KvCache(2, 8, 3, 32, 16, torch.float32, CPU), qkv.clone()
        given = [x, angles.cos(), angles.sin(), *(weights or ())]
        laid, cos, sin, *scales = [tensor.numpy() for tensor in given] if compiled else given
        rotate_and_store(laid, cache, 1, batch, (cos, sin), tuple(scales) or None, 1e-6)
        results.append((cache, x))
    (cache, x), (expected_cache, expected) = results
    assert torch.allclose(x, expected, atol=1e-5)
    assert torch.equal(x[:, 9:], qkv[:, 9:]), "values are stored unchanged"
    assert torch.allclose(cache.data, expected_cache.data, atol=1e-5)
    slots = places[1]
    assert torch.equal(cache.stored_keys(1)[slots // 16, :, :, slots % 16], x[:, 6:9])
    assert torch.equal(cache.stored_values(1)[slots // 16, :, slots % 16], x[:, 9:])
    assert not cache.data[0].any(), "another layer's blocks are unchanged"


def test_the_rotation_is_that_of_complex_numbers() -> None:
    x, angles = torch.randn(11, 6, 32), torch.randn(100, 16)
    positions = torch.randint(0, 100, (11,))
    turned = rope_reference(x, positions, angles.cos(), angles.sin())
    turn = torch.polar(torch.ones(11, 16), angles[positions]).unsqueeze(1)
    expected = torch.complex(x[..., :16], x[..., 16:]) * turn
    assert torch.allclose(turned, torch.cat([expected.real, expected.imag], dim=-1), atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 576), (64, 576), (3, 7)])
def test_rms_norm_matches(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape) * 10, torch.randn(shape[-1])
    exact = rms_norm_reference(x.double(), weight.double(), 1e-6)
    out = torch.zeros(shape)
    normalize(x.numpy(), weight.numpy(), 1e-6, out.numpy(), 0, shape[0])
    assert (out.double() - exact).abs().max() < 1e-5


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
