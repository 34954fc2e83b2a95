"""CUDA graphs of decode steps: what a step launches is recorded once for each batch size and replayed with one call.

A decode of a small model takes the GPU less time than the host needs to launch its two hundred kernels one by one. A
recorded step reads a few numbers, which row each sequence has and which position it is at: the rest lies on the device
already. A batch between two sizes is filled up with a scratch row, whose tokens and blocks belong to nobody.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import cycle
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from chairlift.execution.rows import Rows
from chairlift.execution.sharing import MOST_PARTS, HostShared
from chairlift.models.decoder import Decoder
from chairlift.ops.batch import HostBatch, Shared
from chairlift.ops.kv_cache import KvCache
from chairlift.ops.sampling import likeliest

LADDER = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_SHARED_ITEMS = 256  # that a recorded step has room for
TURNS = 4  # transfers of one kind that may be under way: an engine never has more than two steps in flight
_ALIGNED = 64  # numbers: kernels are compiled for addresses that are multiples of 16 bytes


class Turn(NamedTuple):
    """Memory of one transfer to the device."""

    numbers: torch.Tensor
    flat: np.ndarray  # the same, as the host writes it
    cuts: dict[int, tuple[torch.Tensor, torch.Tensor]]  # for so many numbers: where to, and these


class Inputs:
    """The numbers that a recorded step reads, under their names, side by side: one transfer brings them all."""

    def __init__(self, device: torch.device, shapes: dict[str, tuple[int, ...]], blank: dict[str, int]) -> None:
        self._places: dict[str, tuple[int, int, int]] = {}  # where each begins and ends, and what stands for nothing
        end = 0
        for name, shape in shapes.items():
            self._places[name] = end, end + prod(shape), blank.get(name, 0)
            end += -(-prod(shape) // _ALIGNED) * _ALIGNED
        self._sent = torch.zeros(end, dtype=torch.int32, device=device)
        self._views = {name: self._sent[slice(*self._places[name][:2])].view(shape) for name, shape in shapes.items()}
        # What the device has not read yet must stay as it is: each transfer has its turn in memory of its own.
        turns = [torch.zeros(end, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(TURNS)]
        self._turns = cycle([Turn(numbers, numbers.numpy(), {}) for numbers in turns])

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._views[name]

    def send(self, **arrays: np.ndarray) -> None:
        """Bring the numbers to the device, those behind the last that is given not included."""
        numbers, flat, cuts = next(self._turns)
        count = 0
        for name, array in arrays.items():
            begin, end, blank = self._places[name]
            middle = begin + array.size
            flat[begin:middle] = array if array.ndim == 1 else array.ravel()
            if middle < end:
                flat[middle:end] = blank
            count = max(count, end)
        if count not in cuts:
            cuts[count] = self._sent[:count], numbers[:count]
        target, source = cuts[count]
        target.copy_(source, non_blocking=True)

    def clear(self) -> None:
        """Nothing is given."""
        self.send(**dict.fromkeys(self._places, np.empty(0, np.int32)))


def shared_shapes(decodes: int) -> dict[str, tuple[int, ...]]:
    """The inputs that say who reads together; they are the last ones of a step."""
    return {"prefixes": (decodes,), "parts": (decodes,), "members": (decodes,), "items": (_SHARED_ITEMS, 5)}


def fits(shared: HostShared | None) -> HostShared | None:
    """What is shared, if a recorded step has room for it; else nobody reads together."""
    return shared if shared is not None and len(shared.items) <= _SHARED_ITEMS else None


def shared_in(inputs: Inputs, decodes: int) -> Shared:
    """Who reads together, for attention."""
    members, prefixes, parts = (inputs[name][:decodes] for name in ("members", "prefixes", "parts"))
    return Shared(inputs["items"], members, prefixes, parts, MOST_PARTS * decodes)


class Recorded(NamedTuple):
    """One recorded step, and where it leaves its results."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    tokens: torch.Tensor | None


class Recorder:
    """Records steps of one engine, all in one pool of memory."""

    def __init__(self, decoder: Decoder, cache: KvCache, rows: Rows, seats: int) -> None:
        self.decoder, self.cache, self.rows = decoder, cache, rows
        self.seats = seats
        self.scratch = seats  # the row behind the last seat
        config = decoder.config
        self._logits = torch.empty(seats, config.vocab_size, dtype=config.dtype, device=decoder.device)
        self._pool: Any = None

    def record(self, step: Callable[[], tuple[torch.Tensor, torch.Tensor | None]]) -> Recorded:
        """Record a step that gives logits, and tokens if it chooses them itself."""
        step()  # compiles what must be, which cannot be recorded
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits, tokens = step()
        self._pool = self._pool or graph.pool()
        return Recorded(graph, logits, tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the head says of hidden states, in the one place that all recorded steps have for that."""
        count = hidden.shape[0]  # a single row has a kernel of its own, twice as fast
        return self.decoder.logits(hidden, None if count == 1 else self._logits[:count])


class DecodeGraphs:
    """Recorded decode steps, the largest first so that all smaller ones fit in its memory.

    Some take the likeliest tokens themselves, others leave their logits to the sampler. Those in which sequences read
    what they share together are others again, recorded when they are first needed.
    """

    def __init__(self, recorder: Recorder) -> None:
        seats = recorder.seats
        self._recorder = recorder
        self._sizes = [size for size in LADDER if size < seats] + [seats]
        shapes = dict.fromkeys(("rows", "positions", "places", "blocks"), (seats,)) | shared_shapes(seats)
        blank = {"rows": recorder.scratch, "places": recorder.rows.nowhere, "blocks": recorder.rows.scratch_block}
        self._inputs = Inputs(recorder.decoder.device, shapes, blank)
        self._recorded: dict[tuple[int, bool, bool], Recorded] = {}

    @torch.inference_mode()
    def record(self) -> None:
        """Record every size, and one that shares: its kernels are then compiled."""
        for size in reversed(self._sizes):
            self._record(size, False, True)
            self._record(size, False, False)
        if self._recorder.rows.shares:
            self._record(self._sizes[-1], True, True)

    def run(
        self, rows: np.ndarray, positions: np.ndarray, shared: HostShared | None, is_greedy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The logits of one decode step, and if it is greedy its tokens, put where the next step finds them.

        Both are overwritten by the next.
        """
        count = len(rows)
        size = self._sizes[bisect_left(self._sizes, count)]
        shared = fits(shared)
        if (size, shared is not None, is_greedy) not in self._recorded:
            self._record(size, shared is not None, is_greedy)
        together = {} if shared is None else shared._asdict()
        changes = self._recorder.rows.take_changes(self._recorder.seats)
        self._inputs.send(rows=rows, positions=positions, **changes, **together)
        graph, logits, tokens = self._recorded[size, shared is not None, is_greedy]
        graph.replay()
        if count == size:
            return logits, tokens
        return logits[:count], None if tokens is None else tokens[:count]

    def _record(self, size: int, shares: bool, is_greedy: bool) -> None:
        self._inputs.clear()
        self._recorded[size, shares, is_greedy] = self._recorder.record(lambda: self._step(size, shares, is_greedy))

    def _step(self, size: int, shares: bool, is_greedy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        recorder = self._recorder
        rows, positions = self._inputs["rows"][:size], self._inputs["positions"][:size]
        recorder.rows.change_tables(self._inputs["places"], self._inputs["blocks"])
        shared = shared_in(self._inputs, size) if shares else None
        tokens, batch = recorder.rows.gather_decodes(rows, positions, host_of(size, size), shared)
        logits = recorder.logits(recorder.decoder.forward(tokens, batch, recorder.cache, None))
        if not is_greedy:
            return logits, None
        chosen = likeliest(logits)
        recorder.rows.put_at(rows, positions + 1, chosen)
        return logits, chosen


def host_of(decodes: int, tokens: int) -> HostBatch:
    """A batch in main memory of which only the shape may be asked: a recorded step must not depend on the rest.

    What is no decode is one slice behind them.
    """
    slices = decodes + (tokens > decodes)
    starts = np.append(np.arange(decodes + 1, dtype=np.int32), np.full(slices - decodes, tokens, np.int32))
    nothing = np.zeros(tokens, np.int64)
    return HostBatch(nothing, nothing, starts, np.ones(slices, np.int32), np.empty((slices, 0), np.int32))
