"""CUDA graphs of decode steps: what a step launches is recorded once for each batch size and replayed with one call.

A decode of a small model takes the GPU less time than the host needs to launch its three hundred kernels one by one. A
recorded step reads only two arrays, which row each sequence has and which position it is at: the rest lies on the
device already. A batch between two sizes is filled up with a scratch row, whose tokens and blocks belong to nobody.
"""

from __future__ import annotations

import numpy as np
import torch

from chairlift.execution.rows import Rows
from chairlift.models.decoder import Decoder
from chairlift.ops.batch import Batch, HostBatch
from chairlift.ops.kv_cache import KvCache

LADDER = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


class DecodeGraphs:
    """Recorded decode steps, the largest first so that all smaller ones fit in its memory."""

    def __init__(self, decoder: Decoder, cache: KvCache, rows: Rows, seats: int, max_length: int) -> None:
        self._decoder, self._cache, self._rows = decoder, cache, rows
        self._max_length = max_length
        self._scratch = seats  # the row behind the last seat
        self._sizes = [size for size in LADDER if size < seats] + [seats]
        self._inputs = torch.zeros(2, self._sizes[-1], dtype=torch.int64, device=decoder.device)
        self._inputs[0] = self._scratch
        self._recorded: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    @torch.inference_mode()
    def record(self) -> None:
        """Record every size."""
        pool = None
        for size in reversed(self._sizes):
            self._step(size)  # compiles what must be, which cannot be recorded
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = self._step(size)
            pool = pool or graph.pool()
            self._recorded[size] = graph, logits

    def run(self, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """The logits of one decode step; they are overwritten by the next."""
        count = len(rows)
        size = next(each for each in self._sizes if each >= count)
        inputs = np.full((2, size), self._scratch, np.int64)
        inputs[0, :count] = rows
        inputs[1, :count], inputs[1, count:] = positions, 0
        self._inputs[:, :size].copy_(torch.from_numpy(inputs), non_blocking=True)
        graph, logits = self._recorded[size]
        graph.replay()
        return logits[:count]

    def _step(self, size: int) -> torch.Tensor:
        rows, positions = self._inputs[0, :size], self._inputs[1, :size]
        block_size = self._cache.block_size
        tables = self._rows.device_tables[rows]
        slots = tables.gather(1, (positions // block_size)[:, None])[:, 0].long() * block_size + positions % block_size
        # How the kernels are launched must not depend on the step: they are told of the longest contexts there can be.
        host = HostBatch(
            positions=np.zeros(size, np.int64),
            slots=np.zeros(size, np.int64),
            starts=np.arange(size + 1, dtype=np.int32),
            contexts=np.full(size, self._max_length, np.int32),
            tables=np.empty((size, 0), np.int32),
        )
        starts = torch.arange(size + 1, dtype=torch.int32, device=rows.device)
        batch = Batch(positions, slots, starts, (positions + 1).int(), tables, host)
        hidden = self._decoder.forward(self._rows.tokens[rows, positions], batch, self._cache, None)
        return self._decoder.logits(hidden)
