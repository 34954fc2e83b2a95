"""CUDA graphs of decode steps: a step's kernels are captured once per batch size and replayed with one call.

A decode of a small model takes the GPU less time than the host needs to launch its two hundred kernels one by one. A
captured step reads a few numbers per sequence, its row and its position: all else is on the device already. A batch
between two sizes is padded with a scratch row, which no sequence has.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from itertools import cycle
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from chairlift.engine.garbage import no_collections
from chairlift.execution.rows import Rows
from chairlift.execution.sharing import MOST_PARTS, HostSharedPrefixes
from chairlift.models.decoder import Decoder
from chairlift.ops.batch import HostBatch, SharedPrefixes
from chairlift.ops.kv_cache import KvCache
from chairlift.ops.sampling import likeliest

LADDER = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_SHARED_ITEMS = 256  # items of shared prefixes that a captured step has room for
STAGING_BUFFERS = 4  # transfers of one kind that may be in flight: an engine has at most two steps in flight
_ALIGNED = 64  # elements: kernels are compiled for addresses that are multiples of 16 bytes


class StagingBuffer(NamedTuple):
    """Host memory of one transfer to the device."""

    numbers: torch.Tensor
    flat: np.ndarray  # `numbers` as an array
    cuts: dict[int, tuple[torch.Tensor, torch.Tensor]]  # by length: target and source of the copy


class Inputs:
    """The named inputs of a captured step, in one piece of memory, so that one transfer copies them all."""

    def __init__(
        self, device: torch.device, shapes: dict[str, tuple[int, ...]], blank: dict[str, int], passes: int = 1
    ) -> None:
        """`passes` are the most passes of one engine step."""
        self._places: dict[str, tuple[int, int, int]] = {}  # begin, end and padding value
        end = 0
        for name, shape in shapes.items():
            self._places[name] = end, end + prod(shape), blank.get(name, 0)
            end += -(-prod(shape) // _ALIGNED) * _ALIGNED
        self._sent = torch.zeros(end, dtype=torch.int32, device=device)
        self._views = {name: self._sent[slice(*self._places[name][:2])].view(shape) for name, shape in shapes.items()}
        # A buffer must not change before the device has read it: transfers use several buffers in rotation.
        buffers = [
            torch.zeros(end, dtype=torch.int32, pin_memory=device.type == "cuda")
            for _ in range(passes * STAGING_BUFFERS)
        ]
        self._staging = cycle([StagingBuffer(numbers, numbers.numpy(), {}) for numbers in buffers])

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._views[name]

    def send(self, **arrays: np.ndarray) -> None:
        """Copy inputs to the device, up to the last one given, each padded to its full size."""
        numbers, flat, cuts = next(self._staging)
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
        """Set all inputs to their padding values."""
        self.send(**dict.fromkeys(self._places, np.empty(0, np.int32)))


def shared_shapes(decodes: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the inputs for shared prefixes, which are the last ones of a step."""
    return {"prefixes": (decodes,), "parts": (decodes,), "members": (decodes,), "items": (_SHARED_ITEMS, 5)}


def fits(shared: HostSharedPrefixes | None) -> HostSharedPrefixes | None:
    """Return the shared prefixes if a captured step has room for them, else None."""
    return shared if shared is not None and len(shared.items) <= _SHARED_ITEMS else None


def shared_in(inputs: Inputs, decodes: int) -> SharedPrefixes:
    """Return the shared prefixes, for attention, from a step's inputs."""
    members, prefixes, parts = (inputs[name][:decodes] for name in ("members", "prefixes", "parts"))
    return SharedPrefixes(inputs["items"], members, prefixes, parts, MOST_PARTS * decodes)


class Captured(NamedTuple):
    """One captured step and its outputs."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    tokens: torch.Tensor | None


class Capturer:
    """Captures the steps of one engine, all in one memory pool."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KvCache,
        rows: Rows,
        max_sequences: int,
        drafts: int = 0,
        states: torch.Tensor | None = None,
    ) -> None:
        self.decoder, self.cache, self.rows = decoder, cache, rows
        self._states = states  # where steps write the hidden states that a draft head reads
        self.max_samples = max_sequences + drafts  # tokens that a step samples
        self.scratch = max_sequences  # row of the padding
        # With several ranks the tokens are chosen after the captured step: rank 0 sends them to the others.
        self.chooses = decoder.group is None
        config = decoder.config
        self._logits = torch.empty(self.max_samples, config.vocab_size, dtype=config.dtype, device=decoder.device)
        self._pool: Any = None

    def capture(self, step: Callable[[], tuple[torch.Tensor, torch.Tensor | None]]) -> Captured:
        """Capture a step that returns logits, and tokens if it chooses them itself."""
        step()  # compiles its kernels, which a capture cannot
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # With "thread_local", the threads of NCCL may call CUDA meanwhile.
        mode = "global" if self.decoder.group is None else "thread_local"
        # A collection may free the graphs of an engine that is gone, which no capture survives.
        with no_collections(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode=mode):
            logits, tokens = step()
        self._pool = self._pool or graph.pool()
        return Captured(graph, logits, tokens)

    def states(self, tokens: int) -> torch.Tensor | None:
        """Return where a step of so many tokens writes hidden states, if a draft head reads them."""
        return None if self._states is None else self._states[:tokens]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states, in the one buffer of all captured steps."""
        count = hidden.shape[0]  # a single row has its own kernel, twice as fast
        return self.decoder.logits(hidden, None if count == 1 else self._logits[:count])


class DecodeGraphs:
    """Captured decode steps, the largest first so that all smaller ones fit in its memory.

    Each size is captured twice: greedy, with the likeliest tokens, and with logits alone, for the sampler. Steps with
    shared prefixes are captured separately, when they are first needed.
    """

    def __init__(self, capturer: Capturer, passes: int = 1) -> None:
        """`passes` are the most passes of one engine step."""
        most = capturer.max_samples
        self._capturer = capturer
        self._sizes = [size for size in LADDER if size < most] + [most]
        self._changes = most * capturer.rows.groups  # of block tables that a step has room for
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("rows", "positions"), (most,))
        shapes |= dict.fromkeys(("places", "blocks"), (self._changes,)) | shared_shapes(most)
        blank = {"rows": capturer.scratch, "places": capturer.rows.scratch_entry, "blocks": capturer.rows.scratch_block}
        self._inputs = Inputs(capturer.decoder.device, shapes, blank, passes)
        self._captured: dict[tuple[int, bool, bool], Captured] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, and one with shared prefixes, so that its kernels are compiled."""
        chooses = self._capturer.chooses
        for size in reversed(self._sizes):
            if chooses:
                self._capture(size, False, True)
            self._capture(size, False, False)
        if self._capturer.rows.shares:
            self._capture(self._sizes[-1], True, chooses)

    def run(
        self, rows: np.ndarray, positions: np.ndarray, shared: HostSharedPrefixes | None, is_greedy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run one decode step; return its logits and, if it is greedy, its tokens, which it appends to their rows.

        Both are overwritten by the next step.
        """
        count = len(rows)
        size = self._sizes[bisect_left(self._sizes, count)]
        shared = fits(shared)
        if (size, shared is not None, is_greedy) not in self._captured:
            self._capture(size, shared is not None, is_greedy)
        together = {} if shared is None else shared._asdict()
        changes = self._capturer.rows.take_changes(self._changes)
        self._inputs.send(rows=rows, positions=positions, **changes, **together)
        graph, logits, tokens = self._captured[size, shared is not None, is_greedy]
        graph.replay()
        if count == size:
            return logits, tokens
        return logits[:count], None if tokens is None else tokens[:count]

    @torch.inference_mode()
    def seconds(self, size: int) -> float:
        """Time a step of so many decodes, on scratch rows."""
        rows, positions = np.full(size, self._capturer.scratch), np.zeros(size, np.int64)
        took = []
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.monotonic()
            self.run(rows, positions, None, True)
            torch.cuda.synchronize()
            took.append(time.monotonic() - start)
        return min(took)

    def _capture(self, size: int, shares: bool, is_greedy: bool) -> None:
        self._inputs.clear()
        self._captured[size, shares, is_greedy] = self._capturer.capture(lambda: self._step(size, shares, is_greedy))

    def _step(self, size: int, shares: bool, is_greedy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        capturer = self._capturer
        rows, positions = self._inputs["rows"][:size], self._inputs["positions"][:size]
        capturer.rows.change_tables(self._inputs["places"], self._inputs["blocks"])
        shared = shared_in(self._inputs, size) if shares else None
        tokens, batch = capturer.rows.gather_decodes(rows, positions, host_of(size, size), shared)
        logits = capturer.logits(capturer.decoder.forward(tokens, batch, capturer.cache, None, capturer.states(size)))
        if not is_greedy:
            return logits, None
        chosen = likeliest(logits)
        capturer.rows.put_at(rows, positions + 1, chosen)
        return logits, chosen


def host_of(decodes: int, tokens: int) -> HostBatch:
    """Return a host batch with a valid shape and dummy contents: a captured step must not depend on its contents.

    Tokens that are not decodes are one slice after them.
    """
    slices = decodes + (tokens > decodes)
    starts = np.append(np.arange(decodes + 1, dtype=np.int32), np.full(slices - decodes, tokens, np.int32))
    nothing = np.zeros(tokens, np.int64)
    return HostBatch(nothing, nothing, starts, np.ones(slices, np.int32), np.empty((slices, 0), np.int32))
