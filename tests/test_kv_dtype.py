"""A KV cache of 8 bits, as a user meets it: more tokens in the same memory, and answers no batch or chunk changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.core.errors import SettingsError
from chairlift.ops.kv_quant import KV_DTYPES
from mostly_long import mostly_long
from tiny import make_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
# Ways to run that must not change a token; see test_greedy.py.
WAYS: dict[str, dict[str, Any]] = {
    "chunked at 16, overlapped": {"step_tokens": 16, "max_sequences": 8, "overlap": True},
    "swapped, preempted": {"max_length": 256, "kv_tokens": 256, "preemption": "swap"},
    "in large blocks": {"block_size": 48},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"head_dim": 32}),
    "llama with a head size no tile fits": ("LlamaForCausalLM", {"head_dim": 24}),
    "mistral with a window": ("MistralForCausalLM", {"sliding_window": 24}),
}


def prompts() -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(384) for _ in range(draw.randint(1, 90))] for _ in range(12)]


def answers(llm: LLM, asked: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(asked, params)]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("architecture", "config"), mostly_long(MODELS.values()), ids=MODELS.keys())
def test_tokens_depend_on_the_prompt_alone(
    architecture: str, config: dict[str, Any], kv_dtype: str, tmp_path: Path
) -> None:
    folder = str(make_tiny_model(tmp_path, architecture, tokenizer=False, **config))
    llm = LLM(folder, progress=False, kv_dtype=kv_dtype)
    together = answers(llm, prompts())
    assert [answers(llm, [prompt])[0] for prompt in prompts()] == together
    for way, settings in WAYS.items():
        other = LLM(folder, progress=False, kv_dtype=kv_dtype, **settings)
        assert answers(other, prompts()) == together, way
        assert (other.engine.scheduler.counters.preemptions > 0) == ("preempted" in way), way
        other.engine.scheduler.check()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_log_probabilities_stay_near_those_of_an_exact_cache(dtype: str, kv_dtype: str, tmp_path: Path) -> None:
    folder = str(make_tiny_model(tmp_path, tokenizer=False, head_dim=32, initializer_range=0.1))
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def logprobs(kv_dtype: str) -> torch.Tensor:
        llm = LLM(folder, progress=False, dtype=dtype, kv_dtype=kv_dtype, step_tokens=32)
        found = llm.generate(prompts()[:4], scored)
        return torch.tensor(
            [
                entry[token].logprob
                for result in found
                for token, entry in zip(result.prompt_token_ids, result.prompt_logprobs or [], strict=True)
                if entry
            ]
        )

    exact, narrow = logprobs("auto"), logprobs(kv_dtype)
    assert not torch.equal(exact, narrow), "the setting reaches the cache"
    assert (exact - narrow).abs().mean() < 0.05


def test_a_fixed_memory_holds_twice_the_tokens_of_16_bits(tmp_path: Path) -> None:
    folder = str(make_tiny_model(tmp_path, tokenizer=False, head_dim=64))

    def bytes_per_token(**settings: Any) -> int:
        capacity = LLM(folder, progress=False, kv_tokens=1024, **settings).capacity
        size = capacity.tokens * capacity.bytes_per_token / 2**20
        assert f"1,024 tokens ({size:,.0f} MiB)" in str(capacity)
        return capacity.bytes_per_token

    half = bytes_per_token(dtype="bfloat16")
    assert half == 2 * 2 * 2 * 64 * 2
    for kv_dtype in KV_DTYPES:
        narrow = bytes_per_token(kv_dtype=kv_dtype)
        assert narrow == bytes_per_token(kv_dtype=kv_dtype, dtype="bfloat16") == 2 * 2 * 2 * (64 + 2)
        assert half / narrow > 1.9


def test_an_unknown_kv_dtype_is_refused_with_those_there_are() -> None:
    with pytest.raises(SettingsError, match="kv_dtype is 'int4': use one of auto, int8, fp8"):
        LLM("nowhere", kv_dtype="int4")
