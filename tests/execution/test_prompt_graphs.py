"""Steps with prompts that are filled up to recorded sizes. What a graph would replay is called here; on a GPU
tests/test_cuda.py records it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chairlift.core.settings import Settings
from chairlift.execution.build import load_model
from chairlift.execution.graphs import PromptGraphs, recorded_size
from chairlift.ops import linear
from chairlift.ops.batch import Batch, HostBatch
from chairlift.ops.kv_cache import KvCache
from tiny import make_tiny_model


@pytest.mark.parametrize(
    ("step_tokens", "tokens", "size"),
    [
        (8192, 1, 32),
        (8192, 32, 32),
        (8192, 33, 64),
        (8192, 2048, 2048),
        (8192, 2049, None),  # the GPU has more to do than the host
        (8192, 8192, 8192),
        (100, 97, 100),
        (12, 5, 12),
    ],
)
def test_a_step_runs_as_the_next_larger_size_if_it_is_small_or_full(
    step_tokens: int, tokens: int, size: int | None
) -> None:
    assert recorded_size(tokens, step_tokens) == size


class Unrecorded(PromptGraphs):
    """Calls what would be recorded."""

    def record(self, size: int | None = None) -> None:
        size = size or self._full
        self._recorded[size] = [Call(self, index, size) for index in range(len(self._decoder.layers))]  # type: ignore[misc]


class Call:
    def __init__(self, *args: Any) -> None:
        self._graphs, self._index, self._size = args

    def replay(self) -> None:
        self._graphs._before(self._index, self._size)


def make_step(decoder: Any, pieces: list[tuple[int, int]], seed: int) -> tuple[torch.Tensor, Batch, KvCache]:
    """Slices of (tokens before, tokens now), and a cache in which all that was before is something."""
    generator = torch.Generator().manual_seed(seed)
    config, blocks = decoder.config, 8
    cache = KvCache(
        config.layers, len(pieces) * blocks, config.kv_heads, config.head_dim, 16, config.dtype, decoder.device
    )
    cache.data.copy_(torch.randn(cache.data.shape, generator=generator))
    tables = np.arange(len(pieces) * blocks, dtype=np.int32).reshape(len(pieces), blocks)
    positions = np.concatenate([np.arange(before, before + now) for before, now in pieces])
    owner = np.repeat(np.arange(len(pieces)), [now for _, now in pieces])
    starts = np.cumsum([0, *(now for _, now in pieces)]).astype(np.int32)
    contexts = np.array([before + now for before, now in pieces], np.int32)
    host = HostBatch(positions, tables[owner, positions // 16] * 16 + positions % 16, starts, contexts, tables)
    tokens = torch.randint(0, config.vocab_size, (positions.size,), generator=generator)
    return tokens, Batch.on(decoder.device, host), cache


def test_a_filled_step_gives_what_a_plain_one_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "HAS_TRITON", False)  # its kernels compute no bfloat16 here
    folder = make_tiny_model(tmp_path, tokenizer=False)
    decoder = load_model(str(folder), Settings.of(dtype="bfloat16", device="cpu"), progress=False).decoder
    graphs = Unrecorded(decoder, 128)
    with torch.inference_mode():
        for seed, pieces in enumerate([[(40, 1), (9, 1), (0, 29)], [(3, 1), (50, 60)], [(7, 1), (0, 40), (30, 10)]]):
            tokens, batch, cache = make_step(decoder, pieces, seed)
            before = cache.data.clone()
            wanted = batch.host.starts[1:].astype(np.int64) - 1
            expected = decoder.forward(tokens, batch, cache, wanted)
            stored = cache.data.clone()
            cache.data.copy_(before)
            size = graphs.size_for(tokens.numel())
            assert size is not None and size > tokens.numel()
            found = graphs.forward(size, tokens, batch, cache, wanted)
            assert torch.allclose(found.float(), expected.float(), atol=0.05, rtol=0.02)
            assert torch.allclose(cache.data.float(), stored.float(), atol=0.05, rtol=0.02)
            everything = decoder.forward(tokens, batch, cache, None)[torch.from_numpy(wanted)]
            assert torch.allclose(found.float(), everything.float(), atol=0.05, rtol=0.02)
