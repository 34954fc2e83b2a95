"""The stopwatch around the engine's loop times every part of every step, and restores the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift import LLM, SamplingParams
from chairlift.costs.steps import PARTS, Stopwatch


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_parts_of_steps_with_a_full_batch_add_up(tiny_model: Path, overlap: bool) -> None:
    llm = LLM(str(tiny_model), progress=False, device="cpu", max_length=128, overlap=overlap)
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (4, 12, 12)]
    expected = [output.outputs[0].token_ids for output in llm.generate(["a", "b", "c"], params)]
    watch = Stopwatch(llm.engine)
    for _ in range(2):
        assert [output.outputs[0].token_ids for output in llm.generate(["a", "b", "c"], params)] == expected
    found = watch.summary()
    assert found["sequences"] == 3
    assert found["steps"] == 2 * 4, "the prompts and three decodes, before the first of them ends"
    assert set(found["parts"]) == {*PARTS, "host", "step"}
    for values in found["parts"].values():
        assert 0 <= values["median"] <= values["p95"]
    assert all(found["parts"][part]["median"] > 0 for part in ("plan", "launch", "apply", "rest"))
    watch.stop()
    assert not {"plan", "apply", "launch", "collect"} & {*vars(llm.engine.scheduler), *vars(llm.engine._executor)}
    llm.generate(["a"], params[0])
    assert watch.summary() == found, "no step is timed after stop"


def test_without_steps_the_summary_is_empty(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), progress=False, device="cpu", max_length=128)
    assert Stopwatch(llm.engine).summary() == {"sequences": 0, "steps": 0, "parts": {}}
