"""The physical floor equals the published figures in published cases."""

from __future__ import annotations

import math

import pytest

from chairlift.costs.floor import floor_of
from chairlift.models.config import ModelConfig
from chairlift.models.families import outline, read_config
from chairlift.models.shapes import SHAPES
from chairlift.traffic.workloads import NAMED, Workload

READ, FLOPS = 4.24e12, 790e12  # one H200, as measured


# The published figures are rounded to three digits; uniform512's is 0.2% below ours.
@pytest.mark.parametrize(
    ("shape", "workload", "published"),
    [
        ("qwen3-0.6b", "uniform256", 35_900),
        ("qwen3-0.6b", "uniform512", 37_100),
        ("qwen3-0.6b", "single", 3_480),
        ("llama-3.1-8b", "uniform256", 13_500),
        ("llama-3.1-8b", "single", 282),
    ],
)
def test_output_tokens_a_second_at_the_floor(shape: str, workload: str, published: float) -> None:
    made = NAMED[workload]()
    floor = floor_of(made, read_config(SHAPES[shape], device="cuda"), READ, FLOPS)
    assert made.output_tokens / floor.seconds == pytest.approx(published, rel=0.003)


@pytest.mark.parametrize(("shape", "published"), [("qwen3-0.6b", 434_000), ("llama-3.1-8b", 49_000)])
def test_prompt_tokens_a_second_at_the_floor(shape: str, published: float) -> None:
    made = NAMED["prefill8k"]()
    floor = floor_of(made, read_config(SHAPES[shape], device="cuda"), READ, FLOPS)
    assert floor.read_bytes == 0, "the prefill samples the one token of each answer"
    assert made.prompt_tokens / floor.seconds == pytest.approx(published, rel=0.003)


def weights_of(config: ModelConfig) -> tuple[int, int]:
    decoder, _ = outline(config)
    return decoder.layer_weights, math.prod(decoder.head.shape)


def test_each_part_by_hand() -> None:
    config = read_config(SHAPES["stories15m"])
    matrices, head = weights_of(config)
    assert matrices == 6 * (4 * 288 * 288 + 3 * 288 * 768) and head == 32000 * 288
    floor = floor_of(Workload.of("two", [[1] * 3, [1]], [1, 4]), config, 1.0, 1.0)
    kv = 2 * 6 * 288 * 4
    assert floor.read_bytes == 3 * 4 * (matrices + head) + (2 + 3 + 4) * kv
    assert floor.prompt_flops == 2 * matrices * 4 + 4 * 6 * 288 * (6 + 1)
    assert floor.seconds == floor.read_bytes + floor.prompt_flops


def test_a_shared_prefix_counts_once_per_group() -> None:
    config = read_config(SHAPES["stories15m"])
    matrices, _ = weights_of(config)
    apart = Workload.of("two", [[1] * 13, [1] * 15], [3, 4])
    together = Workload.of("two", apart.prompts, apart.outputs, group=2, shared=10)
    whole, less = (floor_of(each, config, 1.0, 1.0) for each in (apart, together))
    assert whole.read_bytes - less.read_bytes == 2 * 10 * 2 * 6 * 288 * 4  # two steps in which both decode
    assert whole.prompt_flops - less.prompt_flops == 2 * matrices * 10 + 4 * 6 * 288 * 55


@pytest.mark.parametrize(("quantization", "bits"), [("fp8", 8), ("int8", 8 + 16 / 128), ("int4", 4 + 16 / 128)])
def test_quantized_weights_count_with_their_bytes(quantization: str, bits: float) -> None:
    config = read_config(SHAPES["llama-3.1-8b"], device="cuda", quantization=quantization)
    matrices, head = weights_of(config)
    floor = floor_of(Workload.of("one", [[1]], [2]), config, 1.0, 1.0)
    outputs = 32 * (6144 + 4096 + 2 * 14336 + 4096) * 4 if quantization == "fp8" else 0  # a float32 scale of each
    kv = 2 * outline(config)[0].kv_bytes_per_token()
    assert floor.read_bytes == matrices * bits / 8 + outputs + head * 2 + kv
    plain = floor_of(Workload.of("one", [[1]], [2]), read_config(SHAPES["llama-3.1-8b"], device="cuda"), 1.0, 1.0)
    halved = 2 * matrices / 2 if quantization == "fp8" else 0
    assert plain.prompt_flops - floor.prompt_flops == halved, "products in 8 bits take half the time"


def test_narrow_kv_counts_with_its_bytes() -> None:
    import torch

    config, made = read_config(SHAPES["llama-3.1-8b"], device="cuda"), NAMED["uniform256"]()
    plain, narrow = (floor_of(made, config, 1.0, 1.0, dtype).read_bytes for dtype in (None, torch.int8))
    weights = outline(config)[0].read_bytes * (max(made.outputs) - 1)
    assert (narrow - weights) / (plain - weights) == pytest.approx((128 + 2) / 256)


def test_the_bytes_of_the_loaded_weights_replace_those_of_the_config() -> None:
    config, made = read_config(SHAPES["stories15m"]), Workload.of("one", [[1]], [4])
    own = outline(config)[0].read_bytes
    plain, loaded = (floor_of(made, config, 1.0, 1.0, None, each).read_bytes for each in (None, 1000))
    assert plain - loaded == 3 * (own - 1000), "three decodes read them"
