"""Offline throughput: a workload submitted at once, to Chairlift and to other engines with the same weights."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from chairlift import __version__
from chairlift.bench.engines import Contender, Engine, UnavailableError, engine, task_for
from chairlift.bench.peers import FALLBACKS, PEERS, Task
from chairlift.core.errors import ChairliftError
from chairlift.core.settings import Settings
from chairlift.core.words import counted
from chairlift.costs.floor import floor_of
from chairlift.report.numbers import Metrics, common_length, machine, medians, scaled, spread
from chairlift.report.tables import table
from chairlift.traffic.workloads import Workload

if TYPE_CHECKING:
    from chairlift.evaluation.twin import Subject

OURS = "chairlift"
MEMORY_SHARE = 0.45  # of a GPU, if another engine is loaded too

# Key, label, format. Higher is better for speeds, lower for times and memory.
ROWS: tuple[tuple[str, str, str], ...] = (
    ("output_tok_s", "output tok/s", "{:,.1f}"),
    ("prompt_tok_s", "prompt tok/s", "{:,.1f}"),
    ("total_tok_s", "prompt and output tok/s", "{:,.1f}"),
    ("token_ms", "ms a token", "{:,.3f}"),
    ("floor_share", "of the physical floor", "{:.1%}"),
    ("requests_s", "requests/s", "{:,.2f}"),
    *(
        (f"{name}_{kind}", f"{name.upper()} {kind}, ms", "{:,.1f}")
        for name in ("ttft", "tpot")
        for kind in ("mean", "p50", "p99")
    ),
    ("peak_mib", "peak memory, MiB", "{:,.0f}"),
    ("agreement", "same tokens as ours", "{:.1%}"),
)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The model, workload and other engines of a benchmark."""

    model: str
    settings: dict[str, Any]
    workload: Workload
    compare: list[str] = field(default_factory=list)
    python: str = sys.executable  # the interpreter of the other engines
    repeat: int = 1
    threads: int | None = None
    temperature: float = 0.0
    profile_steps: bool = False  # measure the host's time per step
    record_steps: str = ""  # a file for every step of ours
    record_view: str = ""  # a file of the first run of ours, for the live page


def run_offline(
    benchmark: Benchmark, notice: Callable[[str], None] = lambda _text: None
) -> tuple[Workload, list[Contender]]:
    """Run the workload `repeat` times on every engine, interleaved, so that other load affects all engines alike."""
    from chairlift.evaluation.twin import Subject
    from chairlift.ops.kv_quant import KV_DTYPES

    for name in benchmark.compare:
        if name not in PEERS or name == OURS:
            known = ", ".join(name for name in PEERS if name != OURS)
            raise ChairliftError(f"there is no engine {name!r} to compare with: use {known}")
    if benchmark.compare and benchmark.temperature:
        raise ChairliftError("the other engines always take the likeliest token: leave out --temperature or --compare")
    subject = Subject(benchmark.model, Settings.of(**benchmark.settings))
    workload = benchmark.workload.encoded(subject.encode, subject.config.vocab_size)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chairlift-bench-")))
        task = first_task(benchmark, subject, workload, scratch)
        notice(f"loading {OURS}")
        began = time.monotonic()
        ours = stack.enter_context(engine(OURS, sys.executable, task))
        engines, contenders = [ours], [ours.contender]
        info = ours.contender.info
        info["start"] = {name: moment - began for name, moment in info["start"].items()}
        rates = info["rates"]
        kv_dtype = KV_DTYPES.get(benchmark.settings.get("kv_dtype") or "auto")
        speed = rates["read_bytes_s"], rates["flops_s"]
        floor = floor_of(workload, subject.config, *speed, kv_dtype, info["weight_bytes"])
        info["floor_s"] = floor.seconds
        if benchmark.compare:
            matched = {key: info[key] for key in ("device", "dtype", "max_sequences", "step_tokens")}
            task = replace(task, model=str(subject.folder(scratch)), settings={}, **matched)
            others, absent = load_others(benchmark, task, stack, notice)
            engines += others
            contenders += [each.contender for each in others] + absent
        for number in range(benchmark.repeat):
            for each in list(engines):
                notice(f"run {number + 1} of {benchmark.repeat}: {each.contender.name}")
                try:
                    each.run(workload)
                except UnavailableError as reason:
                    if each is ours:
                        raise
                    each.contender.unavailable = str(reason)
                    each.contender.runs.clear()
                    engines.remove(each)
        if benchmark.profile_steps:
            info["steps"] = json.loads((scratch / "steps.json").read_text())
    return workload, contenders


def first_task(benchmark: Benchmark, subject: Subject, workload: Workload, scratch: Path) -> Task:
    """Return the task of our own engine; once loaded, it determines the settings of the others."""
    model, settings = benchmark.model, dict(benchmark.settings)
    if benchmark.compare:
        if subject.is_random:  # all engines must load the same random weights
            model, settings["load_format"] = str(subject.folder(scratch)), "auto"
        if subject.device.type == "cuda" and settings.get("memory_share") is None:
            settings["memory_share"] = MEMORY_SHARE
    return task_for(
        workload,
        scratch,
        benchmark.threads,
        model=model,
        device=str(subject.device),
        settings=settings,
        temperature=benchmark.temperature,
        profile_steps=benchmark.profile_steps,
        record_steps=benchmark.record_steps,
        record_view=benchmark.record_view,
    )


def load_others(
    benchmark: Benchmark, task: Task, stack: ExitStack, notice: Callable[[str], None]
) -> tuple[list[Engine], list[Contender]]:
    """Load the other engines; an unavailable one is reported and, if possible, replaced by its fallback."""
    loaded: list[Engine] = []
    absent: list[Contender] = []
    names = list(dict.fromkeys(benchmark.compare))
    for name in names:
        notice(f"loading {name}")
        try:
            loaded.append(stack.enter_context(engine(name, benchmark.python, task)))
        except UnavailableError as reason:
            absent.append(Contender(name, unavailable=str(reason)))
            notice(f"{name} is not available")
            if name in FALLBACKS and FALLBACKS[name] not in names:
                names.append(FALLBACKS[name])  # this loop loads it later
    return loaded, absent


# ---- results


def measure(run: dict[str, Any], workload: Workload, floor_s: float | None = None) -> Metrics:
    """Return the numbers of one run."""
    seconds, requests = run["seconds"], run["requests"]
    firsts = [1000 * each["first"] for each in requests]
    gaps = [
        1000 * (each["last"] - each["first"]) / (len(each["tokens"]) - 1)
        for each in requests
        if len(each["tokens"]) > 1
    ]
    found = {
        "seconds": seconds,
        "output_tok_s": workload.output_tokens / seconds,
        "prompt_tok_s": workload.prompt_tokens / seconds,
        "total_tok_s": (workload.prompt_tokens + workload.output_tokens) / seconds,
        "requests_s": len(requests) / seconds,
    }
    if len(requests) == 1:
        found["token_ms"] = 1000 * seconds / workload.output_tokens
    if floor_s is not None:
        found["floor_share"] = floor_s / seconds
    found |= spread(firsts, 50, 99, prefix="ttft_") | spread(gaps, 50, 99, prefix="tpot_")
    if run["peak_bytes"] is not None:
        found["peak_mib"] = run["peak_bytes"] / (1 << 20)
    return found


def summarize(workload: Workload, contenders: Sequence[Contender]) -> dict[str, Any]:
    """Return all numbers: each engine's runs, their medians, and the ratios ours / theirs."""
    ours = contenders[0]
    floor_s = ours.info.get("floor_s")
    best = medians([measure(run, workload, floor_s) for run in ours.runs])
    engines = []
    for contender in contenders:
        runs = [measure(run, workload, floor_s) for run in contender.runs]
        found = medians(runs)
        shown = {"name": contender.name, "info": contender.info, "unavailable": contender.unavailable, "runs": runs}
        if runs and contender is not ours:
            found["agreement"] = agreement(ours.runs[0], contender.runs[0])
            shown["ratio"] = {key: best[key] / value for key, value in found.items() if key in best and value}
        engines.append({**shown, "median": found})
    return {
        "chairlift": __version__,
        "machine": machine(),
        "workload": {
            "name": workload.name,
            "requests": len(workload.queries),
            "prompt_tokens": workload.prompt_tokens,
            "output_tokens": workload.output_tokens,
        },
        "engines": engines,
    }


def agreement(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return the share of tokens before greedy answers differ: late with other rounding, at once with other weights."""
    pairs = [(a["tokens"], b["tokens"]) for a, b in zip(ours["requests"], theirs["requests"], strict=True)]
    return sum(common_length(*pair) for pair in pairs) / sum(len(tokens) for tokens, _ in pairs)


def offline_table(summary: dict[str, Any]) -> Table:
    """Return the table of medians, with the ratio ours / theirs for each engine."""
    ours, *others = [each for each in summary["engines"] if each["runs"]]
    work = summary["workload"]
    notes = [
        f"{ours['info']['device']}, {ours['info']['dtype']}; median of {counted(len(ours['runs']), 'run')}; "
        "a ratio is ours / theirs",
        *(f"{each['name']} is not available: {each['unavailable']}" for each in summary["engines"] if not each["runs"]),
    ]
    rows: list[list[str | Text]] = []
    for key, label, form in ROWS:
        if any(key in each["median"] for each in (ours, *others)):
            cells: list[str | Text] = [label, form.format(ours["median"][key]) if key in ours["median"] else ""]
            for each in others:
                cells.append(form.format(each["median"][key]) if key in each["median"] else "")
                cells.append(Text(f"{each['ratio'][key]:.2f}x" if key in each["ratio"] else "", "bold"))
            rows.append(cells)
    return table(
        f"{work['name']}: {counted(work['requests'], 'request')}, {work['prompt_tokens']:,} prompt and "
        f"{counted(work['output_tokens'], 'output token')}",
        ("", ours["name"], *(column for each in others for column in (each["name"], "ratio"))),
        rows,
        "\n".join(notes),
        is_centered=True,
    )


def orientation(summary: dict[str, Any]) -> Iterator[str]:
    """Yield lines on the physical floor and on the start-up time."""
    info, workload = summary["engines"][0]["info"], summary["workload"]
    if "floor_s" in info:
        seconds, rates = info["floor_s"], info["rates"]
        yield (
            f"the floor: {seconds:.3g} s, that is {workload['output_tokens'] / seconds:,.0f} output or "
            f"{workload['prompt_tokens'] / seconds:,.0f} prompt tok/s, at {scaled(rates['read_bytes_s'], 'B/s')} read "
            f"and {scaled(rates['flops_s'], 'FLOP/s')}, both measured in this run"
        )
    if "start" in info:
        imported, loaded, first = (info["start"][name] for name in ("imported", "loaded", "first_token"))
        yield (
            f"first token {first:.1f} s after the start: imports {imported:.1f}, loading and compiling "
            f"{loaded - imported:.1f}, the first answer {first - loaded:.1f}"
        )
