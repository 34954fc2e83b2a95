"""The paged KV cache: its layout, writing to it, and copying blocks.

One tensor [layers, blocks, 2, kv_heads, dim * block_size]. In a block, keys lie transposed [dim, block_size], so that
the scores of a whole block are one vector operation for each element of a query, and values [block_size, dim].
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit


class KvCache:
    """The blocks of all layers."""

    def __init__(
        self,
        layers: int,
        blocks: int,
        kv_heads: int,
        dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (layers, blocks, 2, kv_heads, dim * block_size)
        # Zeros, not empty: a kernel may read the unwritten tail of a block, and 0 times its weight must be 0, not NaN.
        if device.type == "cpu":
            # NumPy takes zeroed pages from the system: memory that is not used yet costs neither time nor RAM.
            raw = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
            self.data = torch.from_numpy(raw).view(dtype).view(shape)
        else:
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.blocks, self.kv_heads, self.dim, self.block_size = blocks, kv_heads, dim, block_size

    def keys(self, layer: int) -> torch.Tensor:
        """[blocks, kv_heads, dim, block_size]"""
        return self.data[layer, :, 0].view(self.blocks, self.kv_heads, self.dim, self.block_size)

    def values(self, layer: int) -> torch.Tensor:
        """[blocks, kv_heads, block_size, dim]"""
        return self.data[layer, :, 1].view(self.blocks, self.kv_heads, self.block_size, self.dim)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks in all layers; every source is read before any target is written."""
        sources, targets = torch.tensor(pairs, device=self.data.device).T
        self.data[:, targets] = self.data[:, sources]


def write_kv(cache: KvCache, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Put keys and values [tokens, kv_heads, dim] at `slots` (block * block_size + offset)."""
    if keys.device.type == "cpu" and keys.dtype == torch.float32:
        _write(cache.data[layer].numpy(), keys.numpy(), values.numpy(), slots.numpy(), cache.block_size)
    else:
        write_kv_reference(cache, layer, keys, values, slots)


def write_kv_reference(
    cache: KvCache, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """The same in plain torch."""
    block, offset = slots // cache.block_size, slots % cache.block_size
    cache.keys(layer)[block, :, :, offset] = keys
    cache.values(layer)[block, :, offset] = values


@njit(nogil=True, cache=True)
def _write(data: np.ndarray, keys: np.ndarray, values: np.ndarray, slots: np.ndarray, block_size: int) -> None:
    tokens, heads, dim = keys.shape
    for token in range(tokens):
        block, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(heads):
            for i in range(dim):
                data[block, 0, head, i * block_size + offset] = keys[token, head, i]
                data[block, 1, head, offset * dim + i] = values[token, head, i]
