"""The flat batch of one step: its tokens by slice, and the location of their keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

_ALIGNED = 64  # elements: kernels are compiled for addresses that are multiples of 16 bytes

# Inputs and outputs of ops: torch tensors, or NumPy arrays for compiled CPU kernels. A layer makes six calls, and
# converting tensors to arrays and back in each would cost more than the calls.
Array = torch.Tensor | np.ndarray


class HostBatch(NamedTuple):
    """The batch in host memory."""

    positions: np.ndarray  # [tokens] position in the sequence
    slots: np.ndarray  # [tokens] where the key and value are written: block * block_size + offset
    starts: np.ndarray  # [slices + 1] bounds of the slices in the batch
    contexts: np.ndarray  # [slices] tokens of the sequence up to the end of the slice
    tables: np.ndarray  # [slices, blocks] block table of each slice


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Groups of decodes with a common prefix of blocks, which attention reads once per group; on the device."""

    items: torch.Tensor  # [items, 5]: first member, number of members (0: padding), first and last key, part
    members: torch.Tensor  # decodes, ordered by group
    prefixes: torch.Tensor  # [decodes] tokens that shared items read for it
    parts: torch.Tensor  # [decodes] number of shared items that read them
    slots: int  # upper bound of the partial results of all shared items


@dataclass(slots=True)
class Batch:
    """The batch on its device, and its copy in host memory; on a CPU they share memory."""

    positions: torch.Tensor
    slots: torch.Tensor
    contexts: torch.Tensor  # in a captured step 0 for slices that are not decodes
    tables: torch.Tensor
    host: HostBatch
    decodes: int = field(init=False)  # number of one-token slices before the first longer one
    longest_prompt: int = field(init=False)  # longest context of the other slices
    shared: SharedPrefixes | None = None
    cut: torch.Tensor | None = None  # tiles that a captured step reads, in place of `tiles`
    others: list[Batch] = field(default_factory=list)  # the batch for layers with other block tables, by group from 1
    decode_work: dict[int, Any] = field(default_factory=dict)  # by window: the DecodeWork of decode_cuda
    _tiles: dict[tuple[int, int], tuple[torch.Tensor, list[tuple[int, int]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.decodes = count_decodes(self.host.starts)
        self.longest_prompt = int(self.host.contexts[self.decodes :].max(initial=0))

    def tiles(self, tokens: int, long: int) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """Return cut_prompts' result on the device; the first layer computes it for all layers."""
        if self.cut is not None:
            return self.cut, []
        if (tokens, long) not in self._tiles:
            found, whole = cut_prompts(self.host.starts, self.host.contexts, tokens, long)
            self._tiles[tokens, long] = to_device(self.tables.device, found)[0], whole
        return self._tiles[tokens, long]

    def beside(self, slots: torch.Tensor, tables: torch.Tensor, *, host: HostBatch | None = None) -> Batch:
        """Return the same batch with other block tables; work that depends on the contexts alone is computed once."""
        return replace(self, slots=slots, tables=tables, host=host or self.host, others=[])

    def only(self, chosen: np.ndarray) -> SampledTokens:
        """Select tokens of the batch, each as a decode of its own."""
        host, device = self.host, self.tables.device
        piece = np.searchsorted(host.starts, chosen, side="right") - 1
        contexts = host.positions[chosen] + 1
        starts = np.arange(chosen.size + 1, dtype=np.int32)
        tables = np.ascontiguousarray(host.tables[piece])
        picked = HostBatch(host.positions[chosen], host.slots[chosen], starts, contexts.astype(np.int32), tables)
        return SampledTokens(chosen, to_device(device, chosen)[0].long(), Batch.on(device, picked))

    @staticmethod
    def on(device: torch.device, host: HostBatch) -> Batch:
        """Copy a batch to its device."""
        positions, slots, contexts, tables = to_device(device, host.positions, host.slots, host.contexts, host.tables)
        return Batch(positions, slots, contexts, tables, host)


class SampledTokens(NamedTuple):
    """Tokens of a batch that need a final hidden state."""

    host: np.ndarray  # their places in the batch
    on_device: torch.Tensor  # the same on the device
    batch: Batch  # a batch of these tokens alone


def count_decodes(starts: np.ndarray) -> int:
    """Count the one-token slices before the first longer one."""
    longer = np.flatnonzero(np.diff(starts) > 1)
    return int(longer[0]) if longer.size else starts.size - 1


def cut_prompts(
    starts: np.ndarray, contexts: np.ndarray, tokens: int, long: int = 1 << 30
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Cut the slices after the decodes into tiles of up to `tokens` tokens, ordered by position, highest first.

    Return [tiles, 4]: slice, first token in the batch, its position, number of tokens; and, not cut, the bounds in the
    batch of prompts of at least `long` tokens that begin at position 0.
    """
    counts = np.diff(starts)
    behind = np.arange(contexts.size) >= count_decodes(starts)
    is_whole = behind & (counts == contexts) & (counts >= long)
    cut = np.flatnonzero(behind & ~is_whole)
    tiles = -(-counts[cut] // tokens)
    piece = np.repeat(cut, tiles)
    first = (np.arange(piece.size) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tokens
    position = contexts[piece] - counts[piece] + first
    found = np.stack([piece, starts[piece] + first, position, np.minimum(counts[piece] - first, tokens)], axis=1)
    whole = [(int(starts[i]), int(starts[i + 1])) for i in np.flatnonzero(is_whole)]
    return found[np.argsort(-position, kind="stable")].astype(np.int32), whole


def to_device(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Copy integer arrays to a device: to a GPU as int32, in one asynchronous transfer.

    From memory that is not pinned, a larger transfer would wait until the device has finished its queued work.
    """
    if device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    ends = np.cumsum([-(-array.size // _ALIGNED) * _ALIGNED for array in arrays]).tolist()
    pinned = torch.empty(ends[-1], dtype=torch.int32, pin_memory=True)
    flat = pinned.numpy()
    for array, end in zip(arrays, ends, strict=True):
        begin = end - -(-array.size // _ALIGNED) * _ALIGNED
        flat[begin : begin + array.size] = array.ravel()
    found = pinned.to(device, non_blocking=True)
    begins = [0, *ends[:-1]]
    return [found[begin : begin + each.size].view(each.shape) for begin, each in zip(begins, arrays, strict=True)]
