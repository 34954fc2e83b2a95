"""Offline throughput: a workload given all at once, to Chairlift and to other engines on the same weights, in turn."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.bench.engines import Contender, Engine, UnavailableError, engine
from chairlift.bench.floor import floor_of
from chairlift.bench.peers import FALLBACKS, PEERS, Task
from chairlift.bench.workloads import Ids, Workload
from chairlift.core.errors import ChairliftError
from chairlift.core.settings import Settings

if TYPE_CHECKING:
    from chairlift.bench.twin import Subject

OURS = "chairlift"
MEMORY_SHARE = 0.45  # of a GPU, when another engine is loaded beside ours


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What is measured, and against whom."""

    model: str
    settings: dict[str, Any]
    workload: Callable[[Callable[[str], Ids]], Workload]  # given what turns text into tokens
    compare: list[str] = field(default_factory=list)
    python: str = sys.executable  # the interpreter of the other engines
    repeat: int = 1
    threads: int | None = None
    temperature: float = 0.0
    profile_steps: bool = False  # tell what each of our steps costs the host


def run_offline(
    benchmark: Benchmark, notice: Callable[[str], None] = lambda _text: None
) -> tuple[Workload, list[Contender]]:
    """Run the workload on every engine in turn, `repeat` times, so that a busy machine is unfair to all alike."""
    from chairlift.bench.twin import Subject

    for name in benchmark.compare:
        if name not in PEERS or name == OURS:
            known = ", ".join(name for name in PEERS if name != OURS)
            raise ChairliftError(f"there is no engine {name!r} to compare with: use {known}")
    if benchmark.compare and benchmark.temperature:
        raise ChairliftError("the other engines always take the likeliest token: leave out --temperature or --compare")
    subject = Subject(benchmark.model, Settings.of(**benchmark.settings))
    workload = benchmark.workload(subject.encode).within(subject.config.vocab_size)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chairlift-bench-")))
        (scratch / "workload.json").write_text(json.dumps(asdict(workload)))
        task = first_task(benchmark, subject, workload, scratch)
        notice(f"loading {OURS}")
        began = time.monotonic()
        ours = stack.enter_context(engine(OURS, sys.executable, task))
        engines, contenders = [ours], [ours.contender]
        info = ours.contender.info
        info["start"] = {name: moment - began for name, moment in info["start"].items()}
        rates = info["rates"]
        info["floor_s"] = floor_of(workload, subject.config, rates["read_bytes_s"], rates["flops_s"]).seconds
        if benchmark.compare:
            matched = {key: info[key] for key in ("device", "dtype", "max_sequences", "step_tokens")}
            task = replace(task, model=str(subject.folder(scratch)), settings={}, **matched)
            others, absent = load_others(benchmark, task, stack, notice)
            engines += others
            contenders += [each.contender for each in others] + absent
        for turn in range(benchmark.repeat):
            for each in list(engines):
                notice(f"run {turn + 1} of {benchmark.repeat}: {each.contender.name}")
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
    """The task for our own engine; what the others must match is known once it is loaded."""
    model, settings = benchmark.model, dict(benchmark.settings)
    if benchmark.compare:
        if subject.is_random:  # ours must read the very numbers that the others read
            model, settings["load_format"] = str(subject.folder(scratch)), "auto"
        if subject.device.type == "cuda" and settings.get("memory_share") is None:
            settings["memory_share"] = MEMORY_SHARE
    lengths = [len(prompt) + count for prompt, count in zip(workload.prompts, workload.outputs, strict=True)]
    return Task(
        model=model,
        scratch=str(scratch),
        device=str(subject.device),
        threads=benchmark.threads or len(os.sched_getaffinity(0)),
        longest=max(lengths),
        total=sum(lengths),
        settings=settings,
        temperature=benchmark.temperature,
        profile_steps=benchmark.profile_steps,
    )


def load_others(
    benchmark: Benchmark, task: Task, stack: ExitStack, notice: Callable[[str], None]
) -> tuple[list[Engine], list[Contender]]:
    """The engines to compare with; one that is not available is replaced if it can be, and its reason kept."""
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
                names.append(FALLBACKS[name])  # the loop comes to it
    return loaded, absent
