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
# Beams whose blocks change hands: the cache of the last holds hardly more than what a search may need.
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
    model: Any, prompt: list[int], count: int, eos: int | None, width: int, n: int | None = None, **search: Any
) -> list[list[int]]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, num_beams=width,
            num_return_sequences=n or width, pad_token_id=0, eos_token_id=eos, **search,
        )  # fmt: skip
    found = []
    for row in out[:, len(prompt) :].tolist():
        found.append(row[: row.index(eos) + 1] if eos is not None and eos in row else row)
    return found


def params_of(width: int, count: int, eos: int | None, n: int | None = None, **search: Any) -> SamplingParams:
    stops = [] if eos is None else [eos]
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


@pytest.mark.parametrize("search", SEARCHES)
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


@pytest.mark.parametrize("way", WAYS)
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
    with pytest.raises(RequestError, match="no use for stop, penalties"):
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
