"""With the prefix cache on, a real model says what it says without: whatever is shared, evicted, forked or aborted."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from chairlift import LLM, SamplingParams
from chairlift.core.cost import Cost
from chairlift.core.errors import SettingsError
from chairlift.core.prefix_cache import PrefixCache
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
    "with host memory": {"max_length": 256, "kv_tokens": 272, "host_tokens": 1600},
    "with host memory, overlapped, swapped": {
        "max_length": 256, "kv_tokens": 272, "host_tokens": 800, "overlap": True, "preemption": "swap",
    },
    "with a file": {"max_length": 256, "kv_tokens": 272, "host_tokens": 320, "disk_tokens": 1600},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False)


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


def cache_of(llm: LLM) -> PrefixCache:
    """Its prefix cache, which brings back what it can: for a model so small, to compute again might be as fast."""
    cache = llm.engine.scheduler.memory.prefix_cache
    assert cache is not None
    cache._cost = Cost(block_copy=0.0)
    return cache


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_the_same_with_the_cache_and_without(
    folder: Path, way: str, plain: tuple[int, list[list[list[int]]]], tmp_path: Path
) -> None:
    seed, expected = plain
    asked = conversation(Random(seed))
    settings = dict(WAYS[way])
    if "disk_tokens" in settings:
        settings["disk_cache"] = str(tmp_path)
    llm = LLM(str(folder), progress=False, **settings)
    cache = cache_of(llm)
    assert answers(llm, asked) == expected
    scheduler = llm.engine.scheduler
    assert scheduler.counters.cached_tokens > 0
    assert scheduler.memory.copied > 0
    assert cache.evictions > 0 or "kv_tokens" not in WAYS[way]
    assert scheduler.counters.preemptions > 0 or WAYS[way].get("kv_tokens") != 272
    assert sum(cache.returns) > 0 or "host_tokens" not in WAYS[way], "nothing came back"
    assert not list(tmp_path.iterdir()), "the file is gone as soon as it is open"


def test_a_bad_block_on_disk_is_computed_again(folder: Path, tmp_path: Path) -> None:
    small = {"max_length": 256, "kv_tokens": 272, "host_tokens": 320, "disk_tokens": 1600, "disk_cache": str(tmp_path)}
    draw = Random(5)
    prompts = [[draw.randrange(VOCAB) for _ in range(200)] for _ in range(4)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for spoil in (False, True):
        llm = LLM(str(folder), progress=False, **small)
        cache = cache_of(llm)
        first = [llm.generate([prompt], params)[0] for prompt in prompts]
        checks: list[bool] = []
        sound = cache.is_sound
        if spoil:
            sound.__self__.data[:, 100] ^= 1  # type: ignore[attr-defined]  # one bit of every block in the file
        cache.is_sound = lambda slot, sound=sound, checks=checks: checks.append(sound(slot)) or checks[-1]  # type: ignore[misc]
        again = [llm.generate([prompt], params)[0] for prompt in prompts]
        assert [each.outputs[0].token_ids for each in again] == [each.outputs[0].token_ids for each in first]
        assert checks
        assert all(checks) != spoil
        llm.engine.scheduler.check()


def test_a_file_that_cannot_be_made_is_an_error_at_the_start(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="choose another disk_cache or lower disk_tokens"):
        LLM(str(folder), progress=False, disk_cache=str(tmp_path / "nowhere"), host_tokens=64)
