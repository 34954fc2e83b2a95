"""CUDA graphs of decode steps: what a step launches is recorded once for each batch size and replayed with one call.

A decode of a small model takes the GPU less time than the host needs to launch its two hundred kernels one by one. A
recorded step reads a few numbers, which row each sequence has and which position it is at: the rest lies on the device
already. A batch between two sizes is filled up with a scratch row, whose tokens and blocks belong to nobody.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from chairlift.execution.rows import Rows
from chairlift.execution.sharing import MOST_PARTS, HostShared
from chairlift.models.decoder import Decoder
from chairlift.ops.batch import Batch, HostBatch, Shared
from chairlift.ops.kv_cache import KvCache
from chairlift.ops.sampling import likeliest

LADDER = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
FILLED = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)  # sizes of small steps with prompts
_SHARED_ITEMS = 256  # that a recorded step has room for
_ALIGNED = 64  # numbers: kernels are compiled for addresses that are multiples of 16 bytes


class Recorded(NamedTuple):
    """One recorded step, and where it leaves its results."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    tokens: torch.Tensor | None


class DecodeGraphs:
    """Recorded decode steps, the largest first so that all smaller ones fit in its memory.

    Some take the likeliest tokens themselves, others leave their logits to the sampler. Those in which sequences read
    what they share together are others again, recorded when they are first needed.
    """

    def __init__(self, decoder: Decoder, cache: KvCache, rows: Rows, seats: int) -> None:
        self._decoder, self._cache, self._rows = decoder, cache, rows
        self._scratch = seats  # the row behind the last seat
        self._sizes = [size for size in LADDER if size < seats] + [seats]
        # Rows and positions; where something is shared, its prefixes, parts and members; and behind these its items.
        self._width = -(-seats // _ALIGNED) * _ALIGNED
        self._inputs = torch.zeros(5 * (self._width + _SHARED_ITEMS), dtype=torch.int32, device=decoder.device)
        self._recorded: dict[tuple[int, bool, bool], Recorded] = {}
        self._pool: Any = None

    @torch.inference_mode()
    def record(self) -> None:
        """Record every size, and one that shares: its kernels are then compiled."""
        for size in reversed(self._sizes):
            self._record(size, False, True)
            self._record(size, False, False)
        if self._rows.shares:
            self._record(self._sizes[-1], True, True)

    def run(
        self, rows: np.ndarray, positions: np.ndarray, shared: HostShared | None, is_greedy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The logits of one decode step, and if it is greedy its tokens, put where the next step finds them.

        Both are overwritten by the next.
        """
        count = len(rows)
        size = next(each for each in self._sizes if each >= count)
        if shared is not None and len(shared.items) > _SHARED_ITEMS:
            shared = None
        shares = shared is not None
        inputs = np.zeros(self._inputs.numel() if shares else 2 * self._width, np.int32)
        each = inputs[: (5 if shares else 2) * self._width].reshape(-1, self._width)
        each[0, :count], each[0, count:] = rows, self._scratch
        each[1, :count] = positions
        if shared is not None:
            each[2, :count], each[3, :count] = shared.prefixes, shared.parts
            each[4, : shared.members.size] = shared.members
            inputs[5 * self._width :][: shared.items.size] = shared.items.ravel()
        if (size, shares, is_greedy) not in self._recorded:
            self._record(size, shares, is_greedy)
        self._inputs[: inputs.size].copy_(torch.from_numpy(inputs), non_blocking=True)
        graph, logits, tokens = self._recorded[size, shares, is_greedy]
        graph.replay()
        return logits[:count], None if tokens is None else tokens[:count]

    def _record(self, size: int, shares: bool, is_greedy: bool) -> None:
        self._inputs.zero_()
        self._inputs[: self._width] = self._scratch
        self._step(size, shares, is_greedy)  # compiles what must be, which cannot be recorded
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits, tokens = self._step(size, shares, is_greedy)
        self._pool = self._pool or graph.pool()
        self._recorded[size, shares, is_greedy] = Recorded(graph, logits, tokens)

    def _step(self, size: int, shares: bool, is_greedy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        each = self._inputs[: 5 * self._width].view(5, self._width)[:, :size]
        shared = None
        if shares:
            items = self._inputs[5 * self._width :].view(_SHARED_ITEMS, 5)
            shared = Shared(items, each[4], each[2], each[3], MOST_PARTS * size)
        host = HostBatch(  # of which only the shape is asked: the rest a recorded step must not depend on
            positions=np.zeros(size, np.int64),
            slots=np.zeros(size, np.int64),
            starts=np.arange(size + 1, dtype=np.int32),
            contexts=np.ones(size, np.int32),
            tables=np.empty((size, 0), np.int32),
        )
        tokens, batch = self._rows.gather_decodes(each[0], each[1], host, shared)
        hidden = self._decoder.forward(tokens, batch, self._cache, None)
        logits = self._decoder.logits(hidden)
        if not is_greedy:
            return logits, None
        chosen = likeliest(logits)
        self._rows.put_behind(each[0], each[1], chosen)
        return logits, chosen


class PromptGraphs:
    """The linear layers of steps with prompts in them, recorded from one layer's attention to the next.

    Attention itself differs from step to step and is launched as it comes. All that lies between takes most of the
    host's time, and depends on nothing but the number of tokens. That is always the same in a full step; a small one is
    filled up to the next size. Those between take the GPU longer than the host, and are launched as they come.
    """

    def __init__(self, decoder: Decoder, tokens: int) -> None:
        config = decoder.config
        self._decoder = decoder
        self._full = tokens
        seen, width = config.heads * config.head_dim, config.heads + 2 * config.kv_heads
        self._x, self._seen, self._qkv = (
            torch.zeros(tokens, size, dtype=config.dtype, device=decoder.device)
            for size in (config.hidden_size, seen, width * config.head_dim)
        )
        self._recorded: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self._pool: Any = None

    def size_for(self, tokens: int) -> int | None:
        """The recorded size that a step of so many tokens runs as, if any."""
        return recorded_size(tokens, self._full)

    @torch.inference_mode()
    def record(self, size: int | None = None) -> None:
        """Record what comes before each layer's attention, for full steps or those of a size."""
        size = size or self._full
        graphs = []
        for index in range(len(self._decoder.layers)):
            if index < 2:
                self._before(index, size)  # compiles what must be
                torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self._before(index, size)
            self._pool = self._pool or graph.pool()
            graphs.append(graph)
        self._recorded[size] = graphs

    def forward(
        self, size: int, tokens: torch.Tensor, batch: Batch, cache: KvCache, wanted: np.ndarray
    ) -> torch.Tensor:
        """What Decoder.forward gives; a size is recorded when it is first needed."""
        if size not in self._recorded:
            self.record(size)
        decoder, graphs, count = self._decoder, self._recorded[size], tokens.numel()
        x, seen, qkv = self._x[:count], self._seen[:count], self._qkv[:count]
        x.copy_(decoder.embed(tokens))
        self._x[count:size].zero_()  # nobody's: without this they would grow from step to step
        for index, graph in enumerate(graphs):
            graph.replay()
            if index < len(graphs) - 1:
                decoder.attend(index, qkv, batch, cache, seen)
        return decoder.finish(qkv, x, batch, cache, wanted)

    def _before(self, index: int, size: int) -> None:
        x = self._x[:size]
        if index:
            self._decoder.close(index - 1, self._seen[:size], x)
        self._decoder.layers[index].qkv.into(x, self._qkv[:size])


def recorded_size(tokens: int, full: int) -> int | None:
    """The size that a step with prompts runs as: the next one if it is small, its own if it is full, else none."""
    size = next((each for each in FILLED if tokens <= each < full), full)
    return size if size == tokens or size <= FILLED[-1] else None
