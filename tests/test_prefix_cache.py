"""With the prefix cache on, a real model says what it says without: whatever is shared, evicted, forked or aborted."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from chairlift import LLM, SamplingParams
from tiny import make_tiny_model

VOCAB = 384

# Each is a way in which blocks change hands; the memory of most holds little more than one full sequence.
WAYS: dict[str, dict[str, Any]] = {
    "with room": {},
    "overlapped": {"overlap": True},
    "evicted": {"max_length": 256, "kv_tokens": 512},
    "preempted": {"max_length": 256, "kv_tokens": 272, "max_sequences": 12},
    "preempted, overlapped, in small steps": {
        "max_length": 256, "kv_tokens": 272, "overlap": True, "step_tokens": 24, "max_sequences": 12,
    },
    "swapped": {"max_length": 256, "kv_tokens": 272, "preemption": "swap"},
    "prefill first": {"prefill": "prefill-first", "max_length": 256, "kv_tokens": 512},
    "whole": {"prefill": "whole", "max_length": 256},
}  # fmt: skip


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen3ForCausalLM"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), request.param, tokenizer=False)


def conversation(draw: Random) -> list[tuple[list[int], SamplingParams, int | None]]:
    """Prompts that begin as others did, some with forks, some of which their asker leaves after so many tokens."""
    stems = [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 90))] for _ in range(4)]
    asked = []
    for _ in range(24):
        stem = draw.choice(stems)
        prompt = stem[: draw.randint(1, len(stem))] + [draw.randrange(VOCAB) for _ in range(draw.randint(0, 20))]
        stems.append(prompt)
        n = draw.choice((1, 1, 1, 3))
        params = SamplingParams(temperature=0, max_tokens=draw.randint(1, 40), n=n, ignore_eos=True)
        asked.append((prompt, params, draw.choice((None, None, None, 3))))
    return asked


def answers(llm: LLM, asked: list[tuple[list[int], SamplingParams, int | None]]) -> list[list[list[int]]]:
    """In three waves, so that the later ones find what the earlier ones left."""
    found: list[list[list[int]]] = []
    for wave in range(0, len(asked), 8):
        stays = [(prompt, params) for prompt, params, leaves in asked[wave : wave + 8] if leaves is None]
        for prompt, params, leaves in asked[wave : wave + 8]:
            if leaves is not None:
                for seen, _ in enumerate(llm.stream(prompt, params)):
                    if seen == leaves:
                        break
        results = llm.generate([prompt for prompt, _ in stays], [params for _, params in stays])
        found += [[answer.token_ids for answer in result.outputs] for result in results]
        llm.engine.scheduler.check()
        assert llm.engine.scheduler.pool.owned == 0
    return found


@pytest.fixture(scope="module", params=[1, 2])
def plain(request: pytest.FixtureRequest, folder: Path) -> tuple[int, list[list[list[int]]]]:
    """A seed, and the answers to its questions without a cache."""
    llm = LLM(str(folder), progress=False, prefix_cache=False)
    return request.param, answers(llm, conversation(Random(request.param)))


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_the_same_with_the_cache_and_without(
    folder: Path, way: str, plain: tuple[int, list[list[list[int]]]]
) -> None:
    seed, expected = plain
    asked = conversation(Random(seed))
    llm = LLM(str(folder), progress=False, **WAYS[way])
    assert answers(llm, asked) == expected
    scheduler = llm.engine.scheduler
    cache = scheduler.memory.prefix_cache
    assert cache is not None
    assert scheduler.counters.cached_tokens > 0
    assert scheduler.memory.copied > 0
    assert cache.evictions > 0 or "kv_tokens" not in WAYS[way]
    assert scheduler.counters.preemptions > 0 or WAYS[way].get("kv_tokens") != 272


def test_the_default_model_says_the_same_with_the_cache_and_without() -> None:
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
