"""Chairlift, through its public class LLM."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from chairlift import __version__
from chairlift.bench.peers import Finished, Task
from chairlift.core.params import SamplingParams
from chairlift.costs.machine import measure_rates
from chairlift.costs.steps import Stopwatch
from chairlift.engine.record_file import RecordFile
from chairlift.execution.build import choose_device
from chairlift.execution.recording import RecordingExecutor
from chairlift.offline.llm import LLM

STEPS = "steps.json"  # in the scratch folder: step times, with profile_steps
_IMPORTED = time.monotonic()


class Ours:
    """LLM.generate with token ids in and out."""

    def __init__(self, task: Task) -> None:
        self._temperature = task.temperature
        self._llm = LLM(task.model, progress=False, **task.settings)
        self._llm.tokenizer = None  # the other engines do not detokenize either
        self._start = {"imported": _IMPORTED, "loaded": time.monotonic()}
        self._watch = Stopwatch(self._llm.engine) if task.profile_steps else None
        self._steps = Path(task.scratch) / STEPS
        if task.record_steps:
            settings = {**task.settings, "kv_tokens": self._llm.capacity.kv_tokens}
            file = Path(task.record_steps).open("w", buffering=1)  # noqa: SIM115  # by lines: a signal ends us
            engine = self._llm.engine
            engine._executor = RecordingExecutor(engine._executor, file, task.model, settings)

        self._view = RecordFile(Path(task.record_view), f"bench offline: {task.model}") if task.record_view else None
        self._model = task.model

    def describe(self) -> dict[str, Any]:
        """Return the version, the settings that the others must match, start-up times, and the machine's rates."""
        limits = self._llm.engine.scheduler.limits
        device, dtype = choose_device(self._llm.settings.model.device), self._llm.config.dtype
        rates = measure_rates(device, dtype)
        if device.type == "cuda":
            ranks = self._llm.capacity.ranks  # each has a GPU like this one
            rates = replace(rates, read_bytes_s=ranks * rates.read_bytes_s, flops_s=ranks * rates.flops_s)
            torch.cuda.empty_cache()
        return {
            "version": __version__,
            "device": str(device),
            "dtype": str(dtype).removeprefix("torch."),
            "max_sequences": limits.max_sequences,
            "step_tokens": limits.step_tokens,
            "kv_tokens": self._llm.capacity.tokens,
            "weight_bytes": self._llm.weight_bytes * self._llm.capacity.ranks,
            "start": self._start,
            "rates": asdict(rates),
        }

    def run(self, prompts: list[list[int]], outputs: list[int]) -> list[Finished]:
        """Run all prompts in one continuous batch, with an empty prefix cache."""
        self._llm.reset_prefix_cache()
        params = [SamplingParams(temperature=self._temperature, max_tokens=count, ignore_eos=True) for count in outputs]
        end = self._view.record(self._llm.engine, self._model) if self._view is not None else None
        finished = []
        for output in self._llm.generate(prompts, params, progress=False):
            metrics = output.metrics
            assert metrics.first_token is not None and metrics.finished is not None
            finished.append(Finished(output.outputs[0].token_ids, metrics.first_token, metrics.finished))
        if self._view is not None and end is not None:
            end()
            self._view.close()
            self._view = None
        self._start.setdefault("first_token", min(each.first for each in finished))
        if self._watch is not None:
            self._steps.write_text(json.dumps(self._watch.summary()))
        return finished
