"""The paged KV cache: its layout, writing to it, and copying blocks.

One tensor [layers, blocks, 2, kv_heads, dim * block_size]. In a block, values lie as [block_size, dim], and so do keys;
but for the compiled CPU kernels keys lie transposed [dim, block_size], so that the scores of a whole block are one
vector operation for each element of a query.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit

from chairlift.ops.batch import Batch
from chairlift.ops.tile import prefetch

_LINE = 64  # bytes in a cache line


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
        *,
        compiled: bool | None = None,
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
        is_compiled = device.type == "cpu" and dtype == torch.float32 if compiled is None else compiled
        # What compiled kernels see, made once: asking torch for it in every layer of every step takes its time.
        self.arrays = [layer.numpy() for layer in self.data] if is_compiled else []

    def keys(self, layer: int) -> torch.Tensor:
        """[blocks, kv_heads, dim, block_size]"""
        data = self.data[layer, :, 0]
        if self.arrays:
            return data.view(self.blocks, self.kv_heads, self.dim, self.block_size)
        return data.view(self.blocks, self.kv_heads, self.block_size, self.dim).transpose(-1, -2)

    def values(self, layer: int) -> torch.Tensor:
        """[blocks, kv_heads, block_size, dim]"""
        return self.data[layer, :, 1].view(self.blocks, self.kv_heads, self.block_size, self.dim)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks in all layers; every source is read before any target is written."""
        sources, targets = torch.tensor(pairs, device=self.data.device).T
        self.data[:, targets] = self.data[:, sources]


def write_kv_reference(cache: KvCache, layer: int, qkv: torch.Tensor, batch: Batch) -> None:
    """Put the keys and values, the last heads of qkv [tokens, heads, dim], where the batch says."""
    keys, values = qkv[:, -2 * cache.kv_heads :].chunk(2, dim=1)
    block, offset = batch.slots // cache.block_size, batch.slots % cache.block_size
    cache.keys(layer)[block, :, :, offset] = keys
    cache.values(layer)[block, :, offset] = values


@njit(nogil=True, error_model="numpy")
def put(data: np.ndarray, qkv: np.ndarray, slots: np.ndarray, block_size: int, first: int, last: int) -> None:
    """The same for the tokens first..last and one layer's blocks, compiled; for calls from other kernels."""
    dim, heads = qkv.shape[2], data.shape[2]
    queries = qkv.shape[1] - 2 * heads
    at, pitch = data.ctypes.data, 2 * heads * dim * block_size * 4
    for token in range(first, last):
        # A key is scattered over as many cache lines as it has elements: have the next token's on their way.
        if token + 1 < last and slots[token + 1] != slots[token] + 1:
            begin = at + slots[token + 1] // block_size * pitch
            for line in range(begin, begin + pitch // 2, _LINE):
                prefetch(line)
        block, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(heads):
            for i in range(dim):
                data[block, 0, head, i * block_size + offset] = qkv[token, queries + head, i]
            for i in range(dim):
                data[block, 1, head, offset * dim + i] = qkv[token, queries + heads + head, i]
