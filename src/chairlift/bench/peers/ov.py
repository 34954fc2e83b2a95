"""OpenVINO GenAI: its continuous batching, and its older pipeline on padded static batches.

Both run an IR that optimum-intel exports once from the Hugging Face folder. Precision is set to ours, so that equal
arithmetic is compared: OpenVINO's default is lower on most processors.
"""

from __future__ import annotations

import importlib
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from chairlift.bench.peers import Finished, Task, Unavailable
from chairlift.bench.peers.batches import pad

# Imported by name, since most machines do not have them and the type checker would complain.
openvino: Any = importlib.import_module("openvino")
openvino_genai: Any = importlib.import_module("openvino_genai")

PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
BLOCK = 32  # tokens in a KV block of its CPU plugin


class Continuous:
    """ContinuousBatchingPipeline, stepped one by one, so that each token's time is known."""

    def __init__(self, task: Task) -> None:
        config = openvino_genai.SchedulerConfig()
        config.max_num_batched_tokens = task.step_tokens
        config.max_num_seqs = task.max_sequences
        config.enable_prefix_caching = False  # else a second run would hit the cache
        held = min(task.total, task.max_sequences * task.longest)
        config.num_kv_blocks = held // BLOCK + task.max_sequences + 1
        precision = PRECISIONS[task.dtype]
        with reasons("paged attention"):
            self._pipeline = openvino_genai.ContinuousBatchingPipeline(
                export(task), config, "CPU", {**properties(task), "KV_CACHE_PRECISION": precision}
            )
        self._requests = 0

    def describe(self) -> dict[str, Any]:
        """Return the version."""
        return {"version": openvino_genai.get_version()}

    def run(self, prompts: list[list[int]], outputs: list[int]) -> list[Finished]:
        """Submit all prompts at once."""
        handles = []
        for prompt, count in zip(prompts, outputs, strict=True):
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._requests, ids, greedy(count)))
            self._requests += 1
        tokens: list[list[int]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.monotonic()
            for handle, ids, seen in zip(handles, tokens, times, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        ids += output.generated_ids
                        seen.append(now)
        return [Finished(ids, seen[0], seen[-1]) for ids, seen in zip(tokens, times, strict=True)]


class Stateful:
    """LLMPipeline with its SDPA backend on padded batches, for processors without its paged attention."""

    def __init__(self, task: Task) -> None:
        self._size = task.max_sequences
        with reasons("LLMPipeline"):
            self._pipeline = openvino_genai.LLMPipeline(
                export(task), "CPU", ATTENTION_BACKEND="SDPA", **properties(task)
            )

    def describe(self) -> dict[str, Any]:
        """Return the version and the batch size."""
        return {"version": openvino_genai.get_version(), "batch": self._size}

    def run(self, prompts: list[list[int]], outputs: list[int]) -> list[Finished]:
        """Run batch after batch; a request counts as finished at its own last token."""
        finished = []
        for start in range(0, len(prompts), self._size):
            batch, counts = prompts[start : start + self._size], outputs[start : start + self._size]
            ids, mask = (openvino.Tensor(np.array(rows, dtype=np.int64)) for rows in pad(batch))
            result = self._pipeline.generate(openvino_genai.TokenizedInputs(ids, mask), greedy(max(counts)))
            # Milliseconds on the clock of time.monotonic.
            times = [each / 1000 for each in result.perf_metrics.raw_metrics.m_new_token_times]
            finished += [
                Finished(row[:count], times[0], times[count - 1])
                for row, count in zip(result.tokens, counts, strict=True)
            ]
        return finished


def greedy(count: int) -> Any:
    """Return a config for exactly `count` greedy tokens."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = count
    config.ignore_eos = True
    return config


def properties(task: Task) -> dict[str, Any]:
    """Return precision and threads, equal to the other engines'."""
    return {"INFERENCE_PRECISION_HINT": PRECISIONS[task.dtype], "INFERENCE_NUM_THREADS": task.threads}


def export(task: Task) -> str:
    """Export the model as OpenVINO's IR, or reuse the export of an earlier peer of this benchmark."""
    if task.device != "cpu":
        raise Unavailable(f"it runs on the CPU, not on {task.device}")
    folder = Path(task.scratch) / "openvino"
    if not (folder / "openvino_model.xml").exists():
        optimum: Any = importlib.import_module("optimum.intel")
        model = optimum.OVModelForCausalLM.from_pretrained(task.model, export=True, compile=False, load_in_8bit=False)
        model.save_pretrained(folder)
    return str(folder)


@contextmanager
def reasons(what: str) -> Iterator[None]:
    """Convert OpenVINO's errors on this processor to Unavailable, so that the benchmark goes on."""
    try:
        yield
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise Unavailable(f"{what} cannot be created on {platform.machine()}: {lines[-1]}") from error
