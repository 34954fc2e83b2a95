"""The flat batch of one step: which tokens belong to whom, and where their keys and values lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

_ALIGNED = 64  # numbers: kernels are compiled for addresses that are multiples of 16 bytes

# What ops take and give: a torch tensor, or a NumPy array where compiled CPU kernels run. A layer makes six calls, and
# to turn tensors into arrays and back in each would cost more than the calls do.
Array = torch.Tensor | np.ndarray


class HostBatch(NamedTuple):
    """The batch in main memory."""

    positions: np.ndarray  # [tokens] each token's place in its sequence
    slots: np.ndarray  # [tokens] where its key and value go: block * block_size + offset
    starts: np.ndarray  # [slices + 1] the slices' bounds in the batch
    contexts: np.ndarray  # [slices] tokens of the sequence up to the slice's end
    tables: np.ndarray  # [slices, blocks] physical blocks in order


@dataclass(frozen=True, slots=True)
class Shared:
    """Which decodes of a batch begin with the same blocks and read them together, on the device."""

    items: torch.Tensor  # [items, 5]: first of its members, how many (0: nothing), first and last key, part
    members: torch.Tensor  # decodes, those of a group one after the other
    prefixes: torch.Tensor  # [decodes] how many tokens each need not read by itself
    parts: torch.Tensor  # [decodes] in how many items these are read
    slots: int  # results of all items for all their members, at most


@dataclass(slots=True)
class Batch:
    """The batch on its device, and as it was in main memory: on the CPU they are the same bytes."""

    positions: torch.Tensor
    slots: torch.Tensor
    contexts: torch.Tensor  # in a recorded step 0 for what is no decode
    tables: torch.Tensor
    host: HostBatch
    decodes: int = field(init=False)  # slices of a single token, before the first longer one
    longest_prompt: int = field(init=False)  # what any of the others sees at most
    shared: Shared | None = None
    cut: torch.Tensor | None = None  # tiles that stand already, in a recorded step
    work: dict[int, Any] = field(default_factory=dict)  # by window: how decode_cuda divides the decodes
    _tiles: dict[tuple[int, int], tuple[torch.Tensor, list[tuple[int, int]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.decodes = count_decodes(self.host.starts)
        self.longest_prompt = int(self.host.contexts[self.decodes :].max(initial=0))

    def tiles(self, tokens: int, long: int) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """What cut_prompts gives, on the device; made by the first layer that asks, for all."""
        if self.cut is not None:
            return self.cut, []
        if (tokens, long) not in self._tiles:
            found, whole = cut_prompts(self.host.starts, self.host.contexts, tokens, long)
            self._tiles[tokens, long] = send(self.tables.device, found)[0], whole
        return self._tiles[tokens, long]

    def only(self, chosen: np.ndarray) -> Wanted:
        """Some of the batch's tokens, each as if it were decoded alone."""
        host, device = self.host, self.tables.device
        piece = np.searchsorted(host.starts, chosen, side="right") - 1
        contexts = host.positions[chosen] + 1
        starts = np.arange(chosen.size + 1, dtype=np.int32)
        tables = np.ascontiguousarray(host.tables[piece])
        picked = HostBatch(host.positions[chosen], host.slots[chosen], starts, contexts.astype(np.int32), tables)
        return Wanted(chosen, send(device, chosen)[0].long(), Batch.on(device, picked))

    @staticmethod
    def on(device: torch.device, host: HostBatch) -> Batch:
        """Send a batch to its device."""
        positions, slots, contexts, tables = send(device, host.positions, host.slots, host.contexts, host.tables)
        return Batch(positions, slots, contexts, tables, host)


class Wanted(NamedTuple):
    """Tokens of a batch whose last hidden states are asked for."""

    host: np.ndarray  # which
    on_device: torch.Tensor  # the same there
    batch: Batch  # of them alone


def count_decodes(starts: np.ndarray) -> int:
    """Slices of a single token before the first longer one."""
    longer = np.flatnonzero(np.diff(starts) > 1)
    return int(longer[0]) if longer.size else starts.size - 1


def cut_prompts(
    starts: np.ndarray, contexts: np.ndarray, tokens: int, long: int = 1 << 30
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """The slices behind the decodes, cut into tiles of so many tokens, those with the most to see first.

    [tiles, 4]: each one's slice, first token in the batch, the position of that, and how many tokens it has. Apart from
    them, as bounds in the batch, the prompts that are at least `long` and here from their first token on.
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


def send(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Arrays of whole numbers on a device: to a GPU in one transfer, as int32, that nobody waits for.

    A larger transfer from memory that is not pinned would wait until the device has done all that it was given.
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
