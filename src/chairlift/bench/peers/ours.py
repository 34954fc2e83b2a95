"""Chairlift, through the same class that users call."""

from __future__ import annotations

from typing import Any

from chairlift import __version__
from chairlift.bench.peers import Finished, Task
from chairlift.core.params import SamplingParams
from chairlift.execution.build import choose_device
from chairlift.llm import LLM


class Ours:
    """LLM.generate with token ids in and out."""

    def __init__(self, task: Task) -> None:
        self._llm = LLM(task.model, progress=False, **task.settings)
        self._llm.tokenizer = None  # the others write no text either

    def describe(self) -> dict[str, Any]:
        """The version, and what the others must match."""
        limits = self._llm.engine.scheduler.limits
        return {
            "version": __version__,
            "device": str(choose_device(self._llm.settings.model.device)),
            "dtype": str(self._llm.config.dtype).removeprefix("torch."),
            "max_sequences": limits.max_sequences,
            "step_tokens": limits.step_tokens,
            "kv_tokens": self._llm.capacity.tokens,
        }

    def run(self, prompts: list[list[int]], outputs: list[int]) -> list[Finished]:
        """All prompts in one continuous batch."""
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in outputs]
        finished = []
        for output in self._llm.generate(prompts, params, progress=False):
            metrics = output.metrics
            assert metrics.first_token is not None and metrics.finished is not None
            finished.append(Finished(output.outputs[0].token_ids, metrics.first_token, metrics.finished))
        return finished
