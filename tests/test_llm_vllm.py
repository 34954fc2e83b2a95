"""What users of vLLM find in LLM: all log-probabilities, token ids alone, truncated prompts, beams in vLLM's shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, BeamSearchParams, SamplingParams
from chairlift.core.errors import RequestError
from chairlift.core.limits import Limits
from chairlift.core.request import Request
from serving.running import running

PROMPT = "The chairlift never stops"
TALK = [{"role": "user", "content": "Hello"}]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = list(range(3, 303))


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), progress=False, max_length=128, kv_tokens=2048)


def test_minus_one_asks_for_the_whole_vocabulary(llm: LLM) -> None:
    few = llm.generate(PROMPT, replace(GREEDY, logprobs=3, prompt_logprobs=3))[0]
    for width in (1, 2):
        everything = replace(GREEDY, logprobs=-1, prompt_logprobs=-1, n=width)
        found, other = llm.generate([PROMPT] * 2, [everything, replace(GREEDY, logprobs=3)])
        for answer in found.outputs:
            assert answer.token_ids == few.outputs[0].token_ids
            assert [len(scored) for scored in answer.logprobs or []] == [384] * 6
            assert all(few_scored.items() <= scored.items() for few_scored, scored in scores(few.outputs[0], answer))
        assert [len(scored) for scored in (found.prompt_logprobs or [])[1:]] == [384] * (
            len(found.prompt_token_ids) - 1
        )
        assert other.outputs[0].logprobs == few.outputs[0].logprobs, "its neighbour gets what it asked for"
    assert sum(2.718281828**each.logprob for each in (found.outputs[0].logprobs or [])[0].values()) == pytest.approx(1)


def scores(few: Any, all_of_them: Any) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    return list(zip(few.logprobs, all_of_them.logprobs, strict=True))


def test_all_log_probabilities_of_very_many_tokens_are_refused() -> None:
    limits = Limits(max_sequences=64, step_tokens=64, max_length=4096, vocab_size=151_936)
    asked = SamplingParams(logprobs=-1, max_tokens=120, n=64)
    with pytest.raises(RequestError, match="all 151,936 tokens are asked for at 7,680 positions, and at most 110 fit"):
        limits.check(Request("a", [1, 2, 3], asked))
    limits.check(Request("a", [1, 2, 3], replace(asked, n=1, max_tokens=100)))
    with pytest.raises(RequestError, match="at 200 positions"):
        limits.check(Request("a", [1] * 200, SamplingParams(prompt_logprobs=-1)))
    with pytest.raises(RequestError, match="logprobs is -2, out of range: use 0 to 64"):
        SamplingParams(logprobs=-2)


def test_without_detokenizing_there_are_ids_and_no_text(llm: LLM) -> None:
    expected = llm.generate(PROMPT, GREEDY)[0].outputs[0]
    [result] = llm.generate(PROMPT, replace(GREEDY, detokenize=False, logprobs=0))
    answer = result.outputs[0]
    assert (answer.token_ids, answer.text, answer.finish_reason) == (expected.token_ids, "", "length")
    assert {each.decoded_token for scored in answer.logprobs or [] for each in scored.values()} == {""}
    chunks = list(llm.stream(PROMPT, replace(GREEDY, detokenize=False)))
    assert [token for chunk in chunks for token in chunk.token_ids] == expected.token_ids
    assert "".join(chunk.text for chunk in chunks) == ""
    with pytest.raises(RequestError, match="detokenize is False, and stop strings"):
        SamplingParams(detokenize=False, stop="x")


@pytest.mark.parametrize(
    ("keep", "max_tokens", "left"),
    [(5, 6, 5), (400, 6, None), (100, 6, 100), (-1, 6, 122), (-1, None, 127), (-1, 999, 64)],
)
def test_a_prompt_is_cut_to_its_last_tokens(llm: LLM, keep: int, max_tokens: int | None, left: int | None) -> None:
    params = replace(GREEDY, truncate_prompt_tokens=keep, max_tokens=max_tokens)
    if left is None:
        with pytest.raises(RequestError, match="the prompt has 300 tokens"):
            llm.generate(LONG, params)
        return
    [result] = llm.generate(LONG, params)
    assert result.prompt_token_ids == LONG[-left:]
    [expected] = llm.generate(LONG[-left:], replace(params, truncate_prompt_tokens=None))
    assert result.outputs[0].token_ids == expected.outputs[0].token_ids
    [short] = llm.generate([5, 6, 7], params)
    assert short.prompt_token_ids == ([5, 6, 7] if left > 3 else [5, 6, 7][-left:])


@pytest.mark.parametrize("wrong", [0, -2, 1.5, True])
def test_a_prompt_cannot_be_cut_to_nothing(wrong: Any) -> None:
    with pytest.raises(RequestError, match="truncate_prompt_tokens is"):
        SamplingParams(truncate_prompt_tokens=wrong)


@pytest.mark.long
def test_a_server_truncates_too_and_refuses_minus_one_of_logprobs(llm: LLM, tiny_model: Path) -> None:
    with running(tiny_model, "--max-length", "128", "--kv-tokens", "2048") as server:

        def post(path: str, **body: Any) -> dict[str, Any]:
            asked = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True, **body}
            return dict(server.post(path, asked).json())

        for keep, left in ((5, 5), (-1, 122)):
            reply = post("/v1/completions", prompt=LONG, truncate_prompt_tokens=keep)
            [expected] = llm.generate(LONG[-left:], GREEDY)
            assert reply["choices"][0]["token_ids"] == expected.outputs[0].token_ids
            assert reply["usage"]["prompt_tokens"] == left
        talk = [{"role": "user", "content": "never stops " * 200}]
        reply = post("/v1/chat/completions", messages=talk, truncate_prompt_tokens=20)
        assert reply["usage"]["prompt_tokens"] == 20
        ids = llm.chat_prompt(talk)[-20:]
        assert reply["prompt_token_ids"] == ids
        echo = post("/v1/completions", prompt="a" * 99 + "b", truncate_prompt_tokens=1, echo=True)
        assert echo["choices"][0]["text"].startswith(llm.get_tokenizer().decode(echo["choices"][0]["prompt_token_ids"]))
        assert len(echo["choices"][0]["prompt_token_ids"]) == 1
        refusal = post("/v1/completions", prompt="a", truncate_prompt_tokens=0)
        assert "truncate_prompt_tokens is 0" in refusal["error"]["message"]
        for body in ({"logprobs": -1}, {"prompt_logprobs": -1}):
            refusal = post("/v1/completions", prompt="a", **body)
            assert "in process only; use 0 to 64" in refusal["error"]["message"]


def test_the_tokenizer_and_a_chat_s_prompt_can_be_had(llm: LLM) -> None:
    assert llm.get_tokenizer() is llm.tokenizer
    [result] = llm.chat(TALK, GREEDY)
    assert result.prompt == "<|begin|>user\nHello<|end|>\n<|begin|>assistant\n"


def test_beams_come_in_vllm_s_shape(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True, length_penalty=0.5)
    ids = llm.get_tokenizer().encode(PROMPT)
    for prompts in ([PROMPT], [{"prompt": PROMPT}], [{"prompt_token_ids": ids}]):
        [output] = llm.beam_search(prompts, params)
        same = SamplingParams(n=3, use_beam_search=True, max_tokens=5, ignore_eos=True, length_penalty=0.5, logprobs=0)
        expected = llm.generate(PROMPT, same)[0].outputs
        assert [beam.tokens for beam in output.sequences] == [[*ids, *answer.token_ids] for answer in expected]
        assert [beam.cum_logprob for beam in output.sequences] == [answer.cumulative_logprob for answer in expected]
        assert output.sequences[0].text == PROMPT + expected[0].text
        assert len(output.sequences[0].logprobs) == 5
    with pytest.raises(RequestError, match=r"temperature is 0\.5"):
        llm.beam_search([PROMPT], replace(params, temperature=0.5))
    with pytest.raises(RequestError, match="use BeamSearchParams"):
        llm.beam_search([PROMPT], SamplingParams())  # type: ignore[arg-type]
