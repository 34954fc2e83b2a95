"""LLM as its user meets it: prompts in, answers out, every parameter kept, bad input refused and nothing lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.core.errors import RequestError
from chairlift.offline.track import Track
from tiny import make_tiny_model

PROMPT = "The chairlift never stops"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A tiny model with a real tokenizer."""
    return LLM(str(make_tiny_model(tmp_path_factory.mktemp("llm"))), progress=False, max_length=256, kv_tokens=4096)


@pytest.fixture(autouse=True)
def nothing_is_lost(llm: LLM) -> Iterator[None]:
    """After each test, whatever happened in it: no block held, every request accounted for, and the engine answers."""
    yield
    scheduler = llm.engine.scheduler
    scheduler.check()
    assert scheduler.pool.available == scheduler.pool.total
    assert not scheduler.has_work
    assert len(llm.generate([5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2


def answer(llm: LLM, prompt: Any = PROMPT, **params: Any) -> Any:
    params.setdefault("max_tokens", 24)
    return llm.generate(prompt, SamplingParams(**params))[0].outputs[0]


def text_of(llm: LLM, ids: list[int]) -> str:
    assert llm.tokenizer is not None
    return llm.tokenizer.decode(ids)


# ---- prompts and results


def test_a_result_has_the_shape_that_vllm_s_users_know(llm: LLM) -> None:
    result = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0]
    output = result.outputs[0]
    assert result.prompt == PROMPT
    assert text_of(llm, result.prompt_token_ids) == PROMPT
    assert output.index == 0
    assert len(output.token_ids) == 8
    assert output.text == text_of(llm, output.token_ids)
    assert output.finish_reason == "length"
    assert output.logprobs is None
    assert result.finished
    metrics = result.metrics
    assert metrics.arrival <= metrics.started <= metrics.first_token <= metrics.finished
    assert metrics.ttft > 0
    assert metrics.tpot > 0
    assert metrics.output_tokens == 8


def test_text_ids_and_mappings_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    ways = [PROMPT, ids, [ids], [PROMPT], {"prompt": PROMPT}, {"prompt_token_ids": ids}]
    answers = [llm.generate(way, SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].token_ids for way in ways]
    assert all(tokens == answers[0] for tokens in answers)


def test_many_prompts_come_back_in_order_each_with_its_own_params(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    results = llm.generate(["one", "two", "three"], params)
    assert [result.prompt for result in results] == ["one", "two", "three"]
    assert [len(result.outputs[0].token_ids) for result in results] == [9, 1, 5]


def test_an_overlapped_engine_begins_before_all_have_come_and_leaves_nothing_behind(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), progress=False, overlap=True, step_tokens=32, max_sequences=8)
    prompts: list[list[int]] = [[i + 1] * 20 for i in range(6)]
    planned_at: list[int] = []  # how many had come when each step was planned
    scheduler, plan = llm.engine.scheduler, llm.engine.scheduler.plan
    scheduler.plan = lambda now: (planned_at.append(scheduler.counters.submitted), plan(now))[1]  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    answers = [result.outputs[0].token_ids for result in llm.generate(prompts, params)]
    assert planned_at[0] == 2 and planned_at[1] == 6, "it waits for the first step's worth, then for all"
    one_by_one = LLM(str(tiny_model), progress=False, overlap=False)
    assert answers == [one_by_one.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]
    with pytest.raises(RequestError, match="not a token id"):
        llm.generate([*prompts, [1, None]], params, on_error="raise")  # type: ignore[list-item]
    assert llm.generate(prompts[0], params)[0].outputs[0].token_ids == answers[0]
    assert scheduler.pool.owned == 0 and not scheduler.has_work
    scheduler.check()


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    result = llm.chat(messages, SamplingParams(temperature=0, max_tokens=4))[0]
    written = llm.tokenizer.decode(result.prompt_token_ids, skip_special_tokens=False)
    assert written == "<|begin|>user\nHello<|end|>\n<|begin|>assistant\n"
    two = llm.chat([messages, messages], SamplingParams(temperature=0, max_tokens=4))
    assert [r.outputs[0].token_ids for r in two] == [result.outputs[0].token_ids] * 2


def test_a_stream_says_the_same_as_generate_piece_by_piece(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    chunks = list(llm.stream(PROMPT, params))
    whole = llm.generate(PROMPT, params)[0].outputs[0]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_tokens_that_nobody_streams_are_read_at_the_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    read = Track.read

    def watched(track: Track, now: Any, sequence: Any, tokens: tuple[int, ...], *more: Any) -> bool:
        told.extend(tokens)
        return read(track, now, sequence, tokens, *more)

    monkeypatch.setattr(Track, "read", watched)
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, n=2))
    for answer in output.outputs:
        assert len(answer.token_ids) == 12
        assert answer.text == llm.tokenizer.decode(answer.token_ids)
    assert output.metrics.output_tokens == 24
    ids = output.outputs[0].token_ids
    assert told == [ids[0], ids[-1], ids[-1]], "the first, for its time, and the last of each"


def test_one_that_is_ended_keeps_what_had_come(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    whole = llm.generate(PROMPT, params)[0].outputs[0]
    track = llm._submit(llm._reader.encode(PROMPT), params)
    while not track.output.metrics.first_token:
        llm._driver.step()
    for _ in range(4):
        llm._driver.step()
    llm._driver.close()
    answer = track.output.outputs[0]
    assert answer.finish_reason == "abort"
    assert answer.token_ids == whole.token_ids[:5]
    assert whole.text.startswith(answer.text)
    assert answer.text


def test_leaving_a_stream_early_frees_everything(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    assert llm.engine.scheduler.pool.owned > 0
    stream.close()
    assert llm.engine.scheduler.pool.owned == 0
    assert llm.engine.scheduler.counters.aborted > 0


def test_two_streams_run_side_by_side(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    pairs = list(zip(llm.stream("one", params), llm.stream("two", params), strict=True))
    alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in ("one", "two")]
    assert [[c.token_ids[0] for c in column] for column in zip(*pairs, strict=True)] == alone


# ---- the prefix cache


def test_a_prompt_that_begins_as_another_did_tells_what_it_shared(llm: LLM) -> None:
    prompt, params = list(range(10, 110)), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.reset_prefix_cache()

    def cached(prompt: list[int], **more: Any) -> int:
        [result] = llm.generate(prompt, replace(params, **more))
        return result.num_cached_tokens

    first, second = (llm.generate(prompt, params)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 96), "six blocks of 16 are full"
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    assert cached(prompt, n=3) == 96, "of one prompt, however many answers it has"
    assert cached(prompt[:50] + [5] * 50) == 48
    assert cached(prompt[1:]) == 0
    assert cached(prompt, prompt_logprobs=0) == 0, "every token's must be computed"
    stream = llm.stream(prompt, params)
    next(stream)
    assert llm.reset_prefix_cache() >= 6
    assert [token for chunk in stream for token in chunk.token_ids] == first.outputs[0].token_ids[1:]
    assert llm.reset_prefix_cache() == 0, "what was under way when all was forgotten is not kept either"
    assert [cached(prompt), cached(prompt)] == [0, 96]


def test_without_a_prefix_cache_nothing_is_shared(llm: LLM) -> None:
    own = LLM(llm.model, progress=False, max_length=256, kv_tokens=512, prefix_cache=False)
    results = own.generate([list(range(10, 110))] * 2, SamplingParams(max_tokens=2))
    assert [result.num_cached_tokens for result in results] == [0, 0]
    assert own.reset_prefix_cache() == 0


# ---- choosing tokens


def test_a_seed_gives_the_same_answer_alone_and_in_any_company(llm: LLM) -> None:
    params = SamplingParams(seed=7, max_tokens=20, ignore_eos=True)
    alone = llm.generate(PROMPT, params)[0].outputs[0].token_ids
    others = [SamplingParams(seed=n, max_tokens=15, ignore_eos=True, top_p=0.9) for n in range(10)]
    crowd = llm.generate([PROMPT] + ["x" * n for n in range(1, 11)], [params, *others])
    assert crowd[0].outputs[0].token_ids == alone
    assert answer(llm, seed=8, max_tokens=20, ignore_eos=True).token_ids != alone


def test_requests_without_a_seed_differ(llm: LLM) -> None:
    results = llm.generate([PROMPT] * 4, SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True))
    assert len({tuple(result.outputs[0].token_ids) for result in results}) == 4


def test_n_answers_differ_and_each_repeats_with_the_seed(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=3, temperature=1.5, max_tokens=20, ignore_eos=True)
    first, second = (llm.generate(PROMPT, params)[0].outputs for _ in range(2))
    assert [output.index for output in first] == [0, 1, 2, 3]
    assert [output.token_ids for output in first] == [output.token_ids for output in second]
    assert len({tuple(output.token_ids) for output in first}) == 4
    assert first[0].token_ids == answer(llm, seed=3, temperature=1.5, max_tokens=20, ignore_eos=True).token_ids


def test_n_greedy_answers_are_the_greedy_answer(llm: LLM) -> None:
    outputs = llm.generate(PROMPT, SamplingParams(n=3, temperature=0, max_tokens=20))[0].outputs
    alone = answer(llm, temperature=0, max_tokens=20).token_ids
    assert [output.token_ids for output in outputs] == [alone] * 3


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}])
def test_sampling_narrowed_to_one_token_is_greedy(llm: LLM, narrow: dict[str, float]) -> None:
    assert answer(llm, seed=1, **narrow).token_ids == answer(llm, temperature=0).token_ids


def test_logit_bias_can_force_and_forbid(llm: LLM) -> None:
    assert answer(llm, temperature=0, logit_bias={42: 100.0}, max_tokens=5).token_ids == [42] * 5
    usual = answer(llm, temperature=0, max_tokens=10, ignore_eos=True).token_ids
    changed = answer(llm, temperature=0, max_tokens=10, ignore_eos=True, logit_bias={usual[0]: -100.0}).token_ids
    assert usual[0] not in changed


def test_only_allowed_tokens_come(llm: LLM) -> None:
    tokens = answer(llm, allowed_token_ids=[10, 11, 12], max_tokens=40, seed=1).token_ids
    assert set(tokens) == {10, 11, 12}


def test_a_bad_word_of_two_tokens_never_appears_but_its_first_token_may(llm: LLM) -> None:
    def pairs(tokens: list[int]) -> list[list[int]]:
        return [tokens[i : i + 2] for i in range(len(tokens) - 1)]

    # Few enough tokens that greedy decoding comes back to them; all of them printable, so that a pair is a word.
    letters = [
        token for token in range(2, 384) if (text := llm.tokenizer.token_text(token)).isalpha() and len(text) == 1
    ]
    params = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "allowed_token_ids": letters[:20]}
    free = answer(llm, **params).token_ids
    encode = llm.tokenizer.encode
    word = next(pair for pair in pairs(free) if encode(text_of(llm, pair), add_special_tokens=False) == pair)
    banned = answer(llm, **params, bad_words=[text_of(llm, word)]).token_ids
    assert word not in pairs(banned)
    assert word[0] in banned


def test_penalties_push_repeated_tokens_down(llm: LLM) -> None:
    params = {"temperature": 0, "max_tokens": 60, "ignore_eos": True, "allowed_token_ids": list(range(20, 80))}
    plain = answer(llm, **params).token_ids
    for penalty in ({"repetition_penalty": 50.0}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        assert len(set(answer(llm, **params, **penalty).token_ids)) > len(set(plain))


def test_penalties_survive_preemption(tmp_path: Path) -> None:
    """Each row's history is rebuilt when it comes back, so squeezing the cache must not change a token."""
    folder = make_tiny_model(tmp_path)
    params = SamplingParams(temperature=0.8, seed=5, repetition_penalty=1.4, frequency_penalty=0.5, max_tokens=60)
    prompts = [[n] * 20 for n in range(3, 15)]
    roomy = LLM(str(folder), progress=False, max_length=128).generate(prompts, params)
    tight_llm = LLM(str(folder), progress=False, max_length=128, kv_tokens=160)
    tight = tight_llm.generate(prompts, params)
    assert tight_llm.engine.scheduler.counters.preemptions > 0
    assert {result.num_cached_tokens for result in tight} == {0}, (
        "what it finds of itself when it comes back is no gain"
    )
    assert [r.outputs[0].token_ids for r in tight] == [r.outputs[0].token_ids for r in roomy]


# ---- stopping


def test_the_end_token_stops_unless_ignored(llm: LLM) -> None:
    eos = llm.tokenizer.eos_token_id
    stopped = answer(llm, temperature=0, logit_bias={eos: 100.0})
    assert stopped.token_ids == [eos]
    assert stopped.text == ""
    assert stopped.finish_reason == "stop"
    assert answer(llm, temperature=0, logit_bias={eos: 100.0}, ignore_eos=True, max_tokens=3).finish_reason == "length"


def test_min_tokens_holds_the_end_back(llm: LLM) -> None:
    eos = llm.tokenizer.eos_token_id
    tokens = answer(llm, temperature=0, logit_bias={eos: 100.0}, min_tokens=5).token_ids
    assert len(tokens) == 6
    assert tokens[-1] == eos


def test_a_stop_token_ends_the_answer_and_is_not_shown(llm: LLM) -> None:
    free = answer(llm, temperature=0, max_tokens=24, ignore_eos=True)
    stop = free.token_ids[5]
    cut = answer(llm, temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=[stop])
    place = free.token_ids.index(stop)
    assert cut.token_ids == free.token_ids[: place + 1]
    assert cut.text == text_of(llm, free.token_ids[:place])
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_string_never_leaks_into_the_stream(llm: LLM, overlap: bool) -> None:
    own = LLM(llm.model, progress=False, max_length=256, kv_tokens=512, overlap=overlap)
    params = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    free = own.generate(PROMPT, SamplingParams(**params))[0].outputs[0]
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 5]
    chunks = list(own.stream(PROMPT, SamplingParams(stop=stop, **params)))
    text = "".join(chunk.text for chunk in chunks)
    assert text == free.text[: free.text.index(stop)]
    assert chunks[-1].finish_reason == "stop"
    whole = own.generate(PROMPT, SamplingParams(stop=[stop, "never there"], **params))[0].outputs[0]
    assert (whole.text, whole.finish_reason, whole.stop_reason) == (text, "stop", stop)
    assert whole.token_ids == free.token_ids[: len(whole.token_ids)]
    assert stop in text_of(own, whole.token_ids)
    shown = own.generate(PROMPT, SamplingParams(stop=stop, include_stop_str_in_output=True, **params))[0].outputs[0]
    assert shown.text == text + stop
    own.engine.scheduler.check()
    assert own.engine.scheduler.pool.owned == 0


def test_one_of_n_answers_may_stop_while_the_others_go_on(llm: LLM) -> None:
    params = {"n": 3, "seed": 3, "temperature": 1.5, "max_tokens": 30, "ignore_eos": True}
    free = llm.generate(PROMPT, SamplingParams(**params))[0].outputs
    stop = free[1].text[3:7]
    cut = llm.generate(PROMPT, SamplingParams(stop=stop, **params))[0].outputs
    for before, after in zip(free, cut, strict=True):
        assert after.text == before.text.split(stop)[0]


def test_the_context_ends_an_answer_without_max_tokens(llm: LLM) -> None:
    output = answer(llm, [9] * 250, max_tokens=None, ignore_eos=True)
    assert len(output.token_ids) == 6
    assert output.finish_reason == "length"


# ---- log-probabilities


def test_logprobs_are_those_of_transformers(llm: LLM) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(llm.model, dtype=torch.float32)
    result = llm.generate(
        PROMPT,
        SamplingParams(seed=1, temperature=0.7, top_k=9, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2),
    )[0]
    output = result.outputs[0]
    ids = result.prompt_token_ids + output.token_ids
    with torch.inference_mode():
        exact = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    first = len(result.prompt_token_ids)
    for i, (token, found) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        row = exact[first + i - 1]
        assert found[token].logprob == pytest.approx(row[token].item(), abs=1e-3)
        assert found[token].rank == int((row > row[token]).sum()) + 1
        assert found[token].decoded_token == llm.tokenizer.token_text(token)
        assert set(row.topk(3).indices.tolist()) <= found.keys()
    assert output.cumulative_logprob == pytest.approx(
        sum(f[t].logprob for t, f in zip(output.token_ids, output.logprobs, strict=True))
    )
    assert result.prompt_logprobs[0] is None
    for i, token in enumerate(result.prompt_token_ids[1:], 1):
        assert result.prompt_logprobs[i][token].logprob == pytest.approx(exact[i - 1, token].item(), abs=1e-3)


def test_prompt_logprobs_are_the_same_in_chunks(llm: LLM) -> None:
    chunked = LLM(llm.model, progress=False, max_length=256, kv_tokens=512, step_tokens=16, max_sequences=4)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    prompt = list(range(3, 80))
    whole, pieces = (engine.generate(prompt, params)[0].prompt_logprobs for engine in (llm, chunked))
    assert whole == pieces


# ---- bad input


BAD_PROMPTS = {
    "empty text": ("", "empty"),
    "no ids": ([[]], "empty"),
    "an id out of range": ([[5, 99999]], "99999"),
    "a negative id": ([[-1]], "-1"),
    "longer than the context": ([[7] * 400], "400"),
    "not a token": ([["a", "b"]], "'a'"),
    "a mapping without a prompt": ({"text": "hi"}, "prompt_token_ids"),
}


@pytest.mark.parametrize(("prompt", "named"), BAD_PROMPTS.values(), ids=BAD_PROMPTS.keys())
def test_a_bad_prompt_is_one_clear_line_and_its_neighbours_are_freed(llm: LLM, prompt: Any, named: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompt)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    if isinstance(prompt, list):
        with pytest.raises(RequestError):
            llm.generate([[5, 6, 7], *prompt], on_error="raise")


def test_the_wrong_number_of_params_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 prompts and 3"):
        llm.generate(["a", "b"], [SamplingParams()] * 3)


def test_n_beyond_the_batch_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="n is 1000"):
        llm.generate(PROMPT, SamplingParams(n=1000))


def test_a_failing_step_fails_its_requests_and_the_engine_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(type(llm.engine._executor._decoder), "forward", lambda *_: 1 / 0)
        with pytest.raises(RequestError, match="division by zero"):
            llm.generate([PROMPT] * 3)
    assert llm.engine.scheduler.counters.failed == 3
