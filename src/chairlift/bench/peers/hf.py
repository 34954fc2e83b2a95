"""Hugging Face transformers: its continuous batching, and padded static batches."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers

from chairlift.bench.peers import Finished, Task, Unavailable
from chairlift.bench.peers.batches import pad

PAGE = 256  # tokens: its default


class Continuous:
    """The manager of `model.generate_batch`, kept between runs, with a length per request."""

    def __init__(self, task: Task) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self._model = load_model(task)
        if not hasattr(self._model, "init_continuous_batching"):
            raise Unavailable(f"transformers {transformers.__version__} has no continuous batching")
        config = ContinuousBatchingConfig(
            allow_block_sharing=False,  # else a second run would hit the cache
            **sizes(task),
        )
        generation = GenerationConfig(do_sample=False, max_new_tokens=task.longest, eos_token_id=-1)
        self._manager = self._model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=config
        )
        self._manager.warmup()
        self._manager.start()
        self._runs = 0

    def describe(self) -> dict[str, Any]:
        """Return the version and the attention implementation."""
        return {"version": transformers.__version__, "attention": self._model.config._attn_implementation}

    def run(self, prompts: list[list[int]], outputs: list[int]) -> list[Finished]:
        """Submit all prompts at once; its timestamps are of perf_counter."""
        self._runs += 1
        shift = time.monotonic() - time.perf_counter()
        for index, (prompt, count) in enumerate(zip(prompts, outputs, strict=True)):
            self._manager.add_request(
                prompt, f"{self._runs}.{index}", max_new_tokens=count, record_timestamps=True, eos_token_id=-1
            )
        done: dict[str, Any] = {}
        while len(done) < len(prompts):
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("the generation thread of transformers has ended")
            elif result.is_finished():
                if result.error:
                    raise RuntimeError(f"transformers failed a request: {result.error}")
                done[result.request_id] = result
        results = [done[f"{self._runs}.{index}"] for index in range(len(prompts))]
        return [
            Finished(result.generated_tokens, result.timestamps[0] + shift, result.timestamps[-1] + shift)
            for result in results
        ]


class Static:
    """`model.generate` on padded batches in order; a batch lasts as long as its longest answer."""

    def __init__(self, task: Task) -> None:
        self._model = load_model(task)
        self._size = task.max_sequences

    def describe(self) -> dict[str, Any]:
        """Return the version and the batch size."""
        return {"version": transformers.__version__, "batch": self._size}

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], outputs: list[int]) -> list[Finished]:
        """Run batch after batch; a request counts as finished at its own last token."""
        finished = []
        for start in range(0, len(prompts), self._size):
            batch, counts = prompts[start : start + self._size], outputs[start : start + self._size]
            ids, mask = pad(batch)
            times: list[float] = []
            result = self._model.generate(
                torch.tensor(ids, device=self._model.device),
                attention_mask=torch.tensor(mask, device=self._model.device),
                do_sample=False,
                max_new_tokens=max(counts),
                min_new_tokens=max(counts),
                pad_token_id=0,
                eos_token_id=None,
                stopping_criteria=[lambda *_args, times=times, **_kwargs: note(times)],
            )
            tokens = result[:, len(ids[0]) :].tolist()
            finished += [
                Finished(row[:count], times[0], times[count - 1]) for row, count in zip(tokens, counts, strict=True)
            ]
        return finished


def load_model(task: Task) -> Any:
    """Load the model on its device, with SDPA or the variant of it that continuous batching chooses."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(task.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        task.model, dtype=getattr(torch, task.dtype), attn_implementation="sdpa"
    )
    return model.to(task.device).eval()


def sizes(task: Task) -> dict[str, int]:
    """Return cache and step sizes: its defaults on a GPU; on a CPU they would take most memory and steps of 8192."""
    if task.device.startswith("cuda"):
        return {}
    held = min(task.total, task.max_sequences * task.longest)
    return {
        "num_blocks": held // PAGE + task.max_sequences + 1,
        "max_batch_tokens": task.step_tokens,
        "max_requests_per_batch": task.max_sequences,
    }


def note(times: list[float]) -> bool:
    """Record the time of a step; never stop."""
    times.append(time.monotonic())
    return False
