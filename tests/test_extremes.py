"""Sampling at the edge of what is accepted: an answer or a line of refusal, never an empty answer or a banned token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift import LLM, SamplingParams
from chairlift.core.errors import RequestError
from tiny import make_tiny_model

HUGE = 10**5000  # no float holds it, and Python does not print it
PROMPTS = [[5, 6, 7], [9] * 20, [300, 2, 41, 8]]
EXTREMES: dict[str, list[Any]] = {
    "temperature": [0, 5e-324, 1e-40, 9e-6, 1.1e-5, 1e-3, 1.0, 1e30, 1e300, HUGE],
    "top_k": [-1, 0, 1, 2, 2**31 - 1, 2**31, 2**32 + 1, 2**63 - 1, 2**63, HUGE],
    "top_p": [5e-324, 1e-40, 1e-9, 0.5, 1 - 1e-9, 1.0],
    "min_p": [0.0, 5e-324, 1e-40, 0.5, 1 - 1e-9, 1.0],
    "repetition_penalty": [5e-324, 1e-40, 1e-30, 1.0, 1e30, 1e300, HUGE],
    "presence_penalty": [-2.0, 0.0, 5e-324, 2.0],
    "frequency_penalty": [-2.0, 0.0, 5e-324, 2.0],
    "logit_bias": [{}, {7: -100.0}, {7: 100.0}, {7: 1e30}, {7: -1e30}, dict.fromkeys(range(384), -100.0)],
    "allowed_token_ids": [None, [7], [7, 11, 383], list(range(384)) * 3],
    "bad_words": [(), ["a"], ["aa", "ab"], ["x" * 900]],
    "seed": [None, 0, 2**63 - 1, -(2**63), 2**63],
    "min_tokens": [0, 1, 6, 7, 2**63 - 1, HUGE],
    "stop_token_ids": [(), [7], list(range(384))],
    "logprobs": [None, 0, 64],
    "n": [1, 1, 3, 2**62],
}
# Each of these leaves the likeliest token alone, by itself or among other settings.
GREEDY = [
    {"temperature": 0},
    {"temperature": 5e-324},
    {"temperature": 1e-40},
    {"temperature": 9e-6},
    {"temperature": 1e-4},
    {"top_k": 1},
    {"top_k": 1, "temperature": 1e30},
    {"top_p": 1e-40},
    {"top_p": 5e-324},
    {"top_p": 1e-40, "temperature": 1e4},
    {"min_p": 1.0},
    {"temperature": 1e-40, "top_k": 2**31, "top_p": 0.5, "min_p": 0.1},
    {"temperature": 0, "presence_penalty": 5e-324, "repetition_penalty": 1.0 + 2**-52},
    {"temperature": 0, "logit_bias": dict.fromkeys(range(384), -100.0)},
    {"temperature": 0, "allowed_token_ids": list(range(384))},
    {"temperature": 0, "top_k": 2**63 - 1},
]


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "overlapped"])
def llm(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[LLM]:
    llm = LLM(str(tiny_model), progress=False, max_length=128, overlap=request.param)
    yield llm
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.pool.owned == 0
    assert not llm.engine.scheduler.has_work


@pytest.mark.parametrize("settings", GREEDY, ids=str)
def test_what_leaves_only_the_likeliest_token_is_greedy(llm: LLM, settings: dict[str, Any]) -> None:
    expected = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    got = llm.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True, seed=1, **settings))
    assert [each.outputs[0].token_ids for each in got] == [each.outputs[0].token_ids for each in expected]


def make_params(draw: random.Random) -> dict[str, Any]:
    names = draw.sample(list(EXTREMES), draw.randint(1, 6))
    return {"max_tokens": 6, "ignore_eos": True} | {name: draw.choice(EXTREMES[name]) for name in names}


def is_one_line(message: str) -> bool:
    return bool(message) and "\n" not in message and "Traceback" not in message


@pytest.mark.parametrize("seed", range(30))
def test_extremes_are_answered_or_refused_in_one_line(llm: LLM, seed: int) -> None:
    draw = random.Random(seed)
    plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    [alone] = llm.generate(PROMPTS[0], plain)
    asked: list[SamplingParams] = []
    while len(asked) < 8:
        try:
            asked.append(SamplingParams(**make_params(draw)))
        except RequestError as error:
            assert is_one_line(str(error))
    results = llm.generate([PROMPTS[0]] * 9, [plain, *asked], on_error="return")
    assert results[0].outputs[0].token_ids == alone.outputs[0].token_ids, "others make no difference"
    for params, result in zip(asked, results[1:], strict=True):
        if result.error is not None:
            assert is_one_line(result.error)
            continue
        for answer in result.outputs:
            tokens = answer.token_ids
            assert answer.finish_reason in ("stop", "length")
            assert len(tokens) >= max(1, params.min_tokens)
            assert set(tokens) <= set(params.allowed_token_ids or range(384))
            assert len(tokens) == 6 or tokens[-1] in params.stop_token_ids


# ---- no token is left


def corner(llm: LLM, **more: Any) -> SamplingParams:
    """After its first token, whichever of the two it is, both are banned."""
    assert llm.tokenizer is not None
    first, second = (llm.tokenizer.encode(letter, add_special_tokens=False) for letter in "zQ")
    words = [one + other for one in "zQ" for other in "zQ"]
    given = {"max_tokens": 6, "allowed_token_ids": [*first, *second], "bad_words": words, "ignore_eos": True}
    return SamplingParams(**{**given, **more})


@pytest.mark.parametrize(
    "more",
    [{"temperature": 0}, {"seed": 1}, {"seed": 1, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, {"n": 3}, {"logprobs": 5}],
    ids=str,
)
def test_a_request_with_no_token_left_ends_with_an_error_and_no_other_does(llm: LLM, more: dict[str, Any]) -> None:
    plain = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    drawn = SamplingParams(temperature=1, seed=5, repetition_penalty=1.1, max_tokens=20, ignore_eos=True)
    alone = llm.generate(PROMPTS[:2], [plain, drawn])
    failed = llm.engine.scheduler.counters.failed
    cornered, *others = llm.generate([PROMPTS[2], *PROMPTS[:2]], [corner(llm, **more), plain, drawn])
    assert cornered.error == "no token is left to choose under allowed_token_ids and bad_words: allow more tokens"
    for answer in cornered.outputs:
        assert answer.finish_reason == "error"
        assert len(answer.token_ids) <= 1, "the one that was allowed"
    assert [each.outputs[0].token_ids for each in others] == [each.outputs[0].token_ids for each in alone]
    assert llm.engine.scheduler.counters.failed == failed + 1
    with pytest.raises(RequestError, match="no token is left"):
        list(llm.stream(PROMPTS[2], corner(llm, **{**more, "n": 1})))


@pytest.mark.parametrize(
    "settings",
    [
        {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 1},
        {"allowed_token_ids": [7, 8], "stop_token_ids": [8, 9, 7], "min_tokens": 3},
        {"allowed_token_ids": [67], "bad_words": ["b"]},
    ],
    ids=str,
)
def test_what_can_never_have_a_token_is_refused(llm: LLM, settings: dict[str, Any]) -> None:
    assert llm.tokenizer is not None
    if "bad_words" in settings:
        settings = settings | {"allowed_token_ids": llm.tokenizer.encode("b", add_special_tokens=False)}
    with pytest.raises(RequestError, match="allowed_token_ids are all forbidden by bad_words, or by min_tokens"):
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=6, **settings))


@pytest.mark.parametrize("how", [{"temperature": 0}, {"seed": 1, "top_p": 0.9}, {"use_beam_search": True, "n": 2}])
def test_a_model_whose_logits_are_not_numbers_says_so(tmp_path: Path, how: dict[str, Any]) -> None:
    folder = make_tiny_model(tmp_path / "broken", tokenizer=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][:] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    llm = LLM(str(folder), progress=False, max_length=128)
    with pytest.raises(RequestError, match="no token can be chosen: the model's logits are not numbers"):
        llm.generate([PROMPTS[0]], SamplingParams(max_tokens=4, **how))
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.pool.owned == 0
