"""Choosing the next token: penalties, filters, noise and log-probabilities of a [rows, vocabulary] batch."""

from __future__ import annotations

import torch

from chairlift.ops import sampling_cpu
from chairlift.ops.filters import NOTHING, Filters
from chairlift.ops.sampling_cpu import GOLDEN, MIX1, MIX2
from chairlift.ops.triton_found import HAS_TRITON

_MASK = 0xFFFFFFFF


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
    which: torch.Tensor,
    history: torch.Tensor,
    prompt_lengths: torch.Tensor,
    lengths: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Push down tokens already seen: repetition counts prompt and answer, the other two the answer alone.

    `which` rows of the logits are meant. history [rows, longest] holds the tokens of each of these, of which the first
    `lengths` are real.
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
    """Do the same to all rows, with counts of the whole vocabulary."""
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
    """The id of each row's highest logit, the first of equals; NOTHING where no logit is above -inf."""
    if is_fused(logits):
        from chairlift.ops import sampling_cuda

        return sampling_cuda.likeliest(logits)
    if logits.is_cuda or logits.dtype != torch.float32:
        highest, ids = logits.max(-1)
        return torch.where(highest > -torch.inf, ids, NOTHING)
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    sampling_cpu.likeliest(torch.get_num_threads(), logits.numpy(), out.numpy(), NOTHING)
    return out


def keep_likeliest(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Logits with -inf for all that min_p, then top_k (0: all), then top_p leave out; those given may be changed."""
    if logits.is_cuda:
        return keep_likeliest_reference(logits, top_k, top_p, min_p)
    arrays = (each.numpy() for each in (logits, top_k, top_p, min_p))
    sampling_cpu.keep_likeliest(torch.get_num_threads(), *arrays)
    return logits


def keep_likeliest_reference(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Do the same by sorting the whole vocabulary; top_p measures shares of what top_k left."""
    floor = logits.amax(-1, keepdim=True) + min_p[:, None].log()
    logits = logits.masked_fill(logits < floor, -torch.inf)
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(ordered.shape[-1], device=logits.device)
    k = torch.where(top_k > 0, top_k, logits.shape[-1])[:, None]
    kept = ordered.masked_fill(place >= k, -torch.inf)
    shares = (kept - kept.logsumexp(-1, keepdim=True)).exp()
    before = shares.cumsum(-1) - shares  # the mass of all likelier tokens: the first always stays
    kept = kept.masked_fill((before >= top_p[:, None]) & (place > 0) & (top_p[:, None] < 1), -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter_(1, ids, kept)


def gumbel(keys: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Gumbel noise [rows, vocabulary] that depends on each row's key [rows, 2] and the token id alone.

    The likeliest token after adding it is a draw from the softmax: sampling without a cumulative sum.
    """
    if keys.device.type == "cpu":
        uniform = torch.empty(keys.shape[0], vocabulary)
        sampling_cpu.uniform(torch.get_num_threads(), keys.numpy(), uniform.numpy())
    else:
        uniform = uniform_reference(keys, vocabulary)
    return uniform.log_().neg_().log_().neg_()


def uniform_reference(keys: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Uniform numbers in (0, 1) by hashing (key, token id) with 32-bit arithmetic, in plain torch."""
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
    """Of chosen tokens: log-probability and rank; of the `top` likeliest: log-probabilities and ids."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, tokens.long().clamp(max=logits.shape[-1] - 1)[:, None])  # which NOTHING is beyond
    rank = (logprobs > chosen).sum(-1) + 1
    values, ids = logprobs.topk(top, dim=-1)
    return chosen[:, 0], rank, values, ids


def candidates(
    logits: torch.Tensor, stops: torch.Tensor, is_stop: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row's stops and the `count` likeliest other tokens: log-probabilities and ids, the likeliest first.

    The stops [rows, most] are token ids, real where `is_stop`. Up to the last of the other tokens, the order is that of
    the whole vocabulary.
    """
    vocabulary = logits.shape[-1]
    logprobs = logits.log_softmax(-1)
    ending = logprobs.gather(1, stops).masked_fill(~is_stop, -torch.inf)
    logprobs.scatter_reduce_(1, stops, torch.where(is_stop, -torch.inf, torch.inf), "amin")
    values, ids = logprobs.topk(count, dim=-1)
    values, order = torch.cat([values, ending], -1).sort(dim=-1, descending=True, stable=True)
    ids = torch.cat([ids, stops], -1).gather(1, order)
    return values[:, :vocabulary], ids[:, :vocabulary]  # behind them is what is no token: filled-up or banned stops
