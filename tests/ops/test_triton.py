"""The Triton kernels against plain torch: on the GPU, or in Triton's interpreter without one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mostly_long import mostly_long

pytest.importorskip("triton")

from chairlift.execution.sharing import Grouping
from chairlift.ops import attention_cuda, decode_cuda, fused_cuda
from chairlift.ops.attention import paged_attention_reference
from chairlift.ops.batch import Batch, HostBatch, SharedPrefixes
from chairlift.ops.kv_cache import KvCache, write_kv_reference
from chairlift.ops.kv_quant import KV_DTYPES
from chairlift.ops.look_up import look_up_reference
from chairlift.ops.norm import rms_norm_reference
from chairlift.ops.rotate import rotate_and_store_reference
from chairlift.ops.scoring import Scoring
from chairlift.ops.weight import GELU_TANH, SILU, gate_mul_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":  # the interpreter runs programs one by one, also those without work
    decode_cuda._FILLS = decode_cuda._FILLS_OF_FEW = 32
    decode_cuda._COUNTED = 16
NEAR = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of the largest value


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    assert torch.isfinite(got).all()
    error = (got.double() - expected.double()).abs().max() / expected.double().abs().max()
    return bool(error < 2 * NEAR[got.dtype])


def make_batch(pieces: list[tuple[int, int]], block_size: int) -> tuple[Batch, int]:
    """Build slices of (tokens before, tokens now) in scattered blocks; return the batch and the number of blocks."""
    contexts = [before + now for before, now in pieces]
    needed = [-(-context // block_size) for context in contexts]
    order = np.random.permutation(sum(needed) + 2).astype(np.int32)
    tables = np.zeros((len(pieces), max(needed)), np.int32)
    positions, slots = [], []
    for i, (before, now) in enumerate(pieces):
        tables[i, : needed[i]], order = order[: needed[i]], order[needed[i] :]
        place = np.arange(before, before + now)
        positions.append(place)
        slots.append(tables[i, place // block_size].astype(np.int64) * block_size + place % block_size)
    starts = np.cumsum([0, *(now for _, now in pieces)]).astype(np.int32)
    host = HostBatch(np.concatenate(positions), np.concatenate(slots), starts, np.array(contexts, np.int32), tables)
    return Batch.on(DEVICE, host), sum(needed) + 2


PIECES = {
    "decodes": [(0, 1), (15, 1), (16, 1), (130, 1)],
    "a whole prompt": [(0, 77)],
    "all mixed": [(100, 1), (5, 1), (0, 33), (31, 17), (64, 1)],
}
LARGE = [(9, 3, 64), (4, 4, 80)]  # more programs of the same kind, slow in the interpreter


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(3, 1, 64), (2, 2, 80), (8, 1, 128), *(pytest.param(*large, marks=pytest.mark.long) for large in LARGE)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_attention_matches(
    heads: int, kv_heads: int, dim: int, pieces: list[tuple[int, int]], window: int, dtype: torch.dtype
) -> None:
    if DEVICE.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter computes bfloat16 in NumPy, which has none")
    batch, blocks = make_batch(pieces, 16)
    cache = KvCache(2, blocks, kv_heads, dim, 16, dtype, DEVICE, compiled=False)
    cache.data.normal_()
    qkv = torch.randn(batch.positions.shape[0], heads + 2 * kv_heads, dim, dtype=dtype, device=DEVICE)
    got = attention_cuda.attend(qkv, heads, cache, 1, batch, window)
    assert close(got, paged_attention_reference(qkv, heads, cache, 1, batch, window))


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 96), (4, 1, 256)])
def test_other_head_sizes_match(heads: int, kv_heads: int, dim: int, window: int) -> None:
    batch, blocks = make_batch([(40, 1), (9, 20)], 16)
    cache = KvCache(2, blocks, kv_heads, dim, 16, torch.float32, DEVICE, compiled=False)
    cache.data.normal_()
    qkv = torch.randn(21, heads + 2 * kv_heads, dim, device=DEVICE)
    got = attention_cuda.attend(qkv, heads, cache, 1, batch, window)
    assert close(got, paged_attention_reference(qkv, heads, cache, 1, batch, window))


@pytest.mark.parametrize("capped", mostly_long([True, False]))
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
def test_other_scores_match(pieces: list[tuple[int, int]], window: int, has_sinks: bool, capped: bool) -> None:
    sinks = torch.tensor([-1.0, 0.5, 2.0, 7.0], device=DEVICE) if has_sinks else None
    scoring = Scoring(0.3, 5.0 if capped else 0.0, sinks)
    batch, blocks = make_batch(pieces, 16)
    cache = make_cache(blocks, 2, 32)
    qkv = torch.randn(batch.positions.shape[0], 8, 32, device=DEVICE)
    got = attention_cuda.attend(qkv, 4, cache, 1, batch, window, scoring)
    assert close(got, paged_attention_reference(qkv, 4, cache, 1, batch, window, scoring))


def make_cache(blocks: int, kv_heads: int, dim: int) -> KvCache:
    cache = KvCache(2, blocks, kv_heads, dim, 16, torch.float32, DEVICE, compiled=False)
    cache.data.normal_()
    return cache


def make_narrow(blocks: int, kv_heads: int, dim: int, dtype: torch.dtype) -> KvCache:
    """Build an 8-bit cache in which every token has another scale."""
    cache = KvCache(2, blocks, kv_heads, dim, 16, dtype, DEVICE, compiled=False)
    slots, nothing = np.arange(blocks * 16), np.empty(0, np.int32)
    batch = Batch.on(DEVICE, HostBatch(slots, slots, nothing, nothing, nothing))
    numbers = torch.randn(blocks * 16, 2 * kv_heads, dim, device=DEVICE)
    write_kv_reference(cache, 1, numbers * 2 ** torch.randn(blocks * 16, 1, 1, device=DEVICE), batch)
    return cache


@pytest.mark.parametrize("pieces", [PIECES["decodes"], [(60, 1), (0, 33), (31, 9)]], ids=["decodes", "mixed"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"),
    [
        *((3, 1, 64, 0), (3, 1, 64, 20), (2, 2, 80, 20), (4, 2, 96, 0), (4, 1, 128, 20), (2, 1, 256, 0)),
        *(pytest.param(9, 3, 64, window, marks=pytest.mark.long) for window in (0, 20)),
    ],
)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES.values(), ids=KV_DTYPES.keys())
@pytest.mark.parametrize(
    "dtype", mostly_long([torch.float32, torch.bfloat16, torch.float16]), ids=["f32", "bf16", "f16"]
)
def test_attention_over_8_bits_matches(
    heads: int,
    kv_heads: int,
    dim: int,
    pieces: list[tuple[int, int]],
    window: int,
    kv_dtype: torch.dtype,
    dtype: torch.dtype,
) -> None:
    if DEVICE.type == "cpu" and (dtype == torch.bfloat16 or (dtype == torch.float16 and (dim, window) != (64, 0))):
        pytest.skip("the interpreter computes in NumPy, which has no bfloat16 and is slow with float16")
    batch, blocks = make_batch(pieces, 16)
    cache = make_narrow(blocks, kv_heads, dim, kv_dtype)
    qkv = torch.randn(batch.positions.shape[0], heads + 2 * kv_heads, dim, device=DEVICE).to(dtype)
    got = attention_cuda.attend(qkv, heads, cache, 1, batch, window)
    assert close(got, paged_attention_reference(qkv, heads, cache, 1, batch, window))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES.values(), ids=KV_DTYPES.keys())
def test_triton_uses_the_scale_of_every_token(kv_dtype: torch.dtype) -> None:
    batch, blocks = make_batch([(50, 1), (3, 5)], 16)
    cache = make_narrow(blocks, 2, 64, kv_dtype)
    qkv = torch.randn(6, 8, 64, device=DEVICE)
    before = attention_cuda.attend(qkv, 4, cache, 1, batch, 0)
    assert cache.scales is not None
    cache.scales[:, :, 1] *= 2
    assert torch.equal(attention_cuda.attend(qkv, 4, cache, 1, batch, 0), 2 * before)
    cache.scales[:, :, 0] *= 2
    qkv /= 2
    assert close(attention_cuda.attend(qkv, 4, cache, 1, batch, 0), 2 * before)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "kv_dtype"),
    [pytest.param(4, 2, torch.float32, marks=pytest.mark.long), (6, 1, torch.int8)],
    ids=str,
)
def test_a_shared_prefix_is_read_once_for_its_group(heads: int, kv_heads: int, kv_dtype: torch.dtype) -> None:
    lengths = [400, 340, 300, 20, 345, 333, 301, 310, 500, 400, 399, 1]
    batch, blocks = make_batch([(length, 1) for length in lengths], 16)
    tables = batch.host.tables
    for leader, followers, common in ((0, (1, 4, 8, 9, 10), 20), (2, (5, 6, 7), 18)):
        for each in followers:
            tables[each, :common] = tables[leader, :common]
    batch = Batch.on(DEVICE, batch.host)
    found = Grouping(16, kv_heads, 4).find(tables, batch.host.contexts)
    assert found is not None
    assert found.prefixes.tolist() == [320, 320, 288, 0, 320, 288, 288, 288, 320, 320, 320, 0]
    items, members, prefixes, parts = (torch.from_numpy(each).to(DEVICE) for each in found)
    cache = make_narrow(blocks, kv_heads, 64, kv_dtype) if kv_dtype == torch.int8 else make_cache(blocks, kv_heads, 64)
    qkv = torch.randn(len(lengths), heads + 2 * kv_heads, 64, device=DEVICE)
    expected = paged_attention_reference(qkv, heads, cache, 1, batch, 0)
    idle = torch.zeros(3, 5, dtype=torch.int32, device=DEVICE)  # padding, as in a captured step
    batch.shared = SharedPrefixes(torch.cat([items, idle]), members, prefixes, parts, int(parts.sum()))
    for _ in range(2):  # the first pass must reset the counters for the second
        assert close(attention_cuda.attend(qkv, heads, cache, 1, batch, 0), expected)
    # The shared item reads the leader's blocks: with other blocks for the followers, the result is unchanged.
    batch.tables[1, :20] = batch.tables[3, 0]
    assert close(attention_cuda.attend(qkv, heads, cache, 1, batch, 0), expected)


@pytest.mark.parametrize("window", [0, 300])
def test_long_contexts_are_split_and_combined(window: int) -> None:
    batch, blocks = make_batch([(1500, 1), (40, 1), (700, 1)], 16)
    cache = KvCache(1, blocks, 2, 64, 16, torch.float32, DEVICE, compiled=False)
    cache.data.normal_()
    qkv = torch.randn(3, 8, 64, device=DEVICE)
    got = attention_cuda.attend(qkv, 4, cache, 0, batch, window)
    assert close(got, paged_attention_reference(qkv, 4, cache, 0, batch, window))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dim", [64, 80])
def test_queries_and_keys_are_rotated_and_stored(dim: int, normed: bool) -> None:
    batch, blocks = make_batch([(10, 1), (0, 19)], 16)
    qkv = torch.randn(20, 4 + 2 + 2, dim, device=DEVICE) * 3
    angles = torch.randn(200, dim // 2, device=DEVICE)
    norms = (torch.randn(dim, device=DEVICE), torch.randn(dim, device=DEVICE)) if normed else None
    results = []
    for op in (fused_cuda.rotate_and_store, rotate_and_store_reference):
        cache, x = KvCache(2, blocks, 2, dim, 16, torch.float32, DEVICE, compiled=False), qkv.clone()
        op(x, cache, 1, batch, (angles.cos(), angles.sin()), norms, 1e-6)
        results.append((x, cache.data))
    for got, expected in zip(*results, strict=True):
        assert close(got, expected)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES.values(), ids=KV_DTYPES.keys())
@pytest.mark.parametrize("dim", [64, 80])
def test_codes_and_scales_are_the_bytes_of_the_reference(dim: int, kv_dtype: torch.dtype) -> None:
    batch, blocks = make_batch([(10, 1), (14, 7)], 16)
    qkv = torch.randn(8, 2 + 2 + 2, dim, device=DEVICE) * 10 ** torch.linspace(-3, 3, 8, device=DEVICE).view(-1, 1, 1)
    qkv[3] = 0
    # No rotation: its last bit may differ, and with it a code.
    still = torch.ones(200, dim // 2, device=DEVICE), torch.zeros(200, dim // 2, device=DEVICE)
    caches = [KvCache(2, blocks, 2, dim, 16, kv_dtype, DEVICE, compiled=False) for _ in range(2)]
    for op, cache in zip((fused_cuda.rotate_and_store, rotate_and_store_reference), caches, strict=True):
        op(qkv.clone(), cache, 1, batch, still, None, 1e-6)
    assert torch.equal(caches[0].data, caches[1].data)


@pytest.mark.parametrize("kv_dtype", [torch.float32, *KV_DTYPES.values()], ids=str)
@pytest.mark.parametrize("block_size", [pytest.param(32, marks=pytest.mark.long), 48])
def test_larger_blocks_are_written_and_read(block_size: int, kv_dtype: torch.dtype) -> None:
    batch, blocks = make_batch([(100, 1), (31, 1), (0, 40), (33, 17)], block_size)
    cos_sin = torch.ones(200, 32, device=DEVICE), torch.zeros(200, 32, device=DEVICE)  # no rotation, which may round
    qkv = torch.randn(batch.positions.shape[0], 8, 64, device=DEVICE)
    caches = [KvCache(1, blocks, 2, 64, block_size, kv_dtype, DEVICE, compiled=False) for _ in range(2)]
    before = torch.randint(0, 100, caches[0].data.shape, device=DEVICE)  # hundredths
    for cache in caches:
        cache.data.copy_(before if cache.scales is not None else before / 100)
        if cache.scales is not None:
            cache.scales.fill_(0.01)
    ours, theirs = qkv.clone(), qkv.clone()
    fused_cuda.rotate_and_store(ours, caches[0], 0, batch, cos_sin, None, 1e-6)
    rotate_and_store_reference(theirs, caches[1], 0, batch, cos_sin, None, 1e-6)
    assert close(caches[0].data.float(), caches[1].data.float())
    assert close(
        attention_cuda.attend(ours, 4, caches[0], 0, batch, 0),
        paged_attention_reference(theirs, 4, caches[1], 0, batch),
    )


@pytest.mark.parametrize("size", [64, 576, 1000])
def test_norm_and_gate_match(size: int) -> None:
    x, weight = torch.randn(5, size, device=DEVICE) * 10, torch.randn(size, device=DEVICE)
    assert close(fused_cuda.rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
    y = torch.randn(3, 2 * size, device=DEVICE)
    for gate in (SILU, GELU_TANH):
        assert close(fused_cuda.gate_mul(y, gate.linear, gate.cubic), gate_mul_reference(y, gate))
    residual = torch.randn(5, size, device=DEVICE)
    added = fused_cuda.rms_norm(x, weight, 1e-6, residual.clone())
    assert close(added, residual + rms_norm_reference(x, weight, 1e-6))


def test_looking_up_decodes_matches() -> None:
    tokens = torch.randint(0, 9999, (7, 5000), dtype=torch.int32, device=DEVICE)
    tables = torch.randint(0, 9999, (7, 313), dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([5, 0, 6, 3], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([0, 15, 16, 4999], dtype=torch.int32, device=DEVICE)
    *got, own = fused_cuda.look_up(rows, positions, tokens, tables, 16)
    *expected, whole = look_up_reference(rows, positions, tokens, tables, 16)
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours.long(), theirs.long())
    for i, blocks in enumerate((1, 1, 2, 313)):
        assert torch.equal(own[i, :blocks], whole[i, :blocks])
