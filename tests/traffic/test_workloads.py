"""Workloads are the same on every machine, token for token."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from chairlift.core.errors import ChairliftError
from chairlift.traffic.workloads import Lengths, Workload, from_file, lognormal, make, uniform

ANY = Lengths(4, 8, 6)


def no_text(text: str) -> list[int]:
    raise AssertionError(f"{text!r} needs no tokenizer")


def named(name: str) -> Workload:
    return make(name, 1, ANY, ANY, 0)


@pytest.mark.parametrize(("name", "n"), [("uniform256", 256), ("uniform512", 512)])
def test_the_uniform_workloads_are_drawn_in_the_published_order(name: str, n: int) -> None:
    r = random.Random(0)
    prompts = [[r.randint(0, 10000) for _ in range(r.randint(100, 1024))] for _ in range(n)]
    outputs = [r.randint(100, 1024) for _ in range(n)]
    assert named(name) == Workload.of(name, prompts, outputs)


def test_the_fixed_workloads_have_one_length() -> None:
    for name, n, prompt, output in (("single", 1, 128, 256), ("prefill8k", 32, 8192, 1)):
        found = named(name)
        assert [len(each) for each in found.prompts] == [prompt] * n and found.outputs == [output] * n
    r = random.Random(0)
    assert named("single").prompts == [[r.randint(0, 10000) for _ in range(128)]]


def test_cpu64_is_drawn_in_the_published_order() -> None:
    rng = np.random.default_rng(1234)
    lengths = [
        np.clip(np.round(rng.lognormal(np.log(64) - 0.32, 0.8, 64)), low, high).astype(int)
        for low, high in ((8, 512), (4, 256))
    ]
    prompts = [rng.integers(10, 31990, length).tolist() for length in lengths[0]]
    found = named("cpu64")
    assert found == Workload.of("cpu64", prompts, lengths[1].tolist())
    assert (found.prompt_tokens, found.output_tokens) == (4465, 5059)
    json.dumps(found.outputs)  # plain numbers, not NumPy's


def test_generic_workloads_keep_within_their_lengths() -> None:
    for kind in (uniform, lognormal):
        found = kind(200, Lengths(3, 40, 12), Lengths(2, 9, 4), seed=3)
        assert {len(each) for each in found.prompts} <= set(range(3, 41)) and set(found.outputs) <= set(range(2, 10))
        assert found == kind(200, Lengths(3, 40, 12), Lengths(2, 9, 4), seed=3)
        assert found != kind(200, Lengths(3, 40, 12), Lengths(2, 9, 4), seed=4)


def test_tokens_are_brought_within_a_smaller_vocabulary() -> None:
    small = named("single").encoded(no_text, 100)
    assert max(map(max, small.prompts)) < 100
    assert small.prompts[0] == [token % 100 for token in named("single").prompts[0]]


def test_a_file_gives_texts_counts_or_tokens(tmp_path: Path) -> None:
    file = tmp_path / "work.jsonl"
    file.write_text(
        '{"prompt": "abc", "output_tokens": 5}\n\n{"prompt_tokens": 7, "output_tokens": 6}\n'
        '{"prompt_tokens": [1, 2], "output_tokens": 7}\n'
    )
    found = make(str(file), 1, ANY, ANY, 0).encoded(lambda text: [ord(letter) for letter in text], 10_001)
    assert (found.prompts[0], len(found.prompts[1]), found.prompts[2]) == ([97, 98, 99], 7, [1, 2])
    assert found.outputs == [5, 6, 7]


@pytest.mark.parametrize("line", ["{}", "[]", "x", '{"prompt_tokens": 5}', '{"prompt_tokens": 5, "output_tokens": 0}'])
def test_an_invalid_request_is_named_by_its_line(line: str, tmp_path: Path) -> None:
    file = tmp_path / "work.jsonl"
    file.write_text(f'{{"prompt_tokens": 5, "output_tokens": 5}}\n{line}\n')
    with pytest.raises(ChairliftError, match="line 2, is not a valid request"):
        from_file(file, 0)


@pytest.mark.parametrize("text", ["", "x", "0", "9..8", "1..2..3", "5:6..9", ":3..4x", "-1..4"])
def test_invalid_lengths_are_refused(text: str) -> None:
    with pytest.raises(ChairliftError, match="not a length"):
        Lengths.parse(text)


def test_lengths_are_read_in_three_ways() -> None:
    assert Lengths.parse("128") == Lengths(128, 128, 128)
    assert Lengths.parse("4..16") == Lengths(4, 16, 8)
    assert Lengths.parse("10:4..16") == Lengths(4, 16, 10)
