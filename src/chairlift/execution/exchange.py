"""BlockExchange: copies KV blocks between the cache and memory outside it, in slots of one block each."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count

import torch

from chairlift.core.step import Moves
from chairlift.ops.kv_cache import KvCache

REGION_SLOTS = 1 << 20  # a slot's number is that of its region times this, and its place in the region

Freed = Callable[[list[int]], None]


class BlockExchange:
    """The slots are in regions, each a tensor [slots, layers, ...] in host memory or on the device.

    A slot holds a block of all layers, contiguous, so that it can be sent as it is.
    """

    def __init__(self, cache: KvCache) -> None:
        layers, _, *rest = cache.data.shape
        self.shape = (layers, *rest)
        self.block_bytes = math.prod(self.shape) * cache.data.dtype.itemsize
        self.device, self.dtype = cache.data.device, cache.dtype
        self.is_transposed = bool(cache.arrays)  # the layout of the compiled CPU kernels
        self._cache = cache
        self._regions: dict[int, tuple[torch.Tensor, Freed]] = {}
        self._numbers = count(1)
        self._stream = torch.cuda.Stream(self.device) if cache.data.is_cuda else None  # type: ignore[no-untyped-call]

    def add_region(self, raw: torch.Tensor, freed: Freed) -> int:
        """Add memory of whole slots; return the number of its first slot. Any thread may call this.

        `freed` is called in the engine's thread with the places of slots that steps have read.
        """
        number = next(self._numbers)
        self._regions[number] = self.view(raw), freed
        return number * REGION_SLOTS

    def drop_region(self, first: int) -> None:
        """Forget a region: no step in flight or to come reads or writes its slots."""
        self._regions.pop(first // REGION_SLOTS, None)

    def free(self, slots: list[int]) -> None:
        """Give slots that steps have read back to the owners of their regions."""
        places: dict[int, list[int]] = {}
        for slot in slots:
            places.setdefault(slot // REGION_SLOTS, []).append(slot % REGION_SLOTS)
        for number, found in places.items():
            self._regions[number][1](found)

    def view(self, raw: torch.Tensor) -> torch.Tensor:
        """Return bytes as blocks [slots, layers, ...]."""
        return raw.view(self._cache.data.dtype).view(-1, *self.shape)

    def receive(self, moves: Moves) -> None:
        """Copy slots into blocks of the cache, before the pass of a step."""
        data = self._cache.data
        if not data.is_cuda:
            for slot, block in moves:
                data[:, block] = self._at(slot)
            return
        # The copies to the device are queued one by one; blocks are then scattered over all layers at once.
        incoming = torch.stack([self._at(slot).to(data.device, non_blocking=True) for slot, _ in moves])
        targets = torch.tensor([block for _, block in moves]).to(data.device, non_blocking=True)
        data[:, targets] = incoming.transpose(0, 1)

    def send(self, moves: Moves) -> None:
        """Copy blocks of the cache to slots, before a step overwrites them."""
        self._gather([block for block, _ in moves], [self._at(slot) for _, slot in moves])

    def copy_out(self, blocks: list[int], slots: list[torch.Tensor]) -> torch.Event | None:
        """Copy computed blocks to slots beside the steps in flight; return an event that completes with the copies.

        Steps launched from now on wait for it: they may write the blocks.
        """
        if self._stream is None:
            self._gather(blocks, slots)
            return None
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._gather(blocks, slots)
            done = torch.Event(self.device)
            done.record(self._stream)
        torch.cuda.current_stream(self.device).wait_event(done)
        return done

    def _gather(self, blocks: list[int], slots: list[torch.Tensor]) -> None:
        data = self._cache.data
        if not data.is_cuda:
            for block, slot in zip(blocks, slots, strict=True):
                slot.copy_(data[:, block])
            return
        sources = torch.tensor(blocks).to(data.device, non_blocking=True)
        gathered = data[:, sources].transpose(0, 1).contiguous()
        for slot, block in zip(slots, gathered, strict=True):
            slot.copy_(block, non_blocking=True)

    def _at(self, slot: int) -> torch.Tensor:
        number, place = divmod(slot, REGION_SLOTS)
        return self._regions[number][0][place]
