"""A request's tokens do not depend on what else is asked of it, nor on how its engine steps or how it is read.

Every combination of log-probabilities, prompt log-probabilities, n, best_of, stop strings and length runs in one batch,
on engines that step one by one or overlapped, with whole and chunked prompts, with room and under preemption. Each
answer is compared with that of a plain request: seed, temperature and length alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, product
from pathlib import Path

import pytest

from chairlift import LLM, SamplingParams
from chairlift.text.outputs import CompletionOutput, RequestOutput
from chairlift.text.tokenizer import Tokenizer

PROMPTS = ["The chairlift never stops", "each chair that comes by empty takes the next in the queue " * 2]
PLAIN = SamplingParams(temperature=0.8, seed=11, ignore_eos=True)
SETTINGS = {
    "roomy": {"kv_tokens": 4096},
    "chunked": {"kv_tokens": 4096, "step_tokens": 24, "max_sequences": 24},
    "tight": {"kv_tokens": 256, "max_sequences": 16},
}


@dataclass(frozen=True)
class Case:
    """A prompt, a request on it, and what each of its answers must be."""

    prompt: str
    params: SamplingParams
    expected: list[CompletionOutput]


def cut(whole: CompletionOutput, stop: str | None, tokenizer: Tokenizer) -> CompletionOutput:
    """A plain answer up to the token with which its text holds the stop string."""
    if stop is None or stop not in whole.text:
        return whole
    count = next(count for count in range(99) if stop in tokenizer.decode(whole.token_ids[:count]))
    text = whole.text.split(stop)[0]
    return CompletionOutput(whole.index, text, whole.token_ids[:count], finish_reason="stop", stop_reason=stop)


@pytest.fixture(scope="module")
def cases(tiny_model: Path) -> list[Case]:
    llm = LLM(str(tiny_model), progress=False, max_length=256, overlap=False)
    assert llm.tokenizer is not None
    found = []
    prompts = cycle(PROMPTS)
    for (n, best_of), length in product(((1, None), (3, None), (1, 3), (2, 3)), (1, 7)):
        prompt, plain = next(prompts), replace(PLAIN, n=best_of or n, max_tokens=length)
        answers = llm.generate(prompt, plain)[0].outputs
        # In the middle of the first answer: others may hold it earlier, later or not at all.
        stop = answers[0].text[3:6] or answers[0].text[:1] or "?"
        for logprobs, prompt_logprobs, stops in product((None, 2), (None, 0, 2), ((), (stop,))):
            params = replace(
                plain, n=n, best_of=best_of, logprobs=logprobs, prompt_logprobs=prompt_logprobs, stop=stops
            )
            expected = [cut(answer, stop if stops else None, llm.tokenizer) for answer in answers]
            found.append(Case(prompt, params, expected))
    return found


@pytest.fixture(scope="module", params=list(product(SETTINGS, (False, True))), ids=lambda each: f"{each[0]}-{each[1]}")
def llm(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[LLM]:
    name, overlap = request.param
    llm = LLM(str(tiny_model), progress=False, max_length=256, overlap=overlap, **SETTINGS[name])
    yield llm
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.pool.owned == 0
    assert (llm.engine.scheduler.counters.preemptions > 0) == (name == "tight")


def same(found: CompletionOutput, expected: CompletionOutput) -> bool:
    names = ("token_ids", "text", "finish_reason", "stop_reason")
    return all(getattr(found, name) == getattr(expected, name) for name in names)


def check_scores(output: RequestOutput, params: SamplingParams) -> None:
    for answer in output.outputs:
        if params.logprobs is None:
            assert answer.logprobs is None
            continue
        assert answer.logprobs is not None
        assert all(token in scored for token, scored in zip(answer.token_ids, answer.logprobs, strict=True))
        chosen = [scored[token].logprob for token, scored in zip(answer.token_ids, answer.logprobs, strict=True)]
        assert answer.cumulative_logprob == pytest.approx(sum(chosen))
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
        return
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    scored = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    assert all(entry is not None and token in entry for token, entry in scored)


def test_tokens_counts_and_scores_are_those_of_the_plain_request(llm: LLM, cases: list[Case]) -> None:
    outputs = llm.generate([case.prompt for case in cases], [case.params for case in cases])
    for case, output in zip(cases, outputs, strict=True):
        assert output.metrics.output_tokens == sum(len(answer.token_ids) for answer in case.expected), case
        assert len(output.outputs) == case.params.n
        if case.params.width == case.params.n:
            assert all(map(same, output.outputs, case.expected)), case
        else:  # the likeliest of them: which those are is another test's affair
            assert all(any(same(answer, one) for one in case.expected) for answer in output.outputs), case
        check_scores(output, case.params)


def test_streams_bring_the_same_tokens(llm: LLM, cases: list[Case]) -> None:
    streamed = [case for case in cases if case.params.width == case.params.n]
    streams = [llm.stream(case.prompt, case.params) for case in streamed]  # all are under way before the first is read
    for case, stream in zip(streamed, streams, strict=True):
        answers = [CompletionOutput(index) for index in range(case.params.n)]
        for chunk in stream:
            answers[chunk.index].text += chunk.text
            answers[chunk.index].token_ids += chunk.token_ids
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in case.expected], case
        assert [answer.text for answer in answers] == [answer.text for answer in case.expected], case


def test_one_that_is_ended_early_keeps_each_token_once(llm: LLM, cases: list[Case]) -> None:
    """An abort between any two steps leaves a prefix of the plain answer."""
    case = next(case for case in cases if case.params.max_tokens == 7 and case.params.width == 1)
    lengths = set()
    for steps in range(10):
        track = llm._submit(llm._reader.encode(case.prompt), replace(case.params, prompt_logprobs=0))
        for _ in range(steps):
            llm._driver.step()
        llm._driver.abort_unfinished([track])
        tokens = track.output.outputs[0].token_ids
        assert tokens == case.expected[0].token_ids[: len(tokens)]
        assert track.output.metrics.output_tokens == len(tokens)
        lengths.add(len(tokens))
    assert {0, 1, 2, 3} <= lengths


def test_beams_do_not_depend_on_what_is_asked_of_the_prompt(llm: LLM) -> None:
    beams = SamplingParams(use_beam_search=True, n=2, best_of=3, max_tokens=6, ignore_eos=True)
    choices = [
        replace(beams, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        for logprobs, prompt_logprobs in product((None, 1), (None, 0, 2))
    ]
    outputs = llm.generate([PROMPTS[0]] * len(choices), choices)
    for output, params in zip(outputs, choices, strict=True):
        assert [answer.token_ids for answer in output.outputs] == [a.token_ids for a in outputs[0].outputs]
        assert output.metrics.output_tokens == sum(len(answer.token_ids) for answer in output.outputs) == 12
        check_scores(output, params)
