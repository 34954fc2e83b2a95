"""Choosing the next token: penalties, filters, noise and log-probabilities of a [rows, vocabulary] batch."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba import njit, prange

from chairlift.ops.filters import Filters
from chairlift.ops.triton_found import HAS_TRITON

_CANDIDATES = 1024  # on the CPU, top-p looks at this many tokens before it sorts the whole vocabulary
_MASK = 0xFFFFFFFF
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B9, 0x7FEB352D, 0x846CA68B


def is_fused(logits: torch.Tensor) -> bool:
    """Whether choosing is one pass of compiled kernels here, which read logits in any dtype and skip greedy rows."""
    return logits.is_cuda and HAS_TRITON


def draw(logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, filters: Filters | None) -> torch.Tensor:
    """A token of each row, drawn at its temperature from what its filters leave, with its key's noise.

    At temperature 0 it is the likeliest where choosing is fused; elsewhere such rows must not be given.
    """
    if is_fused(logits):
        from chairlift.ops import sampling_cuda

        return sampling_cuda.draw(logits, temperature, keys, filters)
    scaled = logits / temperature[:, None]
    if filters is not None:
        scaled = keep_likeliest(scaled, *filters)
    return likeliest(scaled.add_(gumbel(keys, logits.shape[-1])))


def penalize_(
    logits: torch.Tensor,
    history: torch.Tensor,
    prompt_lengths: torch.Tensor,
    lengths: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Push down tokens already seen: repetition counts prompt and answer, the other two the answer alone.

    history [rows, longest] holds each row's tokens, of which the first `lengths` are real.
    """
    place = torch.arange(history.shape[1], device=logits.device)
    is_real = place < lengths[:, None]
    is_output = is_real & (place >= prompt_lengths[:, None])
    ids = history.long().masked_fill(~is_real, 0)
    seen = torch.zeros_like(logits).scatter_add_(1, ids, is_real.to(logits.dtype)) > 0
    counts = torch.zeros_like(logits).scatter_add_(1, ids, is_output.to(logits.dtype))
    factor = repetition[:, None]
    logits.copy_(torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits))
    logits.sub_(frequency[:, None] * counts).sub_(presence[:, None] * (counts > 0))


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The id of each row's highest logit, the first of equals."""
    if is_fused(logits):
        from chairlift.ops import sampling_cuda

        return sampling_cuda.likeliest(logits)
    if logits.is_cuda or logits.dtype != torch.float32:
        return logits.argmax(-1)
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    _likeliest(logits.numpy(), out.numpy(), torch.get_num_threads())
    return out


@njit(nogil=True, parallel=True, cache=True)
def _likeliest(logits: np.ndarray, out: np.ndarray, threads: int) -> None:
    rows, vocabulary = logits.shape
    for thread in prange(threads):
        for row in range(thread, rows, threads):
            best = _peak(logits, row)
            found = 0
            while found < vocabulary - 1 and logits[row, found] != best:
                found += 1
            out[row] = found


@njit(nogil=True, fastmath={"reassoc", "nsz"})
def _peak(logits: np.ndarray, row: int) -> Any:
    best = logits[row, 0]
    for i in range(logits.shape[1]):
        best = max(best, logits[row, i])
    return best


def keep_likeliest(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Logits with -inf for all that min_p, then top_k (0: all), then top_p leave out."""
    floor = logits.amax(-1, keepdim=True) + min_p[:, None].log()
    logits = logits.masked_fill(logits < floor, -torch.inf)
    if logits.is_cuda:
        return keep_likeliest_reference(logits, top_k, top_p)
    return _keep_candidates(logits, top_k, top_p) if bool(((top_k > 0) | (top_p < 1)).any()) else logits


def keep_likeliest_reference(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """top_k and top_p by sorting the whole vocabulary."""
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    return _cut(logits, ordered, ids, top_k, top_p, None)


def _keep_candidates(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The same from the likeliest few; only rows whose mass is not covered by them are sorted whole."""
    width = min(_CANDIDATES, logits.shape[-1])
    ordered, ids = logits.topk(width, dim=-1)
    total = logits.logsumexp(-1, keepdim=True)
    out = _cut(logits, ordered, ids, top_k, top_p, total)
    mass = (ordered - total).exp().sum(-1)
    is_short = ~(((top_k > 0) & (top_k <= width)) | (mass >= top_p)) & (width < logits.shape[-1])
    if bool(is_short.any()):
        out[is_short] = keep_likeliest_reference(logits[is_short], top_k[is_short], top_p[is_short])
    return out


def _cut(
    logits: torch.Tensor,
    ordered: torch.Tensor,
    ids: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    total: torch.Tensor | None,
) -> torch.Tensor:
    """Put what survives of the ordered candidates back in its place; top_p measures shares of what top_k left."""
    place = torch.arange(ordered.shape[-1], device=logits.device)
    k = torch.where(top_k > 0, top_k, logits.shape[-1])[:, None]
    kept = ordered.masked_fill(place >= k, -torch.inf)
    norm = kept.logsumexp(-1, keepdim=True)
    if total is not None:
        norm = torch.where(k < logits.shape[-1], norm, total)
    shares = (kept - norm).exp()
    before = shares.cumsum(-1) - shares  # the mass of all likelier tokens: the first always stays
    kept = kept.masked_fill((before >= top_p[:, None]) & (place > 0) & (top_p[:, None] < 1), -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter_(1, ids, kept)


def gumbel(keys: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Gumbel noise [rows, vocabulary] that depends on each row's key [rows, 2] and the token id alone.

    The likeliest token after adding it is a draw from the softmax: sampling without a cumulative sum.
    """
    if keys.device.type == "cpu":
        uniform = torch.empty(keys.shape[0], vocabulary)
        _uniform(keys.numpy(), uniform.numpy(), torch.get_num_threads())
    else:
        uniform = uniform_reference(keys, vocabulary)
    return uniform.log_().neg_().log_().neg_()


def uniform_reference(keys: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Uniform numbers in (0, 1) by hashing (key, token id) with 32-bit arithmetic, in plain torch."""
    x = torch.arange(vocabulary, device=keys.device)[None, :] * _GOLDEN & _MASK
    x = x ^ keys[:, :1]
    x = (x ^ (x >> 16)) * _MIX1 & _MASK
    x = x + keys[:, 1:] & _MASK
    x = (x ^ (x >> 15)) * _MIX2 & _MASK
    x = x ^ (x >> 16)
    return ((x >> 9).float() + 0.5) * 2.0**-23


@njit(nogil=True, parallel=True, cache=True)
def _uniform(keys: np.ndarray, out: np.ndarray, threads: int) -> None:
    rows, vocabulary = out.shape
    for thread in prange(threads):
        for row in range(rows):
            first, second = numba.uint32(keys[row, 0]), numba.uint32(keys[row, 1])
            for i in range(vocabulary * thread // threads, vocabulary * (thread + 1) // threads):
                x = numba.uint32(numba.uint32(i) * numba.uint32(_GOLDEN)) ^ first
                x = numba.uint32((x ^ (x >> numba.uint32(16))) * numba.uint32(_MIX1))
                x = numba.uint32(x + second)
                x = numba.uint32((x ^ (x >> numba.uint32(15))) * numba.uint32(_MIX2))
                x = x ^ (x >> numba.uint32(16))
                out[row, i] = (numba.float32(x >> numba.uint32(9)) + numba.float32(0.5)) * numba.float32(2.0**-23)


def score(
    logits: torch.Tensor, tokens: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of chosen tokens: log-probability and rank; of the `top` likeliest: log-probabilities and ids."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, tokens.long()[:, None])
    rank = (logprobs > chosen).sum(-1) + 1
    values, ids = logprobs.topk(top, dim=-1)
    return chosen[:, 0], rank, values, ids
