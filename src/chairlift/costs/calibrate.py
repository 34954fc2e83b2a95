"""The initial cost model of this machine, from a few steps timed at start; the engine corrects it as it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from chairlift.core.cost import Cost
from chairlift.costs.dry_run import dry_run
from chairlift.models.decoder import Decoder
from chairlift.ops.kv_cache import KvCache

_MANY = 128  # tokens of a step that is bound by arithmetic, not by reading the weights
_MOVED = 8  # blocks per timed copy


def calibrate(decoder: Decoder, cache: KvCache, tokens: int = _MANY) -> Cost:
    """Time a step of one token and one of many, and a copy of a few blocks; kernels must have been compiled."""
    one, many = (_seconds(decoder, count, cache) for count in (1, tokens))
    token = many / tokens
    # Attention's cost by its operations: 4 per element of a pair, where a token has 2 per weight.
    pair = token * 4 * decoder.query_width / (2 * decoder.layer_weights)
    return Cost(
        fixed=0.05 * one, weights=one, token=token, context=2 * pair, pair=pair, block_copy=_copy_seconds(cache)
    )


def time_checks(decoder: Decoder, cache: KvCache, sizes: Sequence[int]) -> list[tuple[int, float]]:
    """Time steps of some sizes that sample each of their tokens, as a check of drafts does.

    The sizes take turns, so that other load affects all of them, and the first turn does not count.
    """
    turns = [[_seconds(decoder, size, cache, samples=size, repeat=1) for size in sizes] for _ in range(4)]
    return list(zip(sizes, map(min, zip(*turns[1:], strict=True)), strict=True))


def _seconds(decoder: Decoder, tokens: int, cache: KvCache, samples: int = 1, repeat: int = 2) -> float:
    took = []
    for _ in range(repeat):
        _synchronize(decoder.device)
        start = time.monotonic()
        dry_run(decoder, tokens, samples, block_size=cache.block_size, kv_dtype=cache.dtype, draws=repeat > 1)
        _synchronize(decoder.device)
        took.append(time.monotonic() - start)
    return min(took)


def _copy_seconds(cache: KvCache) -> float:
    """Time the copy of one block to the host; an overestimate, with pageable memory and no overlap."""
    moved = min(_MOVED, cache.blocks)
    cache.data[:, :moved].cpu().clone()
    start = time.monotonic()
    cache.data[:, :moved].cpu().clone()
    return (time.monotonic() - start) / moved


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
