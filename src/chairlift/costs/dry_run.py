"""A forward pass for nobody: it shows what memory a step takes, and has every kernel compiled before it is needed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from chairlift.models.decoder import Decoder
from chairlift.ops import sampling
from chairlift.ops.batch import Batch, HostBatch, Shared
from chairlift.ops.filters import Filters

_FEW, _SHORT, _LONG = 16, 600, 2112  # tokens of steps that run kernels of their own


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
) -> None:
    """So many tokens of one prompt over a scratch cache, in the model's own dtype by default; so many rows sampled.

    There may be others `before` them, and they may go through the kernels for sequences that read together.
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
    if shares:
        nobody = torch.zeros(1, 5, dtype=torch.int32, device=device)
        batch.shared = Shared(nobody, nobody[0], nobody[0], nobody[0], 0)
    inputs = torch.zeros(tokens, dtype=torch.int32, device=device)
    wanted = np.arange(max(0, tokens - samples), tokens)
    hidden = decoder.forward(inputs, batch, cache, batch.only(wanted))
    if not samples:
        return
    logits = decoder.logits(hidden)
    keys = torch.zeros(logits.shape[0], 2, dtype=torch.int64, device=device)
    sampling.draw(logits, torch.ones(logits.shape[0], device=device), keys, None)


def compile_kernels(decoder: Decoder, max_length: int, block_size: int, kv_dtype: torch.dtype) -> None:
    """Have what steps of a GPU need compiled, several kernels at a time; where that was done before, it is read."""

    def run(before: int, tokens: int) -> None:
        if before + tokens <= max_length:
            dry_run(decoder, tokens, 0, block_size, kv_dtype, before=before)

    def decode() -> None:
        for shares in (False, True):
            dry_run(decoder, 1, 1, block_size, kv_dtype, shares=shares)

    dtypes = {decoder.config.dtype, torch.float32}  # rules and penalties compute in float32
    chunk = 4 * _FEW
    with ThreadPoolExecutor() as pool:
        under_way = [pool.submit(decode)]
        under_way += (pool.submit(run, 0, tokens) for tokens in (_FEW // 2, _FEW, _SHORT))
        under_way.append(pool.submit(run, _LONG - chunk, chunk))
        under_way += (pool.submit(warm_up_sampling, decoder.config.vocab_size, d, decoder.device) for d in dtypes)
        for each in under_way:
            each.result()


@torch.inference_mode()
def warm_up_sampling(vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
    """Choose a token in every way there is."""
    one = torch.ones(1, device=device)
    filters = Filters(one.long(), one / 2, one / 2)
    logits = torch.zeros(1, vocabulary, dtype=dtype, device=device)
    sampling.likeliest(logits)
    for each in (None, filters):
        sampling.draw(logits, one, one.long().expand(1, 2).contiguous(), each)
    history = torch.zeros(1, 1, dtype=torch.int32, device=device)
    sampling.penalize_(logits, one.long() - 1, history, one.long(), one.long(), one, one, one)
