"""The default model, its real weights: greedy float32 tokens, beams and shared prefixes equal those of transformers.

Its quantized products give other tokens, which depend on nothing but the prompt.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.initialization import no_init_weights

from chairlift import LLM, SamplingParams
from chairlift.bench.edits import EDITS
from chairlift.core.step_times import StepTimes
from chairlift.models.checkpoint import open_checkpoint
from chairlift.models.sources import resolve
from test_beams import beams_of_transformers, params_of
from test_greedy import continue_with_transformers, likeliest_after

QUESTIONS = [
    f"{ask} {topic}?"
    for topic in ("gravity", "a prime number", "the capital of France", "photosynthesis", "12 times 12",
                  "a haiku", "the speed of light", "TCP", "the French Revolution", "a chairlift")
    for ask in ("What is", "Explain in one sentence:", "Why do people care about", "Tell me a joke about", "¿Qué es")
]  # fmt: skip


@pytest.fixture(scope="module")
def smollm() -> Any:
    """The default model's real weights in transformers."""
    checkpoint = open_checkpoint(resolve("smollm2-135m", progress=False))
    config = {key: value for key, value in checkpoint.config.items() if key != "architectures"}
    with no_init_weights():
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).float().eval()
    weights = {name: checkpoint.tensor(name, torch.float32) for name in checkpoint.names()}
    missing = model.load_state_dict(weights, strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"])
    assert not missing.unexpected_keys
    model.tie_weights()
    return model


@pytest.mark.parametrize(
    ("prompts", "tokens"),
    [pytest.param(3, 8, id="3 prompts"), pytest.param(50, 24, id="50 prompts", marks=pytest.mark.long)],
)
def test_greedy_tokens_equal_transformers_in_every_way_to_run(smollm: Any, prompts: int, tokens: int) -> None:
    questions = QUESTIONS[:: len(QUESTIONS) // prompts][:prompts]
    params = SamplingParams(temperature=0, max_tokens=tokens)

    def answers(*, alone: bool = False, **settings: Any) -> tuple[list[list[int]], list[list[int]], int]:
        llm = LLM(progress=False, dtype="float32", max_length=128, **settings)
        asked = [llm.chat_prompt([{"role": "user", "content": question}]) for question in questions]
        batches = [[prompt] for prompt in asked] if alone else [asked]
        results = [result for batch in batches for result in llm.generate(batch, params)]
        llm.engine.scheduler.check()
        return asked, [result.outputs[0].token_ids for result in results], llm.engine.scheduler.counters.preemptions

    asked, together, _ = answers()
    assert len(asked) == prompts
    for prompt, answer in zip(asked, together, strict=True):
        assert likeliest_after(smollm, prompt, answer) == answer
    for prompt, answer in list(zip(asked, together, strict=True))[::10]:
        assert continue_with_transformers(smollm, prompt, len(answer)) == answer
    if prompts == len(QUESTIONS):
        assert answers(alone=True)[1] == together
        assert answers(step_tokens=16, max_sequences=16)[1] == together
        _, squeezed, preemptions = answers(kv_tokens=1024)
        assert squeezed == together
        assert preemptions > 0


@pytest.mark.long
def test_beams_are_those_of_transformers(smollm: Any) -> None:
    llm = LLM(progress=False, dtype="float32", max_length=512)
    questions = ("What is gravity?", "Tell me a joke about trains.")
    prompts = [llm.chat_prompt([{"role": "user", "content": question}]) for question in questions]
    eos = next(iter(llm.config.eos_ids))
    params = params_of(width=4, count=20, eos=eos)
    for prompt, result in zip(prompts, llm.generate(prompts, params), strict=True):
        assert [answer.token_ids for answer in result.outputs] == beams_of_transformers(smollm, prompt, 20, eos, 4)


@pytest.mark.long
def test_quantized_answers_do_not_depend_on_how_they_are_run(smollm: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)

    def run(*, alone: bool = False, **settings: Any) -> tuple[list[list[int]], list[list[int]], LLM]:
        llm = LLM(progress=False, max_length=128, **settings)
        asked = [llm.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS[::7]]
        batches = [[prompt] for prompt in asked] if alone else [asked]
        results = [result for batch in batches for result in llm.generate(batch, params)]
        llm.engine.scheduler.check()
        return asked, [result.outputs[0].token_ids for result in results], llm

    asked, together, _ = run()
    assert run(alone=True)[1] == together
    assert run(step_tokens=16, max_sequences=16)[1] == together
    _, squeezed, llm = run(kv_tokens=128)
    assert squeezed == together and llm.engine.scheduler.counters.preemptions > 0
    assert [result.outputs[0].token_ids for result in llm.generate(asked, params)] == together  # from the prefix cache
    likeliest = [likeliest_after(smollm, *each) for each in zip(asked, together, strict=True)]
    same = [a == b for one, other in zip(likeliest, together, strict=True) for a, b in zip(one, other, strict=True)]
    assert sum(same) > 0.9 * len(same)  # of the tokens that float32 takes in the same place


@pytest.mark.long
def test_answers_are_the_same_with_the_prefix_cache_and_without() -> None:
    system = {"role": "system", "content": "You answer in one short sentence. " * 12}
    topics = ("rivers", "rain", "bread", "trains", "the moon", "salt")
    params = SamplingParams(temperature=0, max_tokens=16)
    said = []
    for caches in (False, True):
        llm = LLM(progress=False, max_length=512, prefix_cache=caches)
        turns = [[system, {"role": "user", "content": f"Tell me about {topic}."}] for topic in topics]
        first = [result.outputs[0].text for result in llm.chat(turns, params)]
        for turn, answer in zip(turns, first, strict=True):
            turn += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Why?"}]
        said.append((first, [result.outputs[0].token_ids for result in llm.chat(turns, params)]))
        hits = llm.engine.scheduler.counters.cached_tokens
        assert hits > 1000 if caches else hits == 0
    assert said[0] == said[1]


@pytest.mark.long
def test_drafts_from_the_text_keep_the_answers_of_transformers(smollm: Any) -> None:
    llm = LLM(progress=False, dtype="float32", speculation="ngram", max_length=1024)
    speculation = llm.engine.scheduler.planner.speculation
    assert speculation is not None
    speculation.times = StepTimes([(1, 1.0), (400, 1.0)])  # as many drafts as there are
    messages = [[{"role": "user", "content": prompt}] for prompt in EDITS[4::5]]
    for result in llm.chat(messages, SamplingParams(temperature=0, max_tokens=48)):
        answer = result.outputs[0].token_ids
        assert likeliest_after(smollm, result.prompt_token_ids, answer) == answer
    assert sum(speculation.counts.accepted) > 40
