"""Greedy float32 tokens equal transformers', whatever the batch, the chunking, the preemptions or the loop."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from chairlift import LLM, SamplingParams
from chairlift.core.policies import POLICIES
from mostly_long import mostly_long
from tiny import make_tiny_model

ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPE_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
ROPE_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

ROPE_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 3.0],
    "long_factor": [1.0, 1.2, 1.7, 2.5, 5.0, 9.0],
    "original_max_position_embeddings": 512,
}
GEMMA = {"sliding_window": 24, "query_pre_attn_scalar": 20, "num_hidden_layers": 4}
GEMMA3_LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
PHI = {"bos_token_id": 0, "pad_token_id": 0}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with grouped heads": ("LlamaForCausalLM", {"head_dim": 32}),
    "llama, tied, one KV head each": ("LlamaForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama with llama3 rope": ("LlamaForCausalLM", {"rope_parameters": ROPE_LLAMA3}),
    "llama with linear rope": ("LlamaForCausalLM", {"rope_parameters": ROPE_LINEAR}),
    "llama with biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama with a head size no tile fits": ("LlamaForCausalLM", {"head_dim": 24}),
    "mistral with a window": ("MistralForCausalLM", {"sliding_window": 24}),
    "mistral without a window": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2 with a window in some layers": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen2 with yarn": ("Qwen2ForCausalLM", {"rope_parameters": ROPE_YARN}),
    "qwen3, tied": ("Qwen3ForCausalLM", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma2 without soft caps": (
        "Gemma2ForCausalLM",
        {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": ("Gemma3ForCausalLM", {**GEMMA, "num_hidden_layers": 7}),
    "gemma3 with linear rope": ("Gemma3ForCausalLM", {**GEMMA, "rope_parameters": GEMMA3_LINEAR}),
    "phi3": ("Phi3ForCausalLM", {**PHI}),
    "phi3 with a window": ("Phi3ForCausalLM", {**PHI, "sliding_window": 24}),
    "phi3 with a partial, long rope": ("Phi3ForCausalLM", {**PHI, "rope_parameters": ROPE_LONG}),
}
SHORT = (  # those of `make test`
    *("llama with grouped heads", "qwen2 with a window in some layers", "gemma2", "phi3 with a partial, long rope"),
)

# Ways to run that must not change a token. The KV cache of the last ones holds one full-length sequence, so that
# twelve together preempt one another all the time.
WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "overlapped": {"overlap": True},
    "chunked at 16": {"step_tokens": 16, "max_sequences": 8},
    "preempted": {"max_length": 256, "kv_tokens": 256},
    "preempted, overlapped, chunked": {
        "max_length": 256, "kv_tokens": 256, "overlap": True, "step_tokens": 24, "max_sequences": 12,
    },
    "in large blocks": {"block_size": 48},
}  # fmt: skip

# Every other choice of the scheduler's, most of them under the same pressure.
SQUEEZED = {"max_length": 256, "kv_tokens": 256}
CHOICES: dict[str, dict[str, Any]] = {
    "static": {"batching": "static", "max_sequences": 5},
    "dynamic": {"batching": "dynamic", "max_sequences": 5},
    "splitfuse": {"prefill": "splitfuse", "max_sequences": 8},
    "prefill-first, preempted": {"prefill": "prefill-first", **SQUEEZED},
    "whole": {"prefill": "whole", "max_length": 256},
    "swap, preempted": {"preemption": "swap", **SQUEEZED},
    "swap, preempted, overlapped": {"preemption": "swap", "overlap": True, **SQUEEZED},
    "swap to a host with little room, preempted": {"preemption": "swap", "host_tokens": 48, **SQUEEZED},
    "auto, preempted": {"preemption": "auto", **SQUEEZED},
    "a target for latency": {"target_tpot": 0.005},
    **{f"{policy}, preempted": {"policy": policy, **SQUEEZED} for policy in POLICIES},
}

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def continue_with_transformers(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def likeliest_after(model: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """What transformers would take at each place of an answer, given all before it: if that is the answer itself, its
    greedy decoding gives that answer."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize(
    ("architecture", "config"),
    [pytest.param(*MODELS[name], id=name, marks=[] if name in SHORT else pytest.mark.long) for name in MODELS],
)
def test_every_family_equals_transformers_in_every_way_to_run(
    architecture: str, config: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, architecture, tokenizer=False, spread_norms=True, **config)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    draw = random.Random(1)
    prompts = [[draw.randrange(384) for _ in range(draw.randint(1, 90))] for _ in range(12)]
    expected: list[list[int]] = []
    for way, settings in WAYS.items():
        llm = LLM(str(folder), progress=False, **settings)
        got = [result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY)]
        expected = expected or got
        assert got == expected, way
        assert (llm.engine.scheduler.counters.preemptions > 0) == ("preempted" in way)
        llm.engine.scheduler.check()
    for prompt, answer in zip(prompts, expected, strict=True):
        assert likeliest_after(reference, prompt, answer) == answer
    assert continue_with_transformers(reference, prompts[0], 40) == expected[0]


@pytest.mark.parametrize("name", mostly_long(["mistral with a window", "llama with grouped heads"]))
def test_no_choice_of_scheduling_changes_a_token(name: str, tmp_path: Path) -> None:
    architecture, config = MODELS[name]
    folder = make_tiny_model(tmp_path, architecture, tokenizer=False, **config)
    draw = random.Random(2)
    prompts = [[draw.randrange(384) for _ in range(draw.randint(1, 90))] for _ in range(12)]
    expected = [result.outputs[0].token_ids for result in LLM(str(folder), progress=False).generate(prompts, GREEDY)]
    for way, settings in CHOICES.items():
        llm = LLM(str(folder), progress=False, **settings)
        assert [result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY)] == expected, way
        assert (llm.engine.scheduler.counters.preemptions > 0) == ("preempted" in way), way
        llm.engine.scheduler.check()


def test_a_window_frees_what_nobody_sees_any_more(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "MistralForCausalLM", tokenizer=False, sliding_window=24)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # Memory for one full sequence, which six that each hold no more than they see share without yielding.
    llm = LLM(str(folder), progress=False, max_length=512, kv_tokens=512, step_tokens=64)
    scheduler = llm.engine.scheduler
    draw = random.Random(3)
    prompts = [[draw.randrange(384) for _ in range(30)] for _ in range(6)]
    held: list[int] = []
    llm.engine.on_step = lambda plan, begun, took: held.append(scheduler.pool.owned)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    results = llm.generate(prompts, params)
    for prompt, result in list(zip(prompts, results, strict=True))[:2]:
        assert result.outputs[0].token_ids == continue_with_transformers(reference, prompt, 200)
    # 24 tokens lie in up to three blocks of 16, and the next token may begin a fourth before the first is given back.
    assert max(held[30:]) <= 6 * 4
    assert scheduler.counters.preemptions == 0
    scheduler.check()
