"""The size of the KV cache, from the memory that is free after a forward pass."""

from __future__ import annotations

import os
from bisect import bisect_right
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from chairlift.core.cache_groups import CacheGroups
from chairlift.core.errors import CapacityError
from chairlift.core.limits import Limits
from chairlift.core.words import counted
from chairlift.costs.dry_run import dry_run
from chairlift.models.config import ModelConfig
from chairlift.models.decoder import Decoder

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Capacity:
    """The size of the KV cache."""

    blocks: int
    block_bytes: int  # in the layers of one group
    bytes_per_token: int  # in all layers
    groups: CacheGroups
    max_length: int
    ranks: int = 1  # each has all blocks, and in them its own KV heads

    @property
    def block_size(self) -> int:
        """The number of tokens in a block."""
        return self.groups.block_size

    @property
    def tokens(self) -> int:
        """The number of tokens that fit; if layers have a window, in sequences of max_length after their prefill."""
        if self.groups.is_plain:
            return self.blocks * self.block_size
        return self.blocks * self.max_length // replace(self.groups, chunk=1).blocks_of(self.max_length)

    @property
    def kv_tokens(self) -> int:
        """The number of tokens that fit in all layers without regard to windows, as the setting counts."""
        return self.blocks // len(self.groups.windows) * self.block_size

    def __str__(self) -> str:
        full = self.tokens // self.max_length
        size = self.blocks * self.block_bytes / _MIB
        requests = counted(full, "request")
        each = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.tokens:,} tokens ({size:,.0f} MiB{each}), {requests} of the full {self.max_length:,} tokens"


def require_memory(config: ModelConfig, weights: int, max_length: int, device: torch.device, ranks: int = 1) -> None:
    """Raise CapacityError, before anything is allocated, if the weights and rotary tables do not fit in memory.

    All are those of one rank; on a CPU each rank may use its share of the memory.
    """
    rotary = 6 * max_length * config.head_dim  # angles, cos and sin of head_dim / 2 frequencies in float32
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory() // ranks
    if weights + rotary > free:
        raise CapacityError(
            f"the weights take {weights / _MIB:,.0f} MiB and the rotary tables of max_length {max_length:,} tokens "
            f"{rotary / _MIB:,.0f} MiB, but {free / _MIB:,.0f} MiB are free: use a smaller model or lower max_length"
        )


def plan_capacity(
    decoder: Decoder,
    limits: Limits,
    block_size: int,
    kv_dtype: torch.dtype,
    kv_tokens: int | None,
    memory_share: float,
    beside: int = 0,
) -> Capacity:
    """Return the capacity for `kv_tokens`, or for the free memory; CapacityError if one full request does not fit.

    Several ranks all have the number of blocks that fits on each of them. `beside` are the bytes that a draft model's
    cache needs for each block.
    """
    windows, own_bytes = decoder.layout.windows, decoder.kv_bytes_per_block(block_size, kv_dtype)
    per_block = own_bytes + beside
    groups = CacheGroups(windows, block_size, limits.step_tokens)
    needed = groups.blocks_of(limits.max_length)
    # The blocks of a full batch of full-length sequences, and a few that admission keeps free.
    useful = limits.max_sequences * needed * 102 // 100 + 1
    group = decoder.group
    if group is not None:
        group.least(0)  # waits until all ranks have loaded their weights
    free = _free_bytes(decoder, limits, block_size, kv_dtype, memory_share)
    free = free if group is None else group.least(free)
    if kv_tokens is not None:
        blocks = len(windows) * -(-kv_tokens // block_size)
        if blocks * per_block > free:
            raise CapacityError(
                f"a KV cache of {kv_tokens:,} tokens takes {blocks * per_block / _MIB:,.0f} MiB and "
                f"{free / _MIB:,.0f} MiB are free for it: lower kv_tokens or use a smaller model"
            )
    else:
        blocks = min(useful, max(0, free) // per_block)
    if blocks < needed:
        longest = bisect_right(range(limits.max_length), blocks, key=groups.blocks_of) - 1
        raise CapacityError(
            f"one request of max_length {limits.max_length:,} tokens needs "
            f"{needed * per_block / _MIB:,.0f} MiB of KV cache, but there is room for {longest:,} "
            f"tokens: set max_length to {longest:,} or less, or give the cache more memory"
        )
    per_token, ranks = decoder.kv_bytes_per_token(kv_dtype), 1 if group is None else group.size
    return Capacity(blocks, own_bytes, per_token, groups, limits.max_length, ranks)


def _free_bytes(decoder: Decoder, limits: Limits, block_size: int, kv_dtype: torch.dtype, memory_share: float) -> int:
    """Return the bytes that the cache may take beside the activations of the largest step."""
    if decoder.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(decoder.device)
        before = torch.cuda.memory_allocated(decoder.device)
        dry_run(decoder, min(limits.step_tokens, limits.max_length), limits.max_samples, block_size, kv_dtype)
        torch.cuda.synchronize(decoder.device)
        peak = torch.cuda.max_memory_allocated(decoder.device) - before
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(decoder.device)
        # Twice: captured steps have their own memory pool, beside that of steps that are not captured.
        return int(free - total * (1 - memory_share)) - 2 * peak
    ranks = 1 if decoder.group is None else decoder.group.size  # they share the host's memory
    return int(available_memory() * memory_share) // ranks - activation_bytes(decoder, limits)


def activation_bytes(decoder: Decoder, limits: Limits) -> int:
    """Return the bytes of the largest step's activations: a few copies of the widest ones, and the logits."""
    config = decoder.config
    inner = max(block.mlp.down.shape[1] + 2 * block.attention.qkv.shape[0] for block in decoder.blocks)
    width = config.hidden_size * 3 + inner
    return 4 * (limits.step_tokens * width + limits.max_samples * config.vocab_size * 3)


def available_memory() -> int:
    """Return the bytes of host memory that are free without swapping, within the container's limit if there is one."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            available = min(available, int(limit) - used)
    except (OSError, ValueError):
        pass
    return available
