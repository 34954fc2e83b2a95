"""On a CUDA device: the same tokens as transformers and as the CPU. Run with `pytest -m gpu`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.core.drafting import MAX_DRAFTS
from chairlift.core.request import Request
from tiny import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 24},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 32, "tie_word_embeddings": True},
    "Gemma2ForCausalLM": {"sliding_window": 24, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0},
    "Gemma3ForCausalLM": {"sliding_window": 24, "query_pre_attn_scalar": 20, "num_hidden_layers": 7},
    "Phi3ForCausalLM": {"bos_token_id": 0, "pad_token_id": 0, "partial_rotary_factor": 0.75},
}


def prompts() -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(384) for _ in range(draw.randint(1, 90))] for _ in range(12)]


def tokens(llm: LLM, params: SamplingParams) -> list[list[list[int]]]:
    return [[output.token_ids for output in result.outputs] for result in llm.generate(prompts(), params)]


@pytest.mark.parametrize(("architecture", "config"), FAMILIES.items(), ids=FAMILIES.keys())
@pytest.mark.parametrize("overlap", [False, True])
def test_greedy_float32_equals_transformers(
    architecture: str, config: dict[str, Any], overlap: bool, tmp_path: Path
) -> None:
    import transformers

    folder = make_tiny_model(tmp_path, architecture, tokenizer=False, spread_norms=True, **config)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).cuda()
    expected = []
    for prompt in prompts():
        ids = torch.tensor([prompt]).cuda()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, min_new_tokens=30, do_sample=False,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        expected.append([out[0, len(prompt) :].tolist()])
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    roomy = LLM(str(folder), progress=False, device="cuda", dtype="float32", overlap=overlap)
    assert tokens(roomy, greedy) == expected
    tight = LLM(
        str(folder), progress=False, device="cuda", dtype="float32", overlap=overlap,
        max_length=256, kv_tokens=256, step_tokens=32, max_sequences=12, block_size=16,
    )  # fmt: skip
    assert tokens(tight, greedy) == expected
    assert tight.engine.scheduler.counters.preemptions > 0
    tight.engine.scheduler.check()


def test_a_seed_draws_the_same_tokens_on_the_gpu_as_on_the_cpu(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tokenizer=False)
    params = SamplingParams(
        n=2, seed=5, temperature=0.9, top_p=0.95, top_k=50, min_p=0.01, repetition_penalty=1.1, max_tokens=20,
        ignore_eos=True, logit_bias={7: 1.5},
    )  # fmt: skip
    gpu, cpu = (
        LLM(str(folder), progress=False, device=device, dtype="float32", max_length=256) for device in ("cuda", "cpu")
    )
    assert tokens(gpu, params) == tokens(cpu, params)


def test_the_default_dtype_and_the_profiled_capacity_work(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tokenizer=False)
    llm = LLM(str(folder), progress=False, device="cuda", max_sequences=64)
    assert 64 * 512 <= llm.capacity.tokens < 1.05 * 64 * 512, "as much as can be of use, and not all of the memory"
    answers = tokens(llm, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2))
    assert all(len(answer) == 20 for outputs in answers for answer in outputs)


def chatty() -> list[list[int]]:
    """Prompts of three groups that begin alike, two of them long enough to be read together."""
    draw = random.Random(2)
    heads = [[draw.randrange(384) for _ in range(length)] for length in (300, 290, 40)]
    return [heads[i % 3] + [draw.randrange(384) for _ in range(draw.randint(1, 40))] for i in range(15)]


WAYS: dict[str, dict[str, Any]] = {
    "reading together": {},
    "reading together in steps with prompts": {"step_tokens": 64},
    "in 8 bits": {"kv_dtype": "int8"},
    "swapped": {"kv_tokens": 1600, "preemption": "swap"},
    "with host memory": {"kv_tokens": 800, "host_tokens": 3200},
    "with a file": {"kv_tokens": 800, "host_tokens": 640, "disk_tokens": 3200},
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_shared_moved_and_read_together_changes_no_token(way: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tokenizer=False)
    settings = dict(WAYS[way])
    kv_dtype = settings.pop("kv_dtype", "auto")
    if "disk_tokens" in settings:
        settings["disk_cache"] = str(tmp_path)
    common: dict[str, Any] = {"progress": False, "device": "cuda", "dtype": "float32", "max_length": 400}
    plain = LLM(str(folder), **common, prefix_cache=False, shared_reads=False, host_tokens=0, kv_dtype=kv_dtype)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = [each.outputs[0].token_ids for each in plain.generate(chatty(), params, progress=False)]
    llm = LLM(str(folder), **common, **settings, kv_dtype=kv_dtype)
    for _ in range(2):
        assert [each.outputs[0].token_ids for each in llm.generate(chatty(), params, progress=False)] == expected
    llm.engine.scheduler.check()
    memory, counters = llm.engine.scheduler.memory, llm.engine.scheduler.counters
    assert memory.prefix_cache is not None
    if way == "swapped":
        assert counters.preemptions > 0
    if way.startswith("with"):
        assert sum(memory.prefix_cache.returns) > 0, "nothing came back"
    if way == "reading together":
        graphs = llm.engine._executor._graphs  # type: ignore[attr-defined]
        assert any(shares and size < 256 for size, shares, _ in graphs._captured), "nothing was read together"


def test_steps_of_every_size_give_the_same_tokens(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tokenizer=False)
    common: dict[str, Any] = {"progress": False, "device": "cuda", "dtype": "float32", "max_length": 400}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = None
    for step_tokens in (8192, 256, 100, 33, 20):  # padded to a captured size, exactly one, or not captured
        llm = LLM(str(folder), **common, step_tokens=step_tokens, max_sequences=16)
        found = [each.outputs[0].token_ids for each in llm.generate(chatty(), params, progress=False)]
        expected = expected or found
        assert found == expected, step_tokens


def test_reading_log_probabilities_does_not_wait_for_what_was_submitted_later(tmp_path: Path) -> None:
    llm = LLM(str(make_tiny_model(tmp_path, tokenizer=False)), progress=False, device="cuda", max_sequences=4)
    scheduler, executor = llm.engine.scheduler, llm.engine._executor
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    scheduler.submit(Request("r", [5, 6, 7, 8], params))
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        launched = executor.launch(plan)
        torch.cuda._sleep(1_000_000_000)  # cycles: half a second of work behind the step
        behind = torch.cuda.Event()
        behind.record()
        result = executor.collect(launched)
        assert not behind.query(), "the step's results were read behind later work"
        assert result.logprobs is not None and len(result.logprobs[0].top) == 3
        scheduler.apply(plan, result)
        torch.cuda.synchronize()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_drafts_change_no_token(overlap: bool, temperature: float, tmp_path: Path) -> None:
    """Drafts with errors from the host, and drafts of a small model, in captured steps."""
    from test_speculation_answers import Oracle, speculate

    folder = make_tiny_model(tmp_path / "model", tokenizer=False)
    small = make_tiny_model(tmp_path / "draft", "Qwen3ForCausalLM", tokenizer=False, seed=5, num_hidden_layers=1)
    params = SamplingParams(temperature=temperature, seed=3, top_p=0.95, max_tokens=40, ignore_eos=True, logprobs=1)
    common: dict[str, Any] = {"progress": False, "device": "cuda", "dtype": "float32", "overlap": overlap}
    expected = tokens(LLM(str(folder), **common), params)
    known = {tuple(prompt): answers[0] for prompt, answers in zip(prompts(), expected, strict=True)}
    llm = LLM(str(folder), speculation="ngram", **common)
    speculation = speculate(llm, Oracle(lambda sequence: known[tuple(sequence.request.prompt)]))
    for _ in range(2):
        assert tokens(llm, params) == expected
    assert sum(speculation.counts.drafted) > sum(speculation.counts.accepted) > 100
    for draft in (small, folder):
        llm = LLM(str(folder), speculation="draft", draft=str(draft), **common)
        found = llm.engine.scheduler.planner.speculation
        assert found is not None
        found.fixed = MAX_DRAFTS
        for _ in range(2):
            assert tokens(llm, params) == expected
        assert found.counts.checks > 20
        if draft is folder:
            assert sum(found.counts.accepted) > 0.95 * sum(found.counts.drafted)
        llm.engine.scheduler.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_of_a_trained_head_change_no_token(overlap: bool, tmp_path: Path) -> None:
    from eagle3 import make_head, train_head

    folder = make_tiny_model(tmp_path / "model", tokenizer=False, num_hidden_layers=8)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    common: dict[str, Any] = {"progress": False, "device": "cuda", "dtype": "float32", "overlap": overlap}
    expected = tokens(LLM(str(folder), **common), params)
    head = make_head(tmp_path / "head", folder)
    train_head(head, folder, prompts(), [answers[0] for answers in expected], (2, 4, 5))
    llm = LLM(str(folder), speculation="eagle3", draft=str(head), **common)
    found = llm.engine.scheduler.planner.speculation
    assert found is not None
    found.fixed = MAX_DRAFTS
    for _ in range(2):
        assert tokens(llm, params) == expected
    assert sum(found.counts.drafted) > sum(found.counts.accepted) > 100
