"""Paged attention: prompt chunks, decodes and both mixed, against a dense computation in float64."""

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from chairlift.ops.attention import paged_attention, paged_attention_reference
from chairlift.ops.batch import Batch, HostBatch
from chairlift.ops.kv_cache import KvCache, write_kv_reference

CPU = torch.device("cpu")


class Pages:
    """Sequences with known keys and values, scattered over a cache."""

    def __init__(
        self, pieces: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, block_size: int = 16
    ) -> None:
        """`pieces` are (tokens before this step, tokens of this step)."""
        self.pieces = pieces
        self.contexts = [before + now for before, now in pieces]
        blocks = [math.ceil(context / block_size) for context in self.contexts]
        self.cache = KvCache(2, sum(blocks) + 3, kv_heads, dim, block_size, torch.float32, CPU)
        order = torch.randperm(sum(blocks) + 3).int()
        tables = torch.full((len(pieces), max(blocks)), -1, dtype=torch.int32)  # never to be read behind the end
        for i, count in enumerate(blocks):
            tables[i, :count], order = order[:count], order[count:]
        counts = [now for _, now in pieces]
        self.q = torch.randn(sum(counts), heads + 2 * kv_heads, dim)  # behind the queries: what attention must not read
        self.heads = heads
        self.keys = [torch.randn(context, kv_heads, dim) for context in self.contexts]
        self.values = [torch.randn(context, kv_heads, dim) for context in self.contexts]
        for table, k, v in zip(tables, self.keys, self.values, strict=True):
            place = torch.arange(len(k))
            slots = table[place // block_size].long() * block_size + place % block_size
            self.write(torch.cat([torch.zeros(len(k), heads, dim), k, v], dim=1), slots)
        positions = np.concatenate([np.arange(before, before + now) for before, now in pieces])
        self.batch = self.of(positions, np.cumsum([0, *counts]), self.contexts, tables.numpy())

    def write(self, qkv: torch.Tensor, slots: torch.Tensor) -> None:
        nothing = np.empty(0, np.int32)
        write_kv_reference(
            self.cache, 1, qkv, Batch.on(CPU, HostBatch(nothing, slots.numpy(), nothing, nothing, nothing))
        )

    def of(self, positions: np.ndarray, starts: Any, contexts: list[int], tables: np.ndarray) -> Batch:
        """A batch over these pages."""
        bounds, lengths = np.array(starts, np.int32), np.array(contexts, np.int32)
        return Batch.on(CPU, HostBatch(positions, np.empty(0, np.int64), bounds, lengths, tables))

    def attend(self, window: int = 0, attend: Any = paged_attention) -> torch.Tensor:
        """What the kernel gives."""
        compiled = attend is paged_attention
        out = attend(self.q.numpy() if compiled else self.q, self.heads, self.cache, 1, self.batch, window)
        return torch.as_tensor(out).unflatten(1, (self.heads, -1)).double()

    def dense(self, window: int) -> torch.Tensor:
        """Softmax attention by the book."""
        answers = []
        row = 0
        for (before, now), k, v in zip(self.pieces, self.keys, self.values, strict=True):
            for position in range(before, before + now):
                low = max(0, position - window + 1) if window else 0
                q = self.q[row, : self.heads].double()
                group = q.shape[0] // k.shape[1]
                keys = k[low : position + 1].double().repeat_interleave(group, dim=1)
                values = v[low : position + 1].double().repeat_interleave(group, dim=1)
                scores = torch.einsum("hd,thd->ht", q, keys) / math.sqrt(q.shape[1])
                answers.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values))
                row += 1
        return torch.stack(answers)


PIECES = {
    "decodes": [(0, 1), (15, 1), (16, 1), (130, 1)],
    "a whole prompt": [(0, 77)],
    "a chunk behind a prefix": [(37, 50)],
    "all mixed": [(100, 1), (0, 33), (5, 1), (31, 17), (64, 1)],
}


@pytest.mark.parametrize("window", [0, 1, 20])
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 32), (8, 1, 128), (2, 2, 80)])
def test_it_matches_dense_attention(
    heads: int, kv_heads: int, dim: int, pieces: list[tuple[int, int]], window: int
) -> None:
    pages = Pages(pieces, heads, kv_heads, dim)
    exact = pages.dense(window)
    for attend in (paged_attention, paged_attention_reference):
        assert (pages.attend(window, attend) - exact).abs().max() < 3e-6


@pytest.mark.parametrize("block_size", [32, 48])
def test_larger_blocks_work_too(block_size: int) -> None:
    pages = Pages(PIECES["all mixed"], 4, 2, 32, block_size)
    assert (pages.attend() - pages.dense(0)).abs().max() < 3e-6


def test_a_head_size_that_no_tile_fits_takes_the_reference() -> None:
    pages = Pages(PIECES["all mixed"], 4, 2, 24)
    assert (pages.attend() - pages.dense(0)).abs().max() < 3e-6


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=6), st.integers(0, 50))
def test_any_mix_of_slices_matches(pieces: list[tuple[int, int]], window: int) -> None:
    pages = Pages(pieces, 6, 2, 16)
    assert (pages.attend(window) - pages.dense(window)).abs().max() < 3e-6


def test_extreme_scores_stay_finite() -> None:
    pages = Pages([(40, 3)], 4, 2, 32)
    pages.q *= 1000
    answer = pages.attend()
    assert torch.isfinite(answer).all()
    assert (answer - pages.dense(0)).abs().max() < 1e-4


def test_a_token_has_the_same_bits_in_a_chunk_of_any_size_and_beside_any_neighbour() -> None:
    pages = Pages([(0, 60), (90, 1)], 6, 3, 64)
    whole = pages.attend()
    every = pages.q
    for first, last in ((0, 1), (0, 16), (17, 23), (59, 60)):
        pages.batch = pages.of(np.arange(first, last), [0, last - first], [last], pages.batch.host.tables[:1])
        pages.q = every[first:last]
        assert torch.equal(pages.attend(), whole[first:last])
