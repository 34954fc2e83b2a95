"""Decode speed at several batch sizes, and its share of the limit that memory bandwidth sets.

For each size one engine runs that many requests of equal length. Prompts are prefilled first, in steps of their own;
from then on every step decodes the whole batch, and only these steps are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from rich.table import Table

from chairlift import __version__
from chairlift.cluster.tensor_parallel.build import assemble, load_model
from chairlift.core.errors import ChairliftError
from chairlift.core.params import SamplingParams
from chairlift.core.plan import StepPlan
from chairlift.core.request import Request
from chairlift.core.settings import Settings
from chairlift.core.words import counted
from chairlift.costs.machine import measure_rates
from chairlift.engine.engine import Engine
from chairlift.evaluation.twin import Subject
from chairlift.execution.build import Built, choose_limits
from chairlift.models.families import outline
from chairlift.report.numbers import scaled
from chairlift.report.tables import Columns, number_table

Summary = dict[str, Any]
COLUMNS: Columns = (
    ("size", "batch size", "{:,}"),
    ("steps", "steps", "{:,}"),
    ("step_ms", "ms a step", "{:,.2f}"),
    ("output_tok_s", "output tok/s", "{:,.1f}"),
    ("floor_tok_s", "the floor's tok/s", "{:,.1f}"),
    ("floor_share", "of the floor", "{:.1%}"),
)
SHORT = 64  # least context: an engine runs a step of some tokens at start-up
WARM = 4  # full steps of each size that are not timed, for compilation and caches
LEAST = WARM + 2  # tokens of an answer with one timed step; the prefill samples the first


def read_sizes(text: str) -> list[int]:
    """Parse batch sizes such as 1,2,4: sorted, without duplicates.

    >>> read_sizes("8,1,2,8")
    [1, 2, 8]
    """
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ChairliftError(f"{text!r} are not batch sizes: give whole numbers with commas, such as 1,8,64") from None
    if found[0] < 1:
        raise ChairliftError(f"{found[0]} is not a batch size: use 1 or more")
    return found


@dataclass(slots=True)
class DecodeTotals:
    """Totals over the full decode steps of one batch size."""

    size: int
    steps: int = 0
    seconds: float = 0.0
    contexts: int = 0  # tokens with keys and values read, over all steps


class DecodeTimer:
    """Adds up the steps that decode the whole batch; a step lasts from the end of the previous step to its own end."""

    def __init__(self, size: int) -> None:
        self.timed = DecodeTotals(size)
        self._full = 0
        self._end = 0.0

    def __call__(self, plan: StepPlan, began: float, seconds: float) -> None:
        before, self._end = self._end, began + seconds
        pieces = plan.slices
        if len(pieces) != self.timed.size or any(each.start < each.sequence.prompt_length for each in pieces):
            return
        self._full += 1
        if self._full > WARM:
            self.timed.steps += 1
            self.timed.seconds += self._end - before
            self.timed.contexts += sum(each.start + each.count for each in pieces)


def measure(
    shape: str,
    sizes: Sequence[int],
    prompt: int,
    output: int,
    settings: dict[str, Any],
    notice: Callable[[str], None] = lambda _text: None,
    advance: Callable[[int], None] = lambda _tokens: None,
) -> Summary:
    """Measure every size on one engine, the largest first, so that a size that does not fit fails at once."""
    if output < LEAST:
        raise ChairliftError(
            f"answers of {counted(output, 'token')} are too short to time decoding: use {LEAST} or more"
        )
    wanted = {**settings, "load_format": "dummy"}
    room = Subject(shape, Settings.of(**wanted)).config.max_length
    if prompt + output > room:
        raise ChairliftError(
            f"prompts of {prompt:,} and answers of {counted(output, 'token')} make {prompt + output:,}, and the "
            f"context holds {room:,}: lower --prompt or --output"
        )
    notice("loading")
    loaded = load_model(shape, Settings.of(**wanted), progress=False)
    device, most = loaded.device, max(sizes)
    rates = measure_rates(device, loaded.config.dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    step_tokens = max(most, choose_limits(loaded.config, Settings.of(**wanted), device).step_tokens)
    length = min(room, max(prompt + output, SHORT))
    wanted |= {"max_sequences": most, "step_tokens": step_tokens, "max_length": length}
    built = assemble(loaded, Settings.of(**wanted, prefix_cache=False, prefill="prefill-first"), progress=False)
    found = []
    for size in sorted(sizes, reverse=True):
        notice(f"{counted(size, 'sequence')}")
        timed = run(built.engine, size, prompt, output, loaded.config.vocab_size, advance)
        if timed.steps < output - 1 - WARM:
            raise ChairliftError(
                f"{counted(size, 'sequence')} of {counted(prompt + output, 'token')} do not fit in one batch: the "
                f"KV cache holds {counted(built.capacity.tokens, 'token')}; lower --sizes, --prompt or --output"
            )
        found.append(timed)
    return summarize(found[::-1], built, rates.read_bytes_s) | {
        "chairlift": __version__,
        "shape": shape,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "prompt": prompt,
        "output": output,
    }


def run(
    engine: Engine, size: int, prompt: int, output: int, vocab_size: int, advance: Callable[[int], None]
) -> DecodeTotals:
    """Run `size` requests of equal length to their end."""
    draw = Random(size)
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    timer = DecodeTimer(size)
    engine.on_step = timer
    engine.end_input()
    for number in range(size):
        ids = [draw.randrange(vocab_size) for _ in range(prompt)]
        engine.submit(Request(str(number), ids, params, arrival=engine.clock.now()))
    while engine.has_work:
        outcome = engine.step()
        for event in outcome.events:
            if event.error is not None:
                raise ChairliftError(f"a request in a batch of {size} failed: {event.error}")
        advance(len(outcome))
    engine.on_step = None
    return timer.timed


# ---- results


def summarize(found: Sequence[DecodeTotals], built: Built, read_bytes_s: float) -> Summary:
    """Return all numbers. A step's floor is the time to read all weights once, and the KV of every context."""
    config = built.config
    weights = outline(config)[0].read_bytes
    rows = []
    for each in found:
        floor = (each.steps * weights + each.contexts * built.capacity.bytes_per_token) / read_bytes_s
        tokens = each.size * each.steps
        rows.append(
            {
                "size": each.size,
                "steps": each.steps,
                "step_ms": 1000 * each.seconds / each.steps,
                "output_tok_s": tokens / each.seconds,
                "floor_tok_s": tokens / floor,
                "floor_share": floor / each.seconds,
            }
        )
    return {
        "dtype": str(config.dtype).removeprefix("torch."),
        "weight_bytes": weights,
        "kv_bytes_per_token": built.capacity.bytes_per_token,
        "read_bytes_s": read_bytes_s,
        "sizes": rows,
    }


def title(summary: Summary) -> str:
    """Return the setup in one line."""
    return (
        f"{summary['shape']}, {summary['dtype']} on {summary['device']}: prompts of "
        f"{counted(summary['prompt'], 'token')}, answers of {summary['output']:,}"
    )


def sizes_table(summary: Summary) -> Table:
    """Return the table, with a row for each size."""
    weights, per_token = (scaled(summary[name], "B") for name in ("weight_bytes", "kv_bytes_per_token"))
    return number_table(
        title(summary),
        COLUMNS,
        [((), row) for row in summary["sizes"]],
        f"steps that decode the whole batch; the floor: {weights} of weights per step\n"
        f"and {per_token} per token of context, read at {scaled(summary['read_bytes_s'], 'B/s')} as measured",
    )
