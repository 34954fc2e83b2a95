"""The physical floor of a workload: the time that no engine can beat on a machine that reads and multiplies so fast.

Decoding must read the weights once a step and each sequence's keys and values once a token; prompts must be multiplied
through. Everything else is counted as free: the arithmetic of decodes, activations, sampling, launches and Python.

And the most that continuous batching can gain over static batching, from the answers' lengths alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chairlift.traffic.workloads import Workload

if TYPE_CHECKING:
    from chairlift.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Floor:
    """What a workload takes at least."""

    read_bytes: int  # by decoding
    prompt_flops: int
    bytes_s: float  # that the machine reads
    flops_s: float  # that it multiplies and adds

    @property
    def seconds(self) -> float:
        """Reading and multiplying one after the other, as they are in a batch that is there all at once."""
        return self.read_bytes / self.bytes_s + self.prompt_flops / self.flops_s


def floor_of(workload: Workload, config: ModelConfig, bytes_s: float, flops_s: float) -> Floor:
    """The floor with every request in the batch from the start, so that the longest answer gives the steps."""
    from chairlift.models.families import outline

    lengths = [(query.prompt_tokens, query.output_tokens) for query in workload.queries]
    decoder, _ = outline(config)
    matrices, head = weights_of(config)
    # An answer's first token comes with its prompt. For each further one the last is fed in, which sees itself and all
    # that stands before it.
    steps = max(count for _, count in lengths) - 1
    contexts = sum((count - 1) * (prompt - workload.shared) + count * (count - 1) // 2 for prompt, count in lengths)
    # What a group shares is read once in each step, and multiplied through once.
    groups = [lengths[i : i + workload.group] for i in range(0, len(lengths), workload.group)]
    contexts += workload.shared * sum(max(count for _, count in group) - 1 for group in groups)
    read = steps * (matrices + head) * config.dtype.itemsize + contexts * decoder.kv_bytes_per_token()
    attention = 4 * decoder.query_width  # operations for a token and one that it sees
    flops = sum(2 * matrices * prompt + attention * (prompt * (prompt + 1) // 2) for prompt, _ in lengths)
    saved = 2 * matrices * workload.shared + attention * (workload.shared * (workload.shared + 1) // 2)
    return Floor(read, flops - saved * (len(lengths) - len(groups)), bytes_s, flops_s)


def weights_of(config: ModelConfig) -> tuple[int, int]:
    """How many weights a token is multiplied by: in all layers, and once more where it is sampled."""
    from chairlift.models.families import outline

    decoder, _ = outline(config)
    return decoder.layer_weights, math.prod(decoder.head.shape)


@dataclass(frozen=True, slots=True)
class Bound:
    """Forward passes with equal batches, all requests there from the start, in the order they came."""

    static: int  # each batch lasts as long as its longest answer
    continuous: int  # at least: no seat is ever empty, and the longest answer takes as many passes as it has tokens

    @property
    def ratio(self) -> float:
        """The most that can be gained; prompts longer than a step can shift it a little."""
        return self.static / self.continuous


def bound_of(lengths: Sequence[int], seats: int) -> Bound:
    """The bound for answers of these lengths.

    >>> bound_of([1, 8, 1, 8], seats=2)
    Bound(static=16, continuous=9)
    """
    static = sum(max(lengths[start : start + seats]) for start in range(0, len(lengths), seats))
    return Bound(static, max(max(lengths), -(-sum(lengths) // seats)))
