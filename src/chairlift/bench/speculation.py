"""Speculation beside none: output speed at several batch sizes, or of one stream over real prompts.

All ways run on one engine, one after the other and again, so that other load affects all of them: without drafts, with
a fixed number for every sequence, and with the number that the engine chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from statistics import median
from typing import Any

import torch
from rich.table import Table

from chairlift import __version__
from chairlift.bench.edits import EDITS, FREE
from chairlift.core.errors import ChairliftError
from chairlift.core.params import SamplingParams
from chairlift.core.request import Request
from chairlift.core.settings import Settings
from chairlift.core.speculation import Drafted, Speculation
from chairlift.core.words import counted
from chairlift.engine.engine import Engine
from chairlift.execution.build import assemble, load_model
from chairlift.offline.llm import LLM
from chairlift.report.tables import table

Summary = dict[str, Any]
OFF, CHOSEN = "off", "chosen"
PROMPTS = {"edits": EDITS, "free": FREE}
_WARM = 4  # steps behind the last prompt that are not timed


def ways_of(fixed: Sequence[int]) -> list[str]:
    """Return the ways to run, by name."""
    return [OFF, *(f"k = {count}" for count in fixed), CHOSEN]


def set_way(engine: Engine, speculation: Speculation, way: str) -> None:
    """Let an engine draft nothing, a fixed number, or what it chooses."""
    speculation.counts = Drafted()
    speculation.fixed = int(way.removeprefix("k = ")) if way.startswith("k") else None
    engine.scheduler.planner.speculation = None if way == OFF else speculation


def run(engine: Engine, prompts: Iterable[list[int]], output: int) -> tuple[int, float]:
    """Answer prompts side by side; return tokens and seconds from when all have been read until the first answer ends.

    So each step that is timed has the whole batch.
    """
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    size = 0
    for prompt in prompts:
        engine.submit(Request(f"s{size}", prompt, params, arrival=engine.clock.now()))
        size += 1
    begun: set[str] = set()
    steps = tokens = 0
    start: float | None = None
    is_whole = True
    while is_whole:
        outcome = engine.step()
        count = 0
        for event in outcome:
            if event.error is not None:
                raise ChairliftError(f"a request in a batch of {size} failed: {event.error}")
            begun.add(event.sequence.request.id)
            count += event.token is not None
            is_whole = is_whole and event.finish_reason is None
        if start is not None:
            tokens += count
        elif len(begun) == size:
            steps += 1
            start = engine.clock.now() if steps > _WARM else None
    if start is None:
        raise ChairliftError(f"answers of {counted(output, 'token')} are too short to time: raise --output")
    seconds = engine.clock.now() - start
    for number in range(size):
        engine.abort(f"s{number}")
    while engine.has_work:
        engine.step()
    return tokens, seconds


def measure_sizes(
    model: str,
    sizes: Sequence[int],
    prompt: int,
    output: int,
    fixed: Sequence[int],
    settings: dict[str, Any],
    repeat: int,
    notice: Callable[[str], None] = lambda _text: None,
) -> Summary:
    """Measure every way at every batch size, with prompts of random tokens."""
    wanted = {**settings, "max_sequences": max(sizes), "max_length": prompt + output, "prefix_cache": False}
    chosen = Settings.of(**wanted)
    notice("loading")
    loaded = load_model(model, chosen, progress=False)
    built = assemble(loaded, chosen, progress=False)
    engine, speculation = built.engine, built.engine.scheduler.planner.speculation
    if speculation is None:
        raise ChairliftError("there are no drafts to measure: set --speculation to ngram or draft")
    rows = []
    for size in sizes:
        draw = Random(size)
        prompts = [[draw.randrange(loaded.config.vocab_size) for _ in range(prompt)] for _ in range(size)]
        found: dict[str, list[float]] = {way: [] for way in ways_of(fixed)}
        drafted: dict[str, Drafted] = {}
        for number in range(repeat + 1):
            for way in found:
                notice(f"{counted(size, 'sequence')}, {way}, run {number} of {repeat}")
                set_way(engine, speculation, way)
                tokens, seconds = run(engine, prompts, output)
                drafted[way] = speculation.counts
                if number:  # the first is for warming up
                    found[way].append(tokens / seconds)
        rows.append(row_of(f"{size}", found, drafted))
    device = torch.cuda.get_device_name(loaded.device) if loaded.device.type == "cuda" else "cpu"
    title = f"{model} on {device}, {built.config.dtype}, drafts of {settings.get('draft') or settings['speculation']}"
    return {"chairlift": __version__, "title": title, "first": "batch size", "rows": rows}


def measure_prompts(
    model: str,
    kind: str,
    output: int,
    fixed: Sequence[int],
    settings: dict[str, Any],
    repeat: int,
    notice: Callable[[str], None] = lambda _text: None,
) -> Summary:
    """Measure one stream over real prompts; the answers of all ways must be the same."""
    llm = LLM(model, progress=False, **settings)
    engine, speculation = llm.engine, llm.engine.scheduler.planner.speculation
    if speculation is None:
        raise ChairliftError("there are no drafts to measure: set --speculation to ngram or draft")
    params = SamplingParams(temperature=0, max_tokens=output)
    found: dict[str, list[float]] = {way: [] for way in ways_of(fixed)}
    drafted: dict[str, Drafted] = {}
    totals: dict[str, tuple[int, float]] = dict.fromkeys(found, (0, 0.0))
    same = True
    for number in range(repeat):
        totals = dict.fromkeys(found, (0, 0.0))
        counts = {way: Drafted() for way in found}
        for place, text in enumerate(PROMPTS[kind]):
            notice(f"run {number + 1} of {repeat}, prompt {place + 1}")
            answers = []
            for way in list(found) if place % 2 else list(found)[::-1]:
                set_way(engine, speculation, way)
                speculation.counts = counts[way]
                speculation.drafter = type(speculation.drafter)()  # it must not know the answers of other ways
                llm.reset_prefix_cache()
                [reply] = llm.chat([{"role": "user", "content": text}], params)
                metrics, ids = reply.metrics, reply.outputs[0].token_ids
                answers.append(ids)
                tokens, seconds = totals[way]
                totals[way] = tokens + len(ids), seconds + (metrics.finished or 0.0) - metrics.arrival
            same = same and all(ids == answers[0] for ids in answers)
        for way, (tokens, seconds) in totals.items():
            found[way].append(tokens / seconds)
            drafted[way] = counts[way]
    title = f"{model}, one stream, {len(PROMPTS[kind])} prompts ({kind}); answers {'equal' if same else 'DIFFERENT'}"
    row = row_of(kind, found, drafted)
    return {"chairlift": __version__, "title": title, "first": "prompts", "rows": [row], "same": same}


def row_of(name: str, found: dict[str, list[float]], drafted: dict[str, Drafted]) -> dict[str, Any]:
    """Return the numbers of one batch size or kind of prompts; ratios are medians over the runs, each beside off."""
    ratios = {way: median(a / b for a, b in zip(rates, found[OFF], strict=True)) for way, rates in found.items()}
    fixed = [ratio for way, ratio in ratios.items() if way != CHOSEN]
    counts = drafted[CHOSEN]
    checks = max(1, counts.checks)
    return {
        "name": name,
        "off_tok_s": median(found[OFF]),
        "ratios": ratios,
        "beside_best": ratios[CHOSEN] / max(fixed),
        "drafts_a_check": sum(counts.drafted) / checks,
        "accepted_length": 1 + sum(counts.accepted) / checks,
        "runs": found,
    }


def speculation_table(summary: Summary) -> Table:
    """Return the table of ratios to no speculation."""
    ways = [way for way in summary["rows"][0]["ratios"] if way != OFF]
    rows = [
        [
            row["name"],
            f"{row['off_tok_s']:,.1f}",
            *(f"{row['ratios'][way]:.2f}x" for way in ways),
            f"{row['beside_best']:.2f}",
            f"{row['drafts_a_check']:.1f}",
            f"{row['accepted_length']:.2f}",
        ]
        for row in summary["rows"]
    ]
    columns = (summary["first"], "off, tok/s", *ways, "chosen / best fixed", "drafts a check", "tokens a check")
    note = "output tokens a second, as ratios to no drafts; the best fixed may be off"
    return table(summary["title"], columns, rows, note, is_centered=True)
