"""Swap: KV blocks in host memory and in a file, and the copies between them and the device."""

from __future__ import annotations

import os
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch

from chairlift.core.errors import SettingsError
from chairlift.core.step import Moves, Step
from chairlift.ops.kv_cache import KvCache


class HostBlocks:
    """Swapped and evicted blocks in host memory. A block is contiguous, with all layers, so that one copy moves it."""

    def __init__(self, cache: KvCache, blocks: int, disk: DiskBlocks | None = None) -> None:
        layers, _, *rest = cache.data.shape
        self._cache = cache
        self._disk = disk
        self._stream = torch.cuda.Stream(cache.data.device) if cache.data.is_cuda else None  # type: ignore[no-untyped-call]
        self._data = torch.empty(blocks, layers, *rest, dtype=cache.data.dtype, pin_memory=cache.data.is_cuda)

    def move(self, step: Step) -> None:
        """Make all block copies of a step, also on the device; every block is read before it is overwritten."""
        device = self._cache.data.device
        loaded = self._spill_and_load(step.spilled, step.loaded) if step.spilled or step.loaded else None
        if self._stream is None:
            incoming = self._data[[source for source, _ in step.restored]]
            if step.saved:
                self._data[[target for _, target in step.saved]] = self._gather(step.saved)
        else:
            incoming = self._copy_on_stream(step.saved, step.restored)
        if step.copies:
            self._cache.copy(step.copies)
        for pairs, blocks in ((step.restored, incoming), (step.loaded, loaded)):
            if pairs and blocks is not None:
                targets = torch.tensor([target for _, target in pairs], device=device)
                self._cache.data[:, targets] = blocks.to(device).transpose(0, 1)

    def _spill_and_load(self, spilled: Moves, loaded: Moves) -> torch.Tensor | None:
        """Write blocks from host memory to the file, and return the loaded blocks; waits for copies to the host."""
        assert self._disk is not None, "a plan that spills needs a file"
        if self._stream is not None:
            self._stream.synchronize()
        incoming = None
        if loaded:
            raw = np.stack([self._disk.data[source] for source, _ in loaded])
            incoming = torch.from_numpy(raw).view(self._data.dtype).view(len(loaded), *self._data.shape[1:])
        for source, target in spilled:
            self._disk.put(target, self._data[source].contiguous().view(torch.uint8).numpy())
        return incoming

    def _gather(self, saved: Moves) -> torch.Tensor:
        sources = torch.tensor([source for source, _ in saved], device=self._cache.data.device)
        return self._cache.data[:, sources].transpose(0, 1).contiguous()

    def _copy_on_stream(self, saved: Moves, restored: Moves) -> torch.Tensor:
        """Copy blocks to and from a GPU on a separate stream.

        Saved blocks are gathered first and copied while the step computes; the step waits for restored blocks.
        """
        stream, data = self._stream, self._cache.data
        assert stream is not None
        compute = torch.cuda.current_stream(data.device)
        gathered = self._gather(saved) if saved else data.new_empty(0)
        incoming = torch.empty(len(restored), *self._data.shape[1:], dtype=data.dtype, device=data.device)
        stream.wait_stream(compute)
        with torch.cuda.stream(stream):
            # Restore before saving: the step may save to a host block that it restores from.
            for place, (source, _) in enumerate(restored):
                incoming[place].copy_(self._data[source], non_blocking=True)
            arrived = stream.record_event()
            for place, (_, target) in enumerate(saved):
                self._data[target].copy_(gathered[place], non_blocking=True)
        gathered.record_stream(stream)
        incoming.record_stream(stream)
        compute.wait_event(arrived)
        return incoming


class DiskBlocks:
    """Blocks in an unnamed file that the process's end deletes; a checksum per block detects damage."""

    def __init__(self, folder: Path, blocks: int, block_bytes: int) -> None:
        size = blocks * block_bytes
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error now, not a crash under load
                self.data = np.memmap(file, np.uint8, "r+", shape=(blocks, block_bytes))
        except OSError as error:
            raise SettingsError(
                f"no file of {size / (1 << 30):,.1f} GiB for cached blocks can be made in {folder} ({error.strerror}): "
                "choose another disk_cache or lower disk_tokens"
            ) from None
        self._sums = [0] * blocks

    def put(self, slot: int, raw: np.ndarray) -> None:
        """Write a block."""
        self.data[slot] = raw.reshape(-1)
        self._sums[slot] = zlib.crc32(self.data[slot])

    def is_sound(self, slot: int) -> bool:
        """Whether a block's checksum is that of the written data."""
        return zlib.crc32(self.data[slot]) == self._sums[slot]
