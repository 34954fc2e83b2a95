"""Tokens of several ranks equal those of one, for every family and in every way to run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import TIE, answers, llm_on

from chairlift import LLM, SamplingParams
from chairlift.cluster.tensor_parallel.ranks import Ranks
from mostly_long import mostly_long
from test_beams import params_of
from test_default_model import QUESTIONS
from test_greedy import MODELS
from ties import ties
from tiny import make_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SQUEEZED = {"max_length": 112, "kv_tokens": 112}
CHUNKED = {**SQUEEZED, "overlap": True, "step_tokens": 48, "max_sequences": 12}
WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "swapped": {**SQUEEZED, "preemption": "swap"},
    "swapped, overlapped": {**SQUEEZED, "preemption": "swap", "overlap": True},
    "preempted, overlapped, chunked": CHUNKED,
    "without a prefix cache": {"prefix_cache": False},
    "8-bit KV": {"kv_dtype": "int8"},
}
SOME = [
    "llama with biases",
    "mistral with a window",
    "qwen2 with a window in some layers",
    "qwen3, tied",
    "gemma2",
    "gemma3",
    "phi3 with a partial, long rope",
]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2, torch.device("cpu"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4, torch.device("cpu"))
    yield ranks
    ranks.close()


def prompts_of(seed: int = 1, count: int = 8) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(384) for _ in range(draw.randint(1, 40))] for _ in range(count)]


def compare(ranks: Ranks, folder: Path, ways: dict[str, dict[str, Any]]) -> None:
    for way, settings in ways.items():
        with llm_on(ranks, folder, **settings) as llm:
            got = answers(llm, prompts_of(), GREEDY)
            assert (llm.engine.scheduler.counters.preemptions > 0) == ("kv_tokens" in settings), way
        reference = LLM(str(folder), progress=False, **settings)
        assert ties(reference, prompts_of(), GREEDY, got, TIE) == [], way


@pytest.mark.parametrize("name", mostly_long(SOME, 2))
def test_every_family_has_the_tokens_of_one_rank(two: Ranks, name: str, tmp_path: Path) -> None:
    architecture, config = MODELS[name]
    folder = make_tiny_model(tmp_path, architecture, tokenizer=False, spread_norms=True, **config)
    compare(two, folder, {"preempted, overlapped, chunked": CHUNKED})


@pytest.mark.long
@pytest.mark.parametrize(("architecture", "config"), MODELS.values(), ids=MODELS.keys())
def test_every_family_on_two_and_on_four_ranks_in_every_way_to_run(
    two: Ranks, four: Ranks, architecture: str, config: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, architecture, tokenizer=False, spread_norms=True, **config)
    compare(two, folder, WAYS)
    compare(four, folder, {"swapped": WAYS["swapped"], "preempted, overlapped, chunked": CHUNKED})


@pytest.mark.long
def test_two_kv_heads_are_repeated_on_four_ranks(four: Ranks, tiny_model: Path) -> None:
    compare(four, tiny_model, {"preempted, overlapped, chunked": CHUNKED})


@pytest.mark.long
def test_every_way_to_run_has_the_tokens_of_one_rank(two: Ranks, tiny_model: Path) -> None:
    compare(two, tiny_model, dict(list(WAYS.items())[:3]))


def test_a_group_of_one_rank_runs_the_same_code(tiny_model: Path) -> None:
    ranks = Ranks(1, torch.device("cpu"))
    compare(ranks, tiny_model, {"preempted, overlapped, chunked": CHUNKED})
    ranks.close()


def test_a_vocabulary_that_does_not_divide_is_padded(two: Ranks, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tokenizer=False, vocab_size=385, tie_word_embeddings=True)
    compare(two, folder, {"batched": {}})


def test_a_shared_prompt_is_read_from_the_prefix_cache(two: Ranks, tiny_model: Path) -> None:
    prompt = prompts_of(count=1)[0] * 3
    again = [[*prompt, token] for token in range(5)]
    with llm_on(two, tiny_model) as llm:
        answers(llm, [prompt], GREEDY)
        got = answers(llm, again, GREEDY)
        assert llm.engine.scheduler.counters.cached_tokens > 0
    assert got == answers(LLM(str(tiny_model), progress=False), again, GREEDY)


@pytest.mark.long
def test_evicted_blocks_come_back_from_host_memory(two: Ranks, tiny_model: Path) -> None:
    settings = {"max_length": 128, "kv_tokens": 128, "host_tokens": 512}
    prompts = [[token] * 60 for token in range(5, 9)]
    with llm_on(two, tiny_model, **settings) as llm:
        got = [answers(llm, [prompt], GREEDY) for prompt in prompts * 2]
        cache = llm.engine.scheduler.memory.prefix_cache
        assert cache is not None
        assert cache.returns[0] > 0
    one = LLM(str(tiny_model), progress=False, **settings)
    assert got == [answers(one, [prompt], GREEDY) for prompt in prompts * 2]


@pytest.mark.parametrize(
    "settings",
    [{"overlap": True, "max_length": 160, "kv_tokens": 832}, pytest.param({}, marks=pytest.mark.long)],
    ids=["squeezed", "with room"],
)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=3, seed=5, temperature=0.9, top_p=0.95, top_k=50, repetition_penalty=1.1, max_tokens=16),
        SamplingParams(n=2, seed=6, presence_penalty=1.0, logit_bias={7: 1.5}, min_tokens=3, max_tokens=16),
        SamplingParams(seed=7, allowed_token_ids=[5, 6, 7, 8], max_tokens=8, ignore_eos=True),
        params_of(3, 12, None),
    ],
    ids=["filters", "rules", "allowed", "beams"],
)
def test_forks_beams_and_sampling_are_those_of_one_rank(
    two: Ranks, tiny_model: Path, params: SamplingParams, settings: dict[str, Any]
) -> None:
    prompts = prompts_of(count=5)
    with llm_on(two, tiny_model, **settings) as llm:
        got = answers(llm, prompts, params)
    assert got == answers(LLM(str(tiny_model), progress=False, **settings), prompts, params)


@pytest.mark.parametrize("overlap", mostly_long([True, False]))
def test_grammars_and_logits_processors_run_on_rank_0_alone(two: Ranks, tiny_model: Path, overlap: bool) -> None:
    def favour(_prompt: list[int], _output: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert logits.shape[-1] == 384
        logits[9] += 100
        return logits

    asked = [
        SamplingParams(temperature=0, max_tokens=12, structured={"choice": ["the answer", "the question"]}),
        SamplingParams(temperature=0, max_tokens=4, logits_processors=[favour]),
        GREEDY,
    ]
    prompts = prompts_of(count=3)
    with llm_on(two, tiny_model, overlap=overlap) as llm:
        got = [result.outputs[0].token_ids for result in llm.generate(prompts, asked)]
    one = LLM(str(tiny_model), progress=False)
    assert got == [result.outputs[0].token_ids for result in one.generate(prompts, asked)]
    assert got[1] == [9] * 4


def test_log_probabilities_of_answers_and_prompts_are_those_of_one_rank(two: Ranks, tiny_model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    prompts = prompts_of(count=4)
    with llm_on(two, tiny_model, step_tokens=24, max_sequences=8) as llm:
        got = llm.generate(prompts, params)
    for ours, theirs in zip(got, LLM(str(tiny_model), progress=False).generate(prompts, params), strict=True):
        for own, other in (
            (ours.outputs[0].logprobs, theirs.outputs[0].logprobs),
            (ours.prompt_logprobs, theirs.prompt_logprobs),
        ):
            assert own is not None
            assert other is not None
            for a, b in zip(own, other, strict=True):
                assert (a is None) == (b is None)
                for token in a or ():
                    assert b is not None
                    assert a is not None
                    assert abs(a[token].rank - b[token].rank) <= 1  # unlikely tokens may tie
                    assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-4)


def test_random_weights_do_not_depend_on_the_number_of_ranks(two: Ranks) -> None:
    settings = {"load_format": "dummy", "max_length": 64}
    prompts = [[5, 6, 7], [8, 9]]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with llm_on(two, "stories15m", **settings) as llm:
        got = answers(llm, prompts, params)
    assert ties(LLM("stories15m", progress=False, **settings), prompts, params, got, TIE) == []


def test_half_precision_runs_on_ranks_too(two: Ranks, tiny_model: Path) -> None:
    with llm_on(two, tiny_model, dtype="bfloat16", max_length=64) as llm:
        assert len(answers(llm, [[5, 6, 7]], GREEDY)[0][0]) == 24


@pytest.mark.long
def test_the_default_model_on_three_ranks_has_the_tokens_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"max_length": 128, "kv_tokens": 8192, "dtype": "float32"}
    greedy = SamplingParams(temperature=0, max_tokens=24)
    one = LLM(progress=False, **settings)
    asked = [one.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS[::2]]
    ranks = Ranks(3, torch.device("cpu"))
    found: dict[str, list[str]] = {}
    for way, more in {
        "batched": {},
        "preempted, overlapped": {"kv_tokens": 256, "overlap": True},
        "swapped": {"kv_tokens": 256, "preemption": "swap"},
    }.items():
        with llm_on(ranks, "smollm2-135m", **{**settings, **more}) as llm:
            found[way] = ties(one, asked, greedy, answers(llm, asked, greedy), TIE)
            assert (llm.engine.scheduler.counters.preemptions > 0) == bool(more)
    with llm_on(ranks, "smollm2-135m", **settings) as llm:
        for params in (params_of(3, 12, None), SamplingParams(n=3, seed=3, max_tokens=12)):
            assert answers(llm, asked[:4], params) == answers(one, asked[:4], params)
    ranks.close()
    with capsys.disabled():
        print("ties that fell the other way:", found)
