"""Gemma 2 and 3, in which some layers have a window: blocks behind it are freed, and no token changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from chairlift import LLM, SamplingParams
from chairlift.core.errors import CapacityError
from chairlift.models.blocks import CacheSpec
from chairlift.models.cache_layout import CacheLayout
from test_greedy import continue_with_transformers, likeliest_after
from tiny import make_tiny_model

WINDOW = 24
GEMMAS: dict[str, dict[str, Any]] = {
    "Gemma2ForCausalLM": {"num_hidden_layers": 4, "attn_logit_softcapping": 5.0},
    "Gemma3ForCausalLM": {"num_hidden_layers": 12},
}
GROUPS = {"Gemma2ForCausalLM": (0, WINDOW), "Gemma3ForCausalLM": (0, *[WINDOW] * 5)}
ANSWER = 60
GREEDY = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)


@pytest.fixture(scope="module", params=GEMMAS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    config = {"sliding_window": WINDOW, "query_pre_attn_scalar": 20, **GEMMAS[request.param]}
    folder = tmp_path_factory.mktemp("windows")
    return request.param, make_tiny_model(folder, request.param, tokenizer=False, spread_norms=True, **config)


def words(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(384) for _ in range(count)]


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


WAYS: dict[str, dict[str, Any]] = {
    "chunked": {"step_tokens": 40},
    "chunked, overlapped": {"step_tokens": 40, "overlap": True},
    "preempted": {"step_tokens": 40, "kv_tokens": 208},
    "preempted, swapped": {"step_tokens": 40, "kv_tokens": 208, "preemption": "swap", "overlap": True},
}


@pytest.mark.long
def test_long_prompts_with_common_prefixes_equal_transformers_far_past_the_window(model: tuple[str, Path]) -> None:
    """Ten windows long. Later prompts begin as earlier ones and leave them at several places; the last are whole."""
    name, folder = model
    draw = random.Random(5)
    first = words(draw, 10 * WINDOW)
    prompts = [first, first[:200] + words(draw, 30), first[:64] + words(draw, 70), words(draw, 50), first, first[:201]]
    prompts += [words(draw, 9), words(draw, 11), words(draw, 13)]  # these grow together, until memory runs out
    reference = load(folder)
    plain = LLM(str(folder), progress=False, max_length=320, prefix_cache=False).generate(prompts, GREEDY)
    expected = [result.outputs[0].token_ids for result in plain]
    for prompt, answer in zip(prompts, expected, strict=True):
        assert likeliest_after(reference, prompt, answer) == answer
    assert continue_with_transformers(reference, prompts[1], ANSWER) == expected[1]
    for way, settings in WAYS.items():
        llm = LLM(str(folder), progress=False, max_length=320, max_sequences=9, **settings)
        scheduler = llm.engine.scheduler
        assert scheduler.memory.groups.windows == GROUPS[name]
        assert [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in prompts] == expected, way
        cached = scheduler.counters.cached_tokens
        assert cached >= 400 or "preempted" in way, f"{way}: {cached} tokens of common prefixes were found"
        together = [result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY)]
        assert together == expected, way
        assert (scheduler.counters.preemptions > 0) == ("preempted" in way), way
        scheduler.check()
        assert scheduler.pool.owned == 0


def test_siblings_and_beams_equal_the_same_answers_alone(model: tuple[str, Path]) -> None:
    _, folder = model
    prompt = words(random.Random(6), 100)
    llm = LLM(str(folder), progress=False, max_length=320, max_sequences=6, step_tokens=40)
    sampled = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=ANSWER, ignore_eos=True)
    tight = LLM(
        str(folder), progress=False, max_length=320, max_sequences=6, step_tokens=40, kv_tokens=208, overlap=True
    )
    ample = [[answer.token_ids for answer in each.outputs] for each in llm.generate([prompt] * 2, sampled)]
    assert [[answer.token_ids for answer in each.outputs] for each in tight.generate([prompt] * 2, sampled)] == ample
    assert tight.engine.scheduler.counters.preemptions and not llm.engine.scheduler.counters.preemptions
    beams = SamplingParams(n=2, best_of=2, use_beam_search=True, temperature=0, max_tokens=30, ignore_eos=True)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = load(folder).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, num_beams=2, num_return_sequences=2,
            do_sample=False, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    answers = [answer.token_ids for answer in llm.generate([prompt], beams)[0].outputs]
    assert answers == found[:, len(prompt) :].tolist()
    tight.engine.scheduler.check()


def test_windows_hold_a_bounded_number_of_blocks_while_sequences_grow(model: tuple[str, Path]) -> None:
    _, folder = model
    llm = LLM(str(folder), progress=False, max_length=512, max_sequences=4, step_tokens=64)
    scheduler = llm.engine.scheduler
    held: list[list[int]] = []

    def look(*_: Any) -> None:
        for sequence in scheduler.running:
            held.append([len(table.blocks) - table.freed for table in sequence.tables])

    llm.engine.on_step = look
    draw = random.Random(8)
    llm.generate([words(draw, 150) for _ in range(4)], SamplingParams(temperature=0, max_tokens=250, ignore_eos=True))
    assert max(own[0] for own in held) == -(-399 // 16), "the others keep all blocks"
    # Window and chunk in prefill; later the last 24 tokens, freed when the next needs a block.
    assert max(max(own[1:]) for own in held) <= (WINDOW + 64 - 3) // 16 + 2
    assert max(max(own[1:]) for own in held if own[0] > 12) <= 3


def test_the_capacity_counts_windows_once(model: tuple[str, Path]) -> None:
    name, folder = model
    settings = {"progress": False, "max_length": 512, "max_sequences": 4, "step_tokens": 64}
    llm = LLM(str(folder), kv_tokens=512, **settings)
    groups, capacity = len(GROUPS[name]), llm.capacity
    assert capacity.blocks == 32 * groups and capacity.kv_tokens == 512
    needed = 32 + (groups - 1) * 3  # 24 tokens and the next lie in up to three blocks
    assert capacity.tokens == 512 * 32 * groups // needed > 512
    assert str(capacity) == (
        f"{capacity.tokens:,} tokens ({capacity.blocks * capacity.block_bytes / 2**20:,.0f} MiB), "
        f"{capacity.tokens // 512} request{'s' if capacity.tokens >= 1024 else ''} of the full 512 tokens"
    )
    assert capacity.block_bytes * groups == 16 * capacity.bytes_per_token, "no place in a block is unused here"
    with pytest.raises(CapacityError, match=r"room for 1\d\d tokens"):
        LLM(str(folder), kv_tokens=112, **settings)


@pytest.mark.parametrize(
    ("layers", "pattern", "width", "windows"),
    [
        (26, 2, 13, 1),  # Gemma 2 2B: 13 layers of each kind
        (26, 6, 4, 6),  # Gemma 3 1B: 22 with a window in 6 groups of 4, two places unused
        (34, 6, 5, 6),  # 4B
        (48, 6, 8, 5),  # 12B
        (62, 6, 10, 6),  # 27B
        (8, 9, 8, 1),  # all with a window
        (8, 1, 8, 0),  # none with a window
    ],
)
def test_layers_are_put_in_few_groups_of_equal_size(layers: int, pattern: int, width: int, windows: int) -> None:
    specs = [CacheSpec(1, 64, 512 if (i + 1) % pattern else 0) for i in range(layers)]
    layout = CacheLayout.of(specs)
    full = layers // pattern
    assert (layout.width, layout.windows) == (width, (0,) * (full // width) + (512,) * windows)
    places = list(zip(layout.groups, layout.slots, strict=True))
    assert len(set(places)) == layers and max(layout.slots) < width
    assert [layout.windows[group] for group in layout.groups] == [spec.window for spec in specs]
