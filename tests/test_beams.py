"""Beam search gives transformers' beams, token for token, whatever the memory, the loop or the crowd."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from chairlift import LLM, SamplingParams
from chairlift.core.errors import RequestError
from mostly_long import mostly_long
from tiny import make_tiny_model

SEARCHES: dict[str, dict[str, Any]] = {
    "two beams": {"width": 2},
    "five, of which the best two": {"width": 5, "n": 2},
    "ended by the first answers": {"width": 3, "early_stopping": True},
    "never ended early": {"width": 3, "early_stopping": "never"},
    "long answers favoured": {"width": 4, "length_penalty": 2.0},
    "short answers favoured": {"width": 4, "length_penalty": -1.0},
    "length ignored": {"width": 4, "length_penalty": 0.0, "early_stopping": "never"},
    "one beam": {"width": 1},
}
# Searches that reuse blocks: the cache of the last holds hardly more than what a search may need.
WAYS: dict[str, dict[str, Any]] = {
    "with room": {},
    "overlapped": {"overlap": True},
    "without a prefix cache": {"prefix_cache": False},
    "in small steps": {"step_tokens": 16, "max_sequences": 16},
    "preempted": {"max_length": 160, "kv_tokens": 832},
    "swapped": {"max_length": 160, "kv_tokens": 832, "preemption": "swap"},
    "preempted, overlapped, without a prefix cache": {
        "max_length": 160, "kv_tokens": 832, "overlap": True, "prefix_cache": False,
    },
}  # fmt: skip


def beams_of_transformers(
    model: Any,
    prompt: list[int],
    count: int,
    eos: int | list[int] | None,
    width: int,
    n: int | None = None,
    **search: Any,
) -> list[list[int]]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, num_beams=width,
            num_return_sequences=n or width, pad_token_id=0, eos_token_id=eos, **search,
        )  # fmt: skip
    found = []
    stops = set() if eos is None else set(eos) if isinstance(eos, list) else {eos}
    for row in out[:, len(prompt) :].tolist():
        end = next((place + 1 for place, token in enumerate(row) if token in stops), len(row))
        found.append(row[:end])
    return found


def params_of(
    width: int, count: int, eos: int | list[int] | None, n: int | None = None, **search: Any
) -> SamplingParams:
    stops = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return SamplingParams(
        n=n or width,
        best_of=width,
        use_beam_search=True,
        max_tokens=count,
        ignore_eos=True,
        stop_token_ids=stops,
        **search,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Narrow weights: many answers are about as likely, so that beams cross all the time.
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False, initializer_range=0.12, vocab_size=64)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize(
    "search", [pytest.param(each, marks=pytest.mark.long if place % 4 else []) for place, each in enumerate(SEARCHES)]
)
def test_every_search_gives_the_beams_of_transformers(folder: Path, model: Any, search: str) -> None:
    draw = random.Random(1)
    llm = LLM(str(folder), progress=False)
    prompts = [[draw.randrange(64) for _ in range(draw.randint(1, 60))] for _ in range(6)]
    for eos in (None, 7):
        params = params_of(count=25, eos=eos, **SEARCHES[search])
        expected = [beams_of_transformers(model, prompt, 25, eos, **SEARCHES[search]) for prompt in prompts]
        got = [[answer.token_ids for answer in result.outputs] for result in llm.generate(prompts, params)]
        assert got == expected
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.pool.owned == 0


@pytest.mark.parametrize("stops", mostly_long([10, 2, 40]))
def test_many_stop_tokens_give_the_beams_of_transformers(folder: Path, model: Any, stops: int) -> None:
    draw = random.Random(stops)
    eos = draw.sample(range(64), stops)
    prompts = [[draw.randrange(64) for _ in range(draw.randint(1, 60))] for _ in range(6)]
    llm = LLM(str(folder), progress=False)
    for search in ({"width": 4}, {"width": 3, "length_penalty": 3.0, "early_stopping": "never"}):
        expected = [beams_of_transformers(model, prompt, 12, eos, **search) for prompt in prompts]
        got = llm.generate(prompts, params_of(count=12, eos=eos, **search))
        assert [[answer.token_ids for answer in result.outputs] for result in got] == expected


def test_a_beam_has_the_alternatives_that_were_asked_for_and_keeps_no_others(folder: Path) -> None:
    """The scores that the same tokens have in a prompt, where there are no beams."""
    llm = LLM(str(folder), progress=False)
    prompt = [3, 1, 4, 1, 5]
    for asked in (None, 0, 3, 40):
        params = params_of(width=4, count=10, eos=[7, 8, 9], logprobs=asked)
        for answer in llm.generate(prompt, params)[0].outputs:
            read = SamplingParams(max_tokens=1, prompt_logprobs=asked or 0)
            scores = llm.generate([prompt + answer.token_ids], read)[0].prompt_logprobs[len(prompt) :]
            assert answer.cumulative_logprob == pytest.approx(
                sum(scored[token].logprob for token, scored in zip(answer.token_ids, scores, strict=True)), abs=1e-4
            )
            assert (answer.logprobs is None) == (asked is None)
            for got, expected in zip(answer.logprobs or (), scores, strict=asked is not None):
                assert {token: each.rank for token, each in got.items()} == {
                    token: each.rank for token, each in expected.items()
                }
                assert [got[token].logprob for token in got] == pytest.approx(
                    [expected[token].logprob for token in got], abs=1e-4
                )


def test_a_search_holds_no_more_than_its_beams_however_many_tokens_stop_it(folder: Path) -> None:
    llm = LLM(str(folder), progress=False)
    scheduler, width = llm.engine.scheduler, 8
    offered, held, apply = [], [], scheduler.apply

    def measure(step: Any, result: Any) -> Any:
        offered.extend(len(each.tokens) for each in result.logprobs or ())
        beams = step.samples[0].group
        outcome = apply(step, result)
        held.append(sum(1 + len(beam.last.top) for beam in (*beams._beams.values(), *beams.finished) if beam.last))
        return outcome

    scheduler.apply = measure  # type: ignore[method-assign]
    llm.generate([[3, 5, 7]], params_of(width=width, count=20, eos=list(range(1, 50))))
    assert len(held) > 1
    assert max(offered) <= width + 49
    assert max(held) <= 2 * width, "the beams that go on and those that have ended, with no alternatives"


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if "preempted" in way else pytest.mark.long) for way in WAYS]
)
def test_beams_are_the_same_in_every_way_to_run(folder: Path, model: Any, way: str) -> None:
    draw = random.Random(2)
    prompts = [[draw.randrange(64) for _ in range(draw.randint(1, 90))] for _ in range(8)]
    searches = [{"width": draw.choice((2, 3, 5))} for _ in prompts]
    params = [params_of(count=40, eos=9, **search) for search in searches]
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    llm = LLM(str(folder), progress=False, **WAYS[way])
    results = llm.generate(prompts * 2, [*params, *[greedy] * len(prompts)])
    for prompt, search, result in zip(prompts, searches, results[: len(prompts)], strict=True):
        assert [answer.token_ids for answer in result.outputs] == beams_of_transformers(model, prompt, 40, 9, **search)
    scheduler = llm.engine.scheduler
    scheduler.check()
    assert scheduler.pool.owned == 0
    assert (scheduler.counters.preemptions > 0) == ("kv_tokens" in WAYS[way])


def test_beams_share_their_prompt_and_what_they_have_in_common(folder: Path) -> None:
    llm = LLM(str(folder), progress=False)
    scheduler = llm.engine.scheduler
    most, step = 0, scheduler.plan

    def plan(now: float) -> Any:
        nonlocal most
        made = step(now)
        scheduler.check()
        most = max(most, scheduler.pool.owned)
        return made

    scheduler.plan = plan  # type: ignore[method-assign]
    llm.generate([[3] * 200], params_of(width=8, count=20, eos=None))
    assert most <= 200 // 16 + 8 * 2


def test_an_aborted_search_leaves_nothing_behind(folder: Path) -> None:
    llm = LLM(str(folder), progress=False)
    stream = llm.stream([5] * 40, params_of(width=4, count=200, eos=None))
    for _ in range(3):
        llm.engine.step()
    assert llm.engine.scheduler.pool.owned > 0
    del stream
    llm.close()
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.pool.owned == 0


def test_what_beams_cannot_do_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(RequestError, match="does not support stop, penalties"):
        SamplingParams(use_beam_search=True, n=2, stop="x", presence_penalty=1.0)
    with pytest.raises(RequestError, match="best_of is 1, out of range: use n or more"):
        SamplingParams(n=2, best_of=1)
    with pytest.raises(RequestError, match="early_stopping is 'soon': use True, False or 'never'"):
        SamplingParams(use_beam_search=True, early_stopping="soon")
    with pytest.raises(RequestError, match="length_penalty is 100, out of range"):
        SamplingParams(use_beam_search=True, length_penalty=100)
    llm = LLM(str(folder), progress=False, max_length=160, kv_tokens=320)
    with pytest.raises(RequestError, match="5 beams of up to 140 tokens may take 45 KV blocks and there are 20"):
        llm.generate([[1] * 40], params_of(width=5, count=100, eos=None))
    assert llm.generate([[1] * 4], SamplingParams(max_tokens=1))[0].finished


@pytest.mark.parametrize(("width", "stops"), [(64, 1), (40, 25), (2, 63)])
def test_more_beams_than_tokens_to_go_on_with_are_refused(folder: Path, width: int, stops: int) -> None:
    llm = LLM(str(folder), progress=False, max_sequences=64)
    left = 64 - stops
    eos = list(range(stops))
    with pytest.raises(RequestError, match=f"best_of is {width} beams, and of the model's 64 tokens only {left} do"):
        llm.generate([[1] * 4], params_of(width=width, count=5, eos=eos))
    [result] = llm.generate([[1] * 4], params_of(width=left, count=5, eos=eos))
    assert len(result.outputs) == left
    assert len({tuple(answer.token_ids) for answer in result.outputs}) == left
    assert not llm.engine.scheduler.has_work
