"""Sampling: penalties, filters, noise and log-probabilities of logits [rows, vocabulary]."""

from __future__ import annotations

import torch

from chairlift.ops import sampling_cpu
from chairlift.ops.filters import NO_TOKEN, Filters
from chairlift.ops.sampling_cpu import GOLDEN, MIX1, MIX2
from chairlift.ops.triton_found import HAS_TRITON

_MASK = 0xFFFFFFFF


def is_fused(logits: torch.Tensor) -> bool:
    """Whether fused kernels sample here; they read logits of any dtype and take greedy rows too."""
    return logits.is_cuda and HAS_TRITON


def draw(logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, filters: Filters | None) -> torch.Tensor:
    """Sample a token per row at its temperature, after its filters, with the noise of its key.

    Rows at temperature 0 take the likeliest token if `is_fused`; otherwise they must not be passed.
    """
    if is_fused(logits):
        from chairlift.ops import sampling_cuda

        return sampling_cuda.draw(logits, temperature, keys, filters)
    scaled = logits / temperature[:, None]
    if filters is not None:
        scaled = keep_likeliest(scaled, *filters)
    return likeliest(scaled.add_(gumbel(keys, logits.shape[-1])))


def draw_to_rows(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    keys: torch.Tensor,
    filters: Filters | None,
    masks: torch.Tensor | None,
    into: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Sample as `draw` does where `is_fused`, after masks of allowed tokens; write tokens to (table, rows, positions).

    A filter would see tokens that the mask forbids: there must not be both.
    """
    from chairlift.ops import sampling_cuda

    return sampling_cuda.draw(logits, temperature, keys, filters, masks, into)


def penalize_(
    logits: torch.Tensor,
    which: torch.Tensor,
    history: torch.Tensor,
    prompt_lengths: torch.Tensor,
    lengths: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Lower the logits of earlier tokens: repetition counts prompt and answer, the other penalties the answer alone.

    `which` are the penalized rows of the logits. history [rows, longest] has the tokens of each; the first `lengths`
    of a row are valid.
    """
    given = history, prompt_lengths, lengths, repetition, presence, frequency
    if logits.is_cuda or logits.dtype != torch.float32:
        part = logits[which]
        penalize_reference_(part, *given)
        logits[which] = part
    else:
        arrays = (each.numpy() for each in (logits, which, *given))
        sampling_cpu.penalize(torch.get_num_threads(), *arrays)


def penalize_reference_(
    logits: torch.Tensor,
    history: torch.Tensor,
    prompt_lengths: torch.Tensor,
    lengths: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Compute penalize_ for all rows in plain torch, with counts over the whole vocabulary."""
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
    """Return the id of each row's highest logit, the first of equal ones; NO_TOKEN if no logit is above -inf."""
    if is_fused(logits):
        from chairlift.ops import sampling_cuda

        return sampling_cuda.likeliest(logits)
    if logits.is_cuda or logits.dtype != torch.float32:
        highest, ids = logits.max(-1)
        return torch.where(highest > -torch.inf, ids, NO_TOKEN)
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    sampling_cpu.likeliest(torch.get_num_threads(), logits.numpy(), out.numpy(), NO_TOKEN)
    return out


def keep_likeliest(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Return logits with -inf for tokens that min_p, top_k (0: all) or top_p drops; may change `logits` in place."""
    if logits.is_cuda:
        return keep_likeliest_reference(logits, top_k, top_p, min_p)
    arrays = (each.numpy() for each in (logits, top_k, top_p, min_p))
    sampling_cpu.keep_likeliest(torch.get_num_threads(), *arrays)
    return logits


def keep_likeliest_reference(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Compute keep_likeliest by sorting the vocabulary; top_p applies to the probabilities after top_k."""
    floor = logits.amax(-1, keepdim=True) + min_p[:, None].log()
    logits = logits.masked_fill(logits < floor, -torch.inf)
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(ordered.shape[-1], device=logits.device)
    k = torch.where(top_k > 0, top_k, logits.shape[-1])[:, None]
    kept = ordered.masked_fill(place >= k, -torch.inf)
    shares = (kept - kept.logsumexp(-1, keepdim=True)).exp()
    before = shares.cumsum(-1) - shares  # probability of all likelier tokens: the first token is always kept
    kept = kept.masked_fill((before >= top_p[:, None]) & (place > 0) & (top_p[:, None] < 1), -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter_(1, ids, kept)


def gumbel(keys: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return Gumbel noise [rows, vocabulary], a function of each row's key [rows, 2] and the token id.

    The highest logit after adding it is a sample from the softmax, without a cumulative sum.
    """
    if keys.device.type == "cpu":
        uniform = torch.empty(keys.shape[0], vocabulary)
        sampling_cpu.uniform(torch.get_num_threads(), keys.numpy(), uniform.numpy())
    else:
        uniform = uniform_reference(keys, vocabulary)
    return uniform.log_().neg_().log_().neg_()


def uniform_reference(keys: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return uniform numbers in (0, 1): a 32-bit hash of (key, token id), in plain torch."""
    x = torch.arange(vocabulary, device=keys.device)[None, :] * GOLDEN & _MASK
    x = x ^ keys[:, :1]
    x = (x ^ (x >> 16)) * MIX1 & _MASK
    x = x + keys[:, 1:] & _MASK
    x = (x ^ (x >> 15)) * MIX2 & _MASK
    x = x ^ (x >> 16)
    return ((x >> 9).float() + 0.5) * 2.0**-23


def score(
    logits: torch.Tensor, tokens: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probability and rank of the sampled tokens, and log-probabilities and ids of the `top` likeliest."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, tokens.long().clamp(max=logits.shape[-1] - 1)[:, None])  # NO_TOKEN is out of range
    rank = (logprobs > chosen).sum(-1) + 1
    values, ids = logprobs.topk(top, dim=-1)
    return chosen[:, 0], rank, values, ids


def candidates(
    logits: torch.Tensor, stops: torch.Tensor, is_stop: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and ids of each row's stop tokens and its `count` likeliest others, likeliest first.

    `stops` [rows, most] are token ids, valid where `is_stop`. Up to the last of the other tokens, the order is that of
    the whole vocabulary.
    """
    vocabulary = logits.shape[-1]
    logprobs = logits.log_softmax(-1)
    ending = logprobs.gather(1, stops).masked_fill(~is_stop, -torch.inf)
    logprobs.scatter_reduce_(1, stops, torch.where(is_stop, -torch.inf, torch.inf), "amin")
    values, ids = logprobs.topk(count, dim=-1)
    values, order = torch.cat([values, ending], -1).sort(dim=-1, descending=True, stable=True)
    ids = torch.cat([ids, stops], -1).gather(1, order)
    return values[:, :vocabulary], ids[:, :vocabulary]  # the rest is padding and banned stop tokens
