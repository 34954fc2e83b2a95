"""A grid of scheduling settings over one mix: the same model and requests on one engine after the other."""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.bench.drive import Driver, MixResult, RequestRecord
from chairlift.bench.engines import Engine, UnavailableError, engine, task_for
from chairlift.bench.offline import MEMORY_SHARE
from chairlift.core.errors import ChairliftError
from chairlift.core.policies import POLICIES
from chairlift.core.settings import Settings, options
from chairlift.engine.record_file import RecordFile
from chairlift.traffic.mixes import Mix

if TYPE_CHECKING:
    from chairlift.execution.build import Loaded

NAIVE = "transformers-static"
WARM_REQUESTS, WARM_PROMPT, WARM_ANSWER = 8, 64, 4


@dataclass(slots=True, eq=False)
class Cell:
    """One combination of settings, and its runs; the naive cell (transformers) has no choices."""

    name: str
    choices: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)
    runs: list[MixResult] = field(default_factory=list)
    unavailable: str | None = None


def cells_of(axes: Mapping[str, Sequence[str]]) -> list[Cell]:
    """Return every combination, named by the settings that differ.

    >>> [cell.name for cell in cells_of({"batching": ["static", "continuous"], "policy": ["fcfs"]})]
    ['static', 'continuous']
    """
    known = {found.name: found.metadata["choices"] for _, found in options()}
    grid = {axis: list(dict.fromkeys(values)) for axis, values in axes.items() if values}
    for axis, values in grid.items():
        for value in values:
            if value not in known.get(axis, ()):
                raise ChairliftError(f"{axis} is {value!r}: use one of {', '.join(known.get(axis, ())) or 'none yet'}")
    combinations = []
    for chosen in product(*grid.values()):
        choices = dict(zip(grid, chosen, strict=True))
        if not getattr(POLICIES[choices.get("policy", "fcfs")], "needs_lengths", True):
            choices.pop("predictor", None)  # the policy does not use it
        if choices not in combinations:
            combinations.append(choices)
    varying = [axis for axis, values in grid.items() if len(values) > 1] or list(grid)[:1]
    return [Cell(", ".join(choices[axis] for axis in varying if axis in choices), choices) for choices in combinations]


class Comparison:
    """A grid of cells with a mix and a model, ready to run."""

    def __init__(
        self,
        model: str,
        settings: Mapping[str, Any],
        axes: Mapping[str, Sequence[str]],
        mix: Mix,
        *,
        repeat: int = 1,
        naive: bool = False,
    ) -> None:
        self.cells = cells_of(axes)  # before the import of torch, so that a wrong value is reported at once
        from chairlift.evaluation.twin import Subject
        from chairlift.execution.build import choose_limits

        self.repeat = repeat
        self.record_file: RecordFile | None = None  # for the live page: the first run of each cell
        self._model = model
        self._settings = dict(settings)
        self._subject = Subject(model, Settings.of(**settings))
        config, device = self._subject.config, self._subject.device
        self.mix = mix.encoded(self._subject.encode, config.vocab_size)
        self._settings["max_sequences"] = settings.get("max_sequences") or self.mix.max_sequences
        if not settings.get("max_length"):  # as short as possible: prefill=whole needs steps as long as the context
            queries = (*self.mix.rehearsal, *self.mix.queries)
            longest = max(query.prompt_tokens + self.mix.max_tokens(query) for query in queries)
            self._settings["max_length"] = min(config.max_length, (longest // 64 + 1) * 64)
        self.limits = choose_limits(config, Settings.of(**self._settings), device)
        self.info = {"model": model, "device": str(device), "dtype": str(config.dtype).removeprefix("torch.")}
        for cell in self.cells:
            cell.settings = {**self._settings, **cell.choices}
            if (
                cell.choices.get("prefill") == "whole"
            ):  # derived from max_length in this cell; the other cells keep their own
                cell.settings["step_tokens"] = None
            Settings.of(**cell.settings)
        if naive:
            if not self.mix.is_at_once:
                raise ChairliftError("--naive submits all requests at once: leave out --rate and recordings")
            self.cells.append(Cell(NAIVE, {}))

    @property
    def tokens(self) -> int:
        """Output tokens of all runs, for the progress bar."""
        rehearsed = sum(query.output_tokens for query in self.mix.rehearsal)
        return self.repeat * sum(self.mix.output_tokens + (rehearsed if cell.choices else 0) for cell in self.cells)

    def run(self, notice: Callable[[str], None], advance: Callable[[int], None]) -> None:
        """Run all cells `repeat` times, interleaved, so that other load on the machine affects all cells alike."""
        from chairlift.cluster.tensor_parallel.build import load_model

        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chairlift-compare-")))
            naive = self._load_naive(scratch, stack, notice)
            notice("loading")
            loaded = load_model(self._model, Settings.of(**self.cells[0].settings), progress=False)
            notice("warming up")
            self._drive(loaded, self.cells[0], warm(self.mix), lambda _tokens: None)
            for number in range(self.repeat):
                for cell in self.cells:
                    if cell.unavailable is not None:
                        continue
                    notice(f"run {number + 1} of {self.repeat}: {cell.name}")
                    if cell.choices:
                        cell.runs.append(self._drive(loaded, cell, self.mix, advance))
                    elif naive is not None:
                        self._run_naive(naive, cell)
                        advance(self.mix.output_tokens)

    def _drive(self, loaded: Loaded, cell: Cell, mix: Mix, advance: Callable[[int], None]) -> MixResult:
        """Run the mix on a new engine, and free its KV memory afterwards."""
        from chairlift.cluster.tensor_parallel.build import assemble

        built = assemble(loaded, Settings.of(**cell.settings), progress=False)
        try:
            if mix.rehearsal:
                Driver(built.engine, replace(mix, queries=mix.rehearsal), advance).run()
            if self.record_file is None or cell.runs or mix is not self.mix:
                return Driver(built.engine, mix, advance).run()
            end = self.record_file.record(built.engine, cell.name)
            found = Driver(built.engine, mix, advance).run()
            end()
            return found
        finally:
            del built
            gc.collect()

    def _load_naive(self, scratch: Path, stack: ExitStack, notice: Callable[[str], None]) -> Engine | None:
        """Start transformers with padded batches and the same weights, in a process of its own."""
        cell = self.cells[-1]
        if cell.choices:
            return None
        notice(f"loading {NAIVE}")
        folder = str(self._subject.folder(scratch))
        if self._subject.is_random:  # both engines must load the same random weights
            self._model = folder
            for each in self.cells:
                each.settings["load_format"] = "auto"
        if self._subject.device.type == "cuda":
            for each in self.cells:
                each.settings["memory_share"] = each.settings.get("memory_share") or MEMORY_SHARE
        task = task_for(
            self.mix,
            scratch,
            model=folder,
            device=self.info["device"],
            dtype=self.info["dtype"],
            max_sequences=self.limits.max_sequences,
            step_tokens=self.limits.step_tokens,
        )
        try:
            return stack.enter_context(engine(NAIVE, sys.executable, task))
        except UnavailableError as reason:
            cell.unavailable = str(reason)
            return None

    def _run_naive(self, naive: Engine, cell: Cell) -> None:
        try:
            naive.run(self.mix)
        except UnavailableError as reason:
            cell.unavailable = str(reason)
            cell.runs.clear()
            return
        found = naive.contender.runs.pop()["requests"]
        answers = [
            RequestRecord(query, query.at, len(each["tokens"]), each["first"], each["last"])
            for query, each in zip(self.mix.queries, found, strict=True)
        ]
        cell.runs.append(MixResult(self.limits.max_sequences, answers))


def warm(mix: Mix) -> Mix:
    """Return a small part of a mix, with its longest prompt, to compile kernels before anything is timed."""
    longest = max(mix.queries, key=lambda query: query.prompt_tokens)
    few = [replace(query, prompt=query.ids[:WARM_PROMPT]) for query in mix.queries[:WARM_REQUESTS]]
    queries = [
        replace(query, at=0.0, after_tokens=0, output_tokens=min(WARM_ANSWER, query.output_tokens))
        for query in (*few, longest)
    ]
    return replace(mix, queries=queries, rehearsal=[], lengths_are_known=True)
