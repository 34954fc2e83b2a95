"""Sequences in scattered KV blocks, and the expected result of attention over them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from chairlift.ops.attention import paged_attention
from chairlift.ops.batch import Batch, HostBatch
from chairlift.ops.kv_cache import KvCache, write_kv_reference
from chairlift.ops.scoring import Scoring

CPU = torch.device("cpu")


class Pages:
    """Sequences with known keys and values, in scattered blocks of a cache."""

    def __init__(
        self,
        pieces: list[tuple[int, int]],
        heads: int,
        kv_heads: int,
        dim: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        sizes: float = 1.0,
    ) -> None:
        """`pieces` are (tokens before this step, tokens of this step); tokens' magnitudes differ by up to `sizes`."""
        self.pieces = pieces
        self.contexts = [before + now for before, now in pieces]
        blocks = [math.ceil(context / block_size) for context in self.contexts]
        self.cache = KvCache(2, sum(blocks) + 3, kv_heads, dim, block_size, dtype, CPU, compiled=True)
        order = torch.randperm(sum(blocks) + 3).int()
        tables = torch.full((len(pieces), max(blocks)), -1, dtype=torch.int32)  # entries after the end must not be read
        for i, count in enumerate(blocks):
            tables[i, :count], order = order[:count], order[count:]
        counts = [now for _, now in pieces]
        self.q = torch.randn(
            sum(counts), heads + 2 * kv_heads, dim
        )  # after the queries: keys and values, which attention must not read from here
        self.heads = heads
        self.keys, self.values = (
            [torch.randn(context, kv_heads, dim) * sizes ** torch.rand(context, 1, 1) for context in self.contexts]
            for _ in range(2)
        )
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
        """Build a batch over these blocks."""
        bounds, lengths = np.array(starts, np.int32), np.array(contexts, np.int32)
        return Batch.on(CPU, HostBatch(positions, np.empty(0, np.int64), bounds, lengths, tables))

    def attend(self, window: int = 0, attend: Any = paged_attention, scoring: Scoring | None = None) -> torch.Tensor:
        """Run the attention under test."""
        compiled = attend is paged_attention
        out = attend(self.q.numpy() if compiled else self.q, self.heads, self.cache, 1, self.batch, window, scoring)
        return torch.as_tensor(out).unflatten(1, (self.heads, -1)).double()

    def dense(self, window: int, scoring: Scoring | None = None) -> torch.Tensor:
        """Compute dense softmax attention in float64."""
        scoring = scoring or Scoring.default(self.q.shape[2])
        answers = []
        row = 0
        for (before, now), k, v in zip(self.pieces, self.keys, self.values, strict=True):
            for position in range(before, before + now):
                low = max(0, position - window + 1) if window else 0
                q = self.q[row, : self.heads].double()
                group = q.shape[0] // k.shape[1]
                keys = k[low : position + 1].double().repeat_interleave(group, dim=1)
                values = v[low : position + 1].double().repeat_interleave(group, dim=1)
                scores = torch.einsum("hd,thd->ht", q, keys) * scoring.scale
                if scoring.softcap:
                    scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
                if scoring.sinks is not None:
                    scores = torch.cat([scores, scoring.sinks.double()[:, None]], 1)
                weights = scores.softmax(-1)[:, : len(keys)]
                answers.append(torch.einsum("ht,thd->hd", weights, values))
                row += 1
        return torch.stack(answers)


PIECES = {
    "decodes": [(0, 1), (15, 1), (16, 1), (130, 1)],
    "a whole prompt": [(0, 77)],
    "a chunk after a prefix": [(37, 50)],
    "all mixed": [(100, 1), (0, 33), (5, 1), (31, 17), (64, 1)],
}
