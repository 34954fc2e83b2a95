"""A forward pass for nobody: it shows what memory a step takes, and has every kernel compiled before it is needed."""

from __future__ import annotations

import numpy as np
import torch

from chairlift.models.decoder import Decoder
from chairlift.ops import sampling
from chairlift.ops.batch import Batch, HostBatch
from chairlift.ops.kv_cache import KvCache


@torch.inference_mode()
def dry_run(decoder: Decoder, tokens: int, samples: int, block_size: int, kv_dtype: torch.dtype | None = None) -> None:
    """One prompt of so many tokens over a scratch cache, in the model's own dtype by default; so many rows sampled."""
    config, device = decoder.config, decoder.device
    blocks = -(-tokens // block_size)
    cache = KvCache(
        config.layers,
        blocks,
        config.kv_heads,
        config.head_dim,
        block_size,
        kv_dtype or config.dtype,
        device,
        compiled=decoder.is_compiled,
    )
    host = HostBatch(
        positions=np.arange(tokens),
        slots=np.arange(tokens),
        starts=np.array([0, tokens], np.int32),
        contexts=np.array([tokens], np.int32),
        tables=np.arange(blocks, dtype=np.int32)[None],
    )
    inputs = torch.zeros(tokens, dtype=torch.int32, device=device)
    wanted = torch.arange(min(samples, tokens), device=device)
    logits = decoder.logits(decoder.forward(inputs, Batch.on(device, host), cache, wanted))
    keys = torch.zeros(logits.shape[0], 2, dtype=torch.int64, device=device)
    sampling.likeliest(logits.add_(sampling.gumbel(keys, logits.shape[-1])))
