"""The paged KV cache: its layout, writes, and copies of blocks.

One tensor [layers, blocks, 2, kv_heads, dim * block_size]. Within a block, keys and values are [block_size, dim]; for
the compiled CPU kernels keys are transposed to [dim, block_size], so that the scores of a whole block are one vector
operation per element of a query. In 8 bits (kv_quant.py) the tokens' scales follow the codes, so that copying a block
copies both. If layers are in groups with block tables of their own (models/cache_layout.py), a block belongs to one
group, and layers of different groups share a place in the first dimension.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np
import torch
from numba import njit

from chairlift.ops.batch import Batch
from chairlift.ops.kv_quant import CONTAINERS, SCALE_BYTES, dequantize_reference, quantize_reference, store
from chairlift.ops.tile import prefetch

_LINE = 64  # bytes in a cache line


def bytes_per_token(layers: int, kv_heads: int, dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    return 2 * layers * kv_heads * (dim * dtype.itemsize + (SCALE_BYTES if dtype in CONTAINERS else 0))


class KvCache:
    """The KV blocks of all layers."""

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
        """Allocate the blocks; dtype int8 or float8_e4m3fn holds 8-bit codes, `compiled` is the CPU kernels' layout."""
        stored, is_narrow = CONTAINERS.get(dtype, dtype), dtype in CONTAINERS
        shape = (layers, blocks, 2, kv_heads, block_size * (dim + SCALE_BYTES if is_narrow else dim))
        # Zeros, not empty: a kernel may read the unwritten end of a block, and 0 times its value must be 0, not NaN.
        if device.type == "cpu":
            self.data = torch.from_numpy(_zeroed(math.prod(shape) * stored.itemsize)).view(stored).view(shape)
        else:
            self.data = torch.zeros(shape, dtype=stored, device=device)
        # [layers, blocks, 2, kv_heads, block_size]
        self.scales = self.data[..., block_size * dim :].view(torch.bfloat16) if is_narrow else None
        self.dtype, self.blocks, self.kv_heads, self.dim, self.block_size = dtype, blocks, kv_heads, dim, block_size
        is_compiled = device.type == "cpu" and dtype == torch.float32 if compiled is None else compiled
        # Arrays for the compiled kernels, made once: converting in every layer of every step costs time.
        self.arrays = [layer.numpy() for layer in self.data] if is_compiled else []
        self.scale_arrays: list[np.ndarray | None] = [None] * layers
        if self.arrays and self.scales is not None:
            self.scale_arrays = [layer.view(torch.int16).numpy() for layer in self.scales]

    def stored_keys(self, layer: int) -> torch.Tensor:
        """Return a view [blocks, kv_heads, dim, block_size] of the stored keys."""
        data = self.data[layer, :, 0, :, : self.dim * self.block_size]
        if self.arrays:
            return data.view(self.blocks, self.kv_heads, self.dim, self.block_size)
        return data.view(self.blocks, self.kv_heads, self.block_size, self.dim).transpose(-1, -2)

    def stored_values(self, layer: int) -> torch.Tensor:
        """Return a view [blocks, kv_heads, block_size, dim] of the stored values."""
        data = self.data[layer, :, 1, :, : self.dim * self.block_size]
        return data.view(self.blocks, self.kv_heads, self.block_size, self.dim)

    def keys(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Return the keys of some blocks, [blocks, kv_heads, dim, block_size]; 8-bit ones as float32."""
        found = self.stored_keys(layer)[blocks]
        if self.scales is None:
            return found
        return dequantize_reference(found, self.scales[layer, blocks, 0].unsqueeze(-2), self.dtype)

    def values(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Return the values of some blocks, [blocks, kv_heads, block_size, dim]; 8-bit ones as float32."""
        found = self.stored_values(layer)[blocks]
        if self.scales is None:
            return found
        return dequantize_reference(found, self.scales[layer, blocks, 1].unsqueeze(-1), self.dtype)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks in all layers; every source is read before any target is written."""
        sources, targets = torch.tensor(pairs, device=self.data.device).T
        self.data[:, targets] = self.data[:, sources]


def _zeroed(size: int) -> np.ndarray:
    """Return zeroed pages of the system: memory that is not touched costs neither time nor RAM.

    NumPy would ask for pages of 2 MiB, of which the first token takes one in each layer.
    """
    is_unix = hasattr(mmap, "MAP_PRIVATE")
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if is_unix else mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def write_kv_reference(cache: KvCache, layer: int, qkv: torch.Tensor, batch: Batch) -> None:
    """Write the keys and values, the last heads of qkv [tokens, heads, dim], to the batch's slots."""
    written = qkv[:, -2 * cache.kv_heads :]
    block, offset = batch.slots // cache.block_size, batch.slots % cache.block_size
    if cache.scales is not None:
        written, scales = quantize_reference(written, cache.dtype)
        cache.scales[layer].view(cache.blocks, -1, cache.block_size)[block, :, offset] = scales
    keys, values = written.chunk(2, dim=1)
    cache.stored_keys(layer)[block, :, :, offset] = keys
    cache.stored_values(layer)[block, :, offset] = values


@njit(nogil=True, error_model="numpy")
def store_kv(
    data: np.ndarray,
    scales: np.ndarray | None,
    qkv: np.ndarray,
    slots: np.ndarray,
    block_size: int,
    first: int,
    last: int,
) -> None:
    """Write the keys and values of tokens first..last to one layer's blocks; compiled, for calls from other kernels.

    Numba decides by the type of `scales` and compiles only one of the two branches.
    """
    dim, heads = qkv.shape[2], data.shape[2]
    queries = qkv.shape[1] - 2 * heads
    at, pitch = data.ctypes.data, 2 * heads * data.shape[3] * data.itemsize
    for token in range(first, last):
        # A key is scattered over as many cache lines as it has elements: prefetch the next token's.
        if token + 1 < last and slots[token + 1] != slots[token] + 1:
            begin = at + slots[token + 1] // block_size * pitch
            for line in range(begin, begin + pitch // 2, _LINE):
                prefetch(line)
        block, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(heads):
            key, value = queries + head, queries + heads + head
            if scales is None:
                for i in range(dim):
                    data[block, 0, head, i * block_size + offset] = qkv[token, key, i]
                for i in range(dim):
                    data[block, 1, head, offset * dim + i] = qkv[token, value, i]
            else:
                store(qkv[token, key], data, scales, block, 0, head, offset, offset, block_size)
                store(qkv[token, value], data, scales, block, 1, head, offset, offset * dim, 1)
