"""A forward pass on dummy inputs, to measure a step's memory and time, and to compile kernels ahead of use."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from chairlift.models.decoder import Decoder
from chairlift.ops import sampling
from chairlift.ops.batch import Batch, HostBatch, SharedPrefixes
from chairlift.ops.filters import Filters

_FEW, _SHORT, _LONG = 16, 600, 2112  # step sizes in tokens, each of which selects other kernels


@torch.inference_mode()
def dry_run(
    decoder: Decoder,
    tokens: int,
    samples: int,
    block_size: int,
    kv_dtype: torch.dtype | None = None,
    *,
    before: int = 0,
    shares: bool = False,
    draws: bool = True,
) -> None:
    """Run `tokens` tokens of one prompt over a scratch cache, in the model's dtype by default; sample `samples` rows.

    `before` tokens precede them in the context; with `shares` the kernels for shared prefixes run too. Without
    `draws` the rows take the likeliest token.
    """
    device = decoder.device
    context = before + tokens
    blocks = -(-context // block_size)
    cache = decoder.make_cache(blocks, block_size, kv_dtype)
    host = HostBatch(
        positions=np.arange(before, context),
        slots=np.arange(before, context),
        starts=np.array([0, tokens], np.int32),
        contexts=np.array([context], np.int32),
        tables=np.arange(blocks, dtype=np.int32)[None],
    )
    batch = Batch.on(device, host)
    batch.others = [batch] * (len(decoder.layout.windows) - 1)  # they overwrite each other: no result is used
    if shares:
        no_groups = torch.zeros(1, 5, dtype=torch.int32, device=device)
        batch.shared = SharedPrefixes(no_groups, no_groups[0], no_groups[0], no_groups[0], 0)
    inputs = torch.zeros(tokens, dtype=torch.int32, device=device)
    wanted = np.arange(max(0, tokens - samples), tokens)
    hidden = decoder.forward(inputs, batch, cache, decoder.select(batch, wanted))
    if not samples:
        return
    logits = decoder.logits(hidden)
    if not draws:
        sampling.likeliest(logits)
        return
    keys = torch.zeros(logits.shape[0], 2, dtype=torch.int64, device=device)
    sampling.draw(logits, torch.ones(logits.shape[0], device=device), keys, None)


def compile_kernels(decoder: Decoder, max_length: int, block_size: int, kv_dtype: torch.dtype) -> None:
    """Compile the kernels of a GPU's steps, several at a time; kernels in Triton's cache are only loaded."""

    def run(before: int, tokens: int) -> None:
        if before + tokens <= max_length:
            dry_run(decoder, tokens, 0, block_size, kv_dtype, before=before)

    def decode() -> None:
        for shares in (False, True):
            dry_run(decoder, 1, 1, block_size, kv_dtype, shares=shares)

    dtypes = {decoder.config.dtype, torch.float32}  # rules and penalties compute in float32
    chunk = 4 * _FEW
    with ThreadPoolExecutor(None if decoder.group is None else 1) as pool:  # all ranks must run in the same order
        compiling = [pool.submit(decode)]
        compiling += (pool.submit(run, 0, tokens) for tokens in (_FEW // 2, _FEW, _SHORT))
        compiling.append(pool.submit(run, _LONG - chunk, chunk))
        compiling += (pool.submit(warm_up_sampling, decoder.config.vocab_size, d, decoder.device) for d in dtypes)
        for each in compiling:
            each.result()


@torch.inference_mode()
def warm_up_sampling(vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
    """Run every sampling path once."""
    one = torch.ones(1, device=device)
    filters = Filters(one.long(), one / 2, one / 2)
    logits = torch.zeros(1, vocabulary, dtype=dtype, device=device)
    sampling.likeliest(logits)
    for each in (None, filters):
        sampling.draw(logits, one, one.long().expand(1, 2).contiguous(), each)
    history = torch.zeros(1, 1, dtype=torch.int32, device=device)
    sampling.penalize_(logits, one.long() - 1, history, one.long(), one.long(), one, one, one)
