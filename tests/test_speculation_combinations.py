"""Random combinations of drafter, settings and requests: each answer is the one without drafts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import eagle3
from chairlift import LLM, SamplingParams
from chairlift.core.policies import POLICIES
from tiny import make_tiny_model

LAYERS = (2, 3, 3)  # of a model with 6
LENGTH = 144
MORE: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.8, "seed": 4, "n": 3, "top_p": 0.9},
    {"presence_penalty": 0.4, "repetition_penalty": 1.2},
    {"logprobs": 1, "prompt_logprobs": 0},
    {"structured": {"regex": "[a-z ]{9,30}"}, "ignore_eos": False},
    {"temperature": 1.1, "seed": 5, "min_tokens": 9, "stop_token_ids": list(range(40)), "logit_bias": {50: 2.0}},
    {"use_beam_search": True, "n": 2},
]


@dataclass
class Case:
    """A request and its answers without drafts."""

    prompt: list[int]
    params: SamplingParams
    answers: list[list[int]]


@dataclass
class Setup:
    """A model, what drafts for it, and requests."""

    model: Path
    drafts: dict[str, Path | None]
    cases: list[Case]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = tmp_path_factory.mktemp("models")
    model = make_tiny_model(folder / "model", num_hidden_layers=6, initializer_range=0.2)
    small = make_tiny_model(folder / "small", "Qwen3ForCausalLM", tokenizer=False, seed=5, num_hidden_layers=1)
    draw = random.Random(1)
    shared = [draw.randrange(2, 384) for _ in range(50)]
    prompts = [
        shared[: draw.choice((0, 16, 33, 50))] + [draw.randrange(2, 384) for _ in range(draw.randint(1, 40))]
        for _ in range(3 * len(MORE))
    ]
    params = [
        SamplingParams(**{"temperature": 0, "max_tokens": draw.randint(10, 40), "ignore_eos": True, **more})
        for more in 3 * MORE
    ]
    plain = LLM(str(model), progress=False, max_length=LENGTH)
    answers = [tokens_of(each) for each in plain.generate(prompts, params)]
    cases = [Case(*each) for each in zip(prompts, params, answers, strict=True)]
    greedy = [case for case in cases if case.params.is_greedy and len(case.answers[0]) > 9][:6]
    head = eagle3.make_head(folder / "head", model)
    eagle3.train_head(head, model, [case.prompt for case in greedy], [case.answers[0] for case in greedy], LAYERS, 40)
    return Setup(model, {"ngram": None, "draft": small, "eagle3": head}, cases)


def tokens_of(output: Any) -> list[list[int]]:
    return [answer.token_ids for answer in output.outputs]


def settings_of(draw: random.Random) -> dict[str, Any]:
    """Any choice of how to run, most of them with too little memory."""
    prefill = draw.choice(("chunked", "chunked", "splitfuse", "prefill-first", "whole"))
    return {
        "overlap": draw.random() < 0.5,
        "prefill": prefill,
        "step_tokens": None if prefill == "whole" else draw.choice((24, 40, 200)),
        "max_sequences": draw.choice((6, 12, 24)),
        "kv_tokens": draw.choice((400, 400, 4096)),
        "block_size": draw.choice((16, 16, 48)),
        "prefix_cache": draw.random() < 0.7,
        "preemption": draw.choice(("recompute", "swap", "auto")),
        "policy": draw.choice(list(POLICIES)),
        "max_drafts": draw.choice((1, 3, 8)),
    }


def run(setup: Setup, drafter: str, seed: int) -> int:
    """Answer some of the requests twice, with aborts between; return how many drafts were accepted."""
    draw = random.Random(seed)
    draft = setup.drafts[drafter]
    settings = settings_of(draw)
    llm = LLM(
        str(setup.model),
        progress=False,
        max_length=LENGTH,
        speculation=drafter,
        draft=None if draft is None else str(draft),
        **settings,
    )
    speculation = llm.engine.scheduler.planner.speculation
    assert speculation is not None
    if draw.random() < 0.7:
        speculation.fixed = draw.choice((1, 3, 8))  # whatever they cost
    for _ in range(2):
        cases = draw.sample(setup.cases, 12)
        lost = draw.sample(setup.cases, 3)
        tracks = [llm._submit(llm._reader.encode(case.prompt), case.params) for case in lost]
        for _ in range(draw.randint(1, 9)):
            llm._driver.step()
        llm._driver.abort_unfinished(tracks)
        found = llm.generate([case.prompt for case in cases], [case.params for case in cases])
        for case, output in zip(cases, found, strict=True):
            assert tokens_of(output) == case.answers, (seed, drafter, settings, case.params)
        llm.engine.scheduler.check()
    assert llm.engine.scheduler.pool.owned == 0
    return sum(speculation.counts.accepted)


@pytest.mark.long
@pytest.mark.parametrize("drafter", ["ngram", "draft", "eagle3"])
def test_no_combination_with_drafts_changes_an_answer(drafter: str, setup: Setup) -> None:
    accepted = sum(run(setup, drafter, seed) for seed in range(25))
    assert accepted > (50 if drafter == "draft" else 200)
