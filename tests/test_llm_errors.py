"""One prompt that cannot be answered does not lose the answers to the others."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, SamplingParams
from chairlift.core.errors import RequestError

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
GOOD = [[5, 6, 7], [8, 9]]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), progress=False, max_length=64, kv_tokens=1024)


BAD: dict[str, tuple[Any, str]] = {
    "too long": ([7] * 99, "the prompt has 99 tokens and the context holds 64"),
    "empty text": ("", "the prompt is empty"),
    "an id that is none": ([5, 99999], "token id 99999"),
    "not a prompt": (None, "the prompt is empty"),
    "a number": (5, "the prompt is 5: give text"),
}


@pytest.mark.parametrize(("bad", "why"), BAD.values(), ids=BAD.keys())
def test_its_place_holds_the_error_and_the_others_are_answered(
    llm: LLM, bad: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = [result.outputs[0].token_ids for result in llm.generate(GOOD, PARAMS)]
    with caplog.at_level(logging.WARNING, "chairlift"):
        results = llm.generate([GOOD[0], bad, GOOD[1]], PARAMS)
    assert [results[place].outputs[0].token_ids for place in (0, 2)] == expected
    assert results[0].error is None
    failed = results[1]
    assert why in str(failed.error)
    assert failed.finished and failed.outputs[0].finish_reason == "error" and failed.outputs[0].text == ""
    assert failed.prompt == (bad if isinstance(bad, str) else None)
    assert "1 of 3 prompts have an error in place of an answer; prompt 1: " in caplog.text
    with pytest.raises(RequestError, match=r"token|prompt"):
        llm.generate([GOOD[0], bad, GOOD[1]], PARAMS, on_error="raise")
    assert not llm.engine.scheduler.has_work


def test_if_none_can_be_answered_the_error_is_raised_unless_it_is_to_be_returned(llm: LLM) -> None:
    for prompts in ([7] * 99, [[7] * 99], [[7] * 99, [8] * 99]):
        with pytest.raises(RequestError, match="99 tokens"):
            llm.generate(prompts, PARAMS)
        results = llm.generate(prompts, PARAMS, on_error="return")
        assert all("99 tokens" in str(result.error) for result in results)
    with pytest.raises(RequestError, match="prompts is None: give text"):
        llm.generate(None, PARAMS)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="on_error is 'ignore': use 'raise' or 'return'"):
        llm.generate(GOOD, PARAMS, on_error="ignore")  # type: ignore[arg-type]


def test_a_conversation_that_its_template_refuses_is_one_of_them(llm: LLM) -> None:
    good, bad = [{"role": "user", "content": "Hi"}], [{"role": "user", "content": [{"type": "image_url"}]}]
    [expected] = llm.chat(good, PARAMS)
    first, second = llm.chat([good, bad], PARAMS)
    assert first.outputs[0].token_ids == expected.outputs[0].token_ids
    assert "image_url" in str(second.error)


def test_a_step_that_fails_leaves_the_answers_that_have_come(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = type(llm.engine._executor._decoder)
    forward = decoder.forward
    steps = 0

    def breaks(*given: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise RuntimeError("out of luck")
        return forward(*given)

    monkeypatch.setattr(decoder, "forward", breaks)
    short, long = llm.generate(GOOD, [SamplingParams(max_tokens=2, ignore_eos=True), PARAMS])
    assert short.error is None and len(short.outputs[0].token_ids) == 2
    assert "out of luck" in str(long.error)
    assert len(long.outputs[0].token_ids) == 3, "what had come stays"


def test_a_closed_llm_says_so(tiny_model: Path) -> None:
    with LLM(str(tiny_model), progress=False, max_length=64, kv_tokens=256) as llm:
        stream = llm.stream(GOOD[0], PARAMS)
        next(stream)
    assert [chunk.finish_reason for chunk in stream] == ["abort"], "what was under way has ended"
    calls = (
        lambda: llm.generate(GOOD, PARAMS),
        lambda: llm.generate(GOOD, PARAMS, on_error="return"),
        lambda: llm.chat([{"role": "user", "content": "Hi"}]),
        lambda: llm.stream(GOOD[0]),
        lambda: list(llm.iterate([("a", GOOD[0], PARAMS)])),
    )
    for call in calls:
        with pytest.raises(RequestError, match="this LLM is closed"):
            call()
    llm.close()
