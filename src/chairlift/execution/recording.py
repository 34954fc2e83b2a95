"""Recorded steps: every call of an executor in a file, to be replayed without the scheduler.

The file is JSON lines. The first names the model and the settings; each other line is one call, in the engine's order:
a step that was launched, the masks of its constrained samples, or the tokens that it returned.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from chairlift.core.errors import ChairliftError
from chairlift.core.step import Bits, Step, StepResult
from chairlift.engine.engine import Executor

FORMAT = "chairlift steps 2"  # 2: a block table for each group of layers


class RecordingExecutor:
    """Runs steps on another executor and writes each call to a file."""

    def __init__(self, executor: Executor, file: TextIO, model: str, settings: dict[str, Any]) -> None:
        self._executor = executor
        self._file = file
        self._write({"format": FORMAT, "model": model, "settings": settings})

    def launch(self, step: Step) -> Any:
        """Start one forward pass."""
        self._write({"launch": step.plain()})
        return self._executor.launch(step)

    def choose(self, launched: Any, masks: list[Bits | None]) -> None:
        """Choose the tokens of the step's masked samples."""
        self._write({"choose": [None if mask is None else mask.hex() for mask in masks]})
        self._executor.choose(launched, masks)

    def collect(self, launched: Any) -> StepResult:
        """Wait for the step's results."""
        result = self._executor.collect(launched)
        self._write({"collect": result.tokens})
        return result

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


@dataclass(slots=True)
class Replay:
    """The results of replayed steps."""

    seconds: float = 0.0
    steps: int = 0
    slice_tokens: int = 0  # tokens computed, prompts included
    tokens: int = 0  # tokens sampled
    equal_tokens: int = 0  # sampled tokens that equal the recorded ones
    first_difference: int | None = None  # number of the first step with a different token
    step_seconds: list[float] = field(default_factory=list)


def read_header(path: Path) -> dict[str, Any]:
    """Return the model and the settings of a recording."""
    with _opened(path) as file:
        header = _parsed(path, 1, file.readline())
    if header.get("format") != FORMAT:
        raise ChairliftError(
            f"{path} is not a recording of steps: make one with `chairlift bench offline --record-steps`"
        )
    return header


def replay(path: Path, executor: Executor, advance: Callable[[int], None] = lambda _bytes: None) -> Replay:
    """Make the recorded calls on an executor and compare the tokens."""
    found = Replay()
    in_flight: deque[Any] = deque()
    begun = last = time.perf_counter()
    for number, call in _calls(path, advance):
        if "launch" in call:
            step = Step.of_plain(call["launch"])
            in_flight.append(executor.launch(step))
            found.slice_tokens += step.tokens
        elif not in_flight:
            raise ChairliftError(f"line {number} of {path} is for a step that was not launched: record it again")
        elif "choose" in call:
            executor.choose(in_flight[-1], [None if mask is None else bytes.fromhex(mask) for mask in call["choose"]])
        else:
            tokens, recorded = executor.collect(in_flight.popleft()).tokens, call["collect"]
            equal = sum(token == other for token, other in zip(tokens, recorded, strict=False))
            if tokens != recorded and found.first_difference is None:
                found.first_difference = found.steps
            found.steps += 1
            found.tokens += len(recorded)
            found.equal_tokens += equal
            now = time.perf_counter()
            found.step_seconds.append(now - last)
            last = now
    found.seconds = time.perf_counter() - begun
    return found


def _calls(path: Path, advance: Callable[[int], None]) -> Iterator[tuple[int, dict[str, Any]]]:
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            advance(len(line))
            if number > 1:
                yield number, _parsed(path, number, line)


def _opened(path: Path) -> TextIO:
    try:
        return path.open()
    except OSError as error:
        raise ChairliftError(f"{path} cannot be read: {error.strerror}") from None


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        raise ChairliftError(
            f"line {number} of {path} is not JSON: the recording is incomplete, record it again"
        ) from None
    if not isinstance(found, dict):
        raise ChairliftError(f"line {number} of {path} is not a recorded call: record it again")
    return found
