"""An LLM on rank processes that already run: starting them takes seconds, loading a tiny model does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from chairlift import LLM, SamplingParams
from chairlift.cluster.tensor_parallel.build import assemble, load_model
from chairlift.cluster.tensor_parallel.ranks import Ranks
from chairlift.core.settings import Settings
from chairlift.execution.build import Built

TIE = 1e-4  # of logits: sums over ranks are rounded differently


@contextmanager
def llm_on(ranks: Ranks, model: Path | str, **settings: Any) -> Iterator[LLM]:
    """Load a model on running ranks; closing the LLM leaves them running."""

    def build(model: str, settings: Settings, *, progress: bool) -> Built:
        loaded = load_model(model, settings, progress=progress, ranks=ranks)
        return replace(assemble(loaded, settings, progress=progress), close=lambda: None)

    with patch("chairlift.offline.llm.build", build):
        llm = LLM(str(model), progress=False, tensor_parallel=ranks.group.size, **settings)
    with llm:
        yield llm
    llm.engine.scheduler.check()


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[list[int]]]:
    """The tokens of every answer to every prompt."""
    return [[list(answer.token_ids) for answer in result.outputs] for result in llm.generate(prompts, params)]
