"""The physical floor equals the published figures in published cases."""

from __future__ import annotations

import pytest

from chairlift.costs.floor import floor_of, weights_of
from chairlift.models.families import read_config
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
