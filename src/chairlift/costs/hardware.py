"""The cost model of hardware that one does not have: published figures, and the shares of them that our kernels reach.

The shares were measured on an H200 with Qwen3-0.6B and Llama-3.1-8B (docs/performance.md) and are assumed elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot

from chairlift.core.cost import Cost
from chairlift.core.errors import ChairliftError

_READ = 0.88  # of the memory bandwidth, by weights and KV
_PRODUCTS = 0.69  # of the dense FLOP rate, by large matrix products
_ATTENTION = 0.46  # of the dense FLOP rate, by the attention of prompts
_LAYER = 16.5e-6  # seconds of a layer's attention, norms and rotation beyond their bytes, in a captured step
_LATENCY = 24e-6  # seconds of a layer's matrix products, however small; one row has faster kernels
_SAMPLE_PASSES = 4  # times that the logits of a sample are written or read
_REDUCE = 10e-6  # seconds of an all-reduce of few bytes: assumed, not measured
_ACTIVATIONS = 20  # vectors of the hidden size per token of the largest step, in 16 bits: a rough bound
_KEPT = 0.9  # share of memory that weights and KV may use


@dataclass(frozen=True, slots=True)
class Chip:
    """The published figures of an accelerator."""

    memory: float  # bytes
    read: float  # bytes per second
    flops: float  # dense 16-bit operations per second
    link: float  # bytes per second to its neighbours, one way
    host: float = 25e9  # bytes per second from and to the host


CHIPS = {
    "a100": Chip(80e9, 2.039e12, 312e12, 300e9),
    "h100": Chip(80e9, 3.35e12, 989e12, 450e9, 50e9),
    "h200": Chip(141e9, 4.8e12, 989e12, 450e9, 50e9),
    "b200": Chip(180e9, 8.0e12, 2250e12, 900e9, 50e9),
    "l40s": Chip(48e9, 0.864e12, 362e12, 32e9),
    "mi300x": Chip(192e9, 5.3e12, 1307e12, 448e9, 50e9),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model in the numbers that decide its speed."""

    layers: int
    layer_weights: int  # elements of all layers' matrices
    read_bytes: int  # of all layers' matrices and the head, in their formats
    embedding_bytes: int  # beside the head's, if they are not the same
    query_width: int  # elements of a token's queries in all layers
    hidden: int
    vocabulary: int
    max_length: int
    kv_bytes: int  # of a token in all layers

    @property
    def bytes(self) -> int:
        """The bytes of all weights."""
        return self.read_bytes + self.embedding_bytes


def chip(name: str) -> Chip:
    """Return a chip by its name."""
    if name not in CHIPS:
        raise ChairliftError(f"there is no hardware {name!r}: use {', '.join(CHIPS)}, or a file of `chairlift profile`")
    return CHIPS[name]


def cost_of(shape: Shape, on: Chip, ranks: int = 1, block_size: int = 32) -> Cost:
    """Return the cost model of a step: reading at the chip's bandwidth, computing at its FLOP rate, split over ranks.

    Each layer of a divided model has two all-reduces of its activations.
    """
    read, products, attention = _READ * on.read * ranks, _PRODUCTS * on.flops * ranks, _ATTENTION * on.flops * ranks
    moved = 2 * 2 * shape.hidden * (ranks - 1) / ranks / on.link if ranks > 1 else 0.0  # per token and layer
    return Cost(
        fixed=shape.layers * (_LAYER + (2 * _REDUCE if ranks > 1 else 0.0)),
        weights=hypot(shape.read_bytes / read, shape.layers * _LATENCY),
        token=2 * shape.layer_weights / products + 2 * shape.layers * moved,
        context=shape.kv_bytes / read,
        pair=4 * shape.query_width / attention,
        sample=_SAMPLE_PASSES * 2 * shape.vocabulary / (_READ * on.read),
        block_copy=block_size * shape.kv_bytes / ranks / on.host,
    )


def kv_tokens(shape: Shape, on: Chip, ranks: int = 1, step_tokens: int = 8192) -> int:
    """Return the tokens of KV that fit beside the weights; an error if not even one long request does."""
    activations = 2 * step_tokens * shape.hidden * _ACTIVATIONS
    free = _KEPT * on.memory - shape.bytes / ranks - activations
    fitting = int(free * ranks / shape.kv_bytes)
    if fitting < 1024:
        raise ChairliftError(
            f"the weights take {shape.bytes / ranks / 1e9:,.1f} GB of each device's {on.memory / 1e9:,.0f} GB, which "
            "leaves no room for a KV cache: use more ranks, fewer bits a weight or larger devices"
        )
    return fitting
