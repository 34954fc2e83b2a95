"""Swap: KV blocks in host memory, and the way there and back."""

from __future__ import annotations

import torch

from chairlift.ops.kv_cache import KvCache

Pairs = list[tuple[int, int]]


class HostBlocks:
    """Blocks of sequences that have yielded. A block lies in one piece, all layers together: one copy moves it."""

    def __init__(self, cache: KvCache, blocks: int) -> None:
        layers, _, *rest = cache.data.shape
        self._cache = cache
        self._stream = torch.cuda.Stream(cache.data.device) if cache.data.is_cuda else None  # type: ignore[no-untyped-call]
        self._data = torch.empty(blocks, layers, *rest, dtype=cache.data.dtype, pin_memory=cache.data.is_cuda)

    def move(self, saved: Pairs, copies: Pairs, restored: Pairs) -> None:
        """Blocks to the host, on the device, and from the host to the device; all are read before any is written."""
        if self._stream is None:
            returning = self._data[[source for source, _ in restored]]
            if saved:
                self._data[[target for _, target in saved]] = self._gather(saved)
        else:
            returning = self._travel(saved, restored)
        if copies:
            self._cache.copy(copies)
        if restored:
            targets = torch.tensor([target for _, target in restored], device=self._cache.data.device)
            self._cache.data[:, targets] = returning.transpose(0, 1)

    def _gather(self, saved: Pairs) -> torch.Tensor:
        sources = torch.tensor([source for source, _ in saved], device=self._cache.data.device)
        return self._cache.data[:, sources].transpose(0, 1).contiguous()

    def _travel(self, saved: Pairs, restored: Pairs) -> torch.Tensor:
        """On a GPU the copies have a stream of their own.

        Those that leave are gathered first and travel while the step computes; those that return are waited for.
        """
        stream, data = self._stream, self._cache.data
        assert stream is not None
        compute = torch.cuda.current_stream(data.device)
        leaving = self._gather(saved) if saved else data.new_empty(0)
        returning = torch.empty(len(restored), *self._data.shape[1:], dtype=data.dtype, device=data.device)
        stream.wait_stream(compute)
        with torch.cuda.stream(stream):
            # First in, then out: a host block that is read here may be written by the same step.
            for place, (source, _) in enumerate(restored):
                returning[place].copy_(self._data[source], non_blocking=True)
            arrived = stream.record_event()
            for place, (_, target) in enumerate(saved):
                self._data[target].copy_(leaving[place], non_blocking=True)
        leaving.record_stream(stream)
        returning.record_stream(stream)
        compute.wait_event(arrived)
        return returning
