"""The physical floor of a workload: a lower bound of its time, from the machine's memory bandwidth and FLOP rate.

Decoding must read the weights once per step and each sequence's keys and values once per token; prompts must be
computed. Everything else counts as free: the arithmetic of decodes, activations, sampling, launches and Python.

`bound_of` is the most that continuous batching can gain over static batching, from the answer lengths alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chairlift.traffic.workloads import Workload

if TYPE_CHECKING:
    import torch

    from chairlift.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Floor:
    """The bytes and operations that a workload needs at least."""

    read_bytes: int  # by decoding
    prompt_flops: int
    bytes_s: float  # memory bandwidth
    flops_s: float  # arithmetic rate

    @property
    def seconds(self) -> float:
        """The sum of reading and computing, which do not overlap when all requests start at once."""
        return self.read_bytes / self.bytes_s + self.prompt_flops / self.flops_s


def floor_of(
    workload: Workload,
    config: ModelConfig,
    bytes_s: float,
    flops_s: float,
    kv_dtype: torch.dtype | None = None,
    weight_bytes: int | None = None,
) -> Floor:
    """Return the floor with every request in the batch from the start, so that the longest answer sets the steps.

    A step reads `weight_bytes`, by default those of the config's format; KV is in the model's dtype by default.
    """
    from chairlift.models.families import outline

    lengths = [(query.prompt_tokens, query.output_tokens) for query in workload.queries]
    decoder, _ = outline(config)
    matrices = decoder.layer_weights
    # The prefill samples an answer's first token. Each further token needs a decode, which attends to itself and all
    # earlier tokens.
    steps = max(count for _, count in lengths) - 1
    contexts = sum((count - 1) * (prompt - workload.shared) + count * (count - 1) // 2 for prompt, count in lengths)
    # A group's shared prefix is read once per step, and computed once.
    groups = [lengths[i : i + workload.group] for i in range(0, len(lengths), workload.group)]
    contexts += workload.shared * sum(max(count for _, count in group) - 1 for group in groups)
    read = steps * (weight_bytes or decoder.read_bytes) + contexts * decoder.kv_bytes_per_token(kv_dtype)
    attention = 4 * decoder.query_width  # operations per (token, earlier token) pair
    # Operations on 16-bit numbers, or half as many in the same time if they are 8-bit numbers.
    product = matrices if config.format is not None and config.format.multiplies_8_bits else 2 * matrices
    flops = sum(product * prompt + attention * (prompt * (prompt + 1) // 2) for prompt, _ in lengths)
    saved = product * workload.shared + attention * (workload.shared * (workload.shared + 1) // 2)
    return Floor(read, flops - saved * (len(lengths) - len(groups)), bytes_s, flops_s)


@dataclass(frozen=True, slots=True)
class Bound:
    """Forward passes of static and continuous batching with equal batch sizes, all requests present from the start."""

    static: int  # each batch runs as long as its longest answer
    continuous: int  # at least: full batches throughout, and one pass per token of the longest answer

    @property
    def ratio(self) -> float:
        """The largest possible gain; prompts longer than a step can change it slightly."""
        return self.static / self.continuous


def bound_of(lengths: Sequence[int], batch_size: int) -> Bound:
    """Return the bound for answers of these lengths.

    >>> bound_of([1, 8, 1, 8], batch_size=2)
    Bound(static=16, continuous=9)
    """
    static = sum(max(lengths[start : start + batch_size]) for start in range(0, len(lengths), batch_size))
    return Bound(static, max(max(lengths), -(-sum(lengths) // batch_size)))
