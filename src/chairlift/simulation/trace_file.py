"""TraceFile: a simulation's steps and requests as trace events in JSON, which ui.perfetto.dev opens.

Each replica is a process. Its steps are on the thread "device", the batch and the cache are counters, and each request
is an asynchronous event with the phases waiting, prefill and decode.
"""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any

from chairlift.core.errors import ChairliftError
from chairlift.core.plan import StepPlan
from chairlift.simulation.replica import Life
from chairlift.simulation.run import Simulation

MOST_EVENTS = 600_000  # some 80 MB; later events are left out
_FLUSH = 2000  # events
_DEVICE = 0  # the thread of steps


class TraceFile:
    """Writes events as they happen, so that a long simulation does not keep them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.most = MOST_EVENTS
        self._count = 0
        self._lines: list[str] = []
        self._separator = "\n"
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise self._failed(error) from None
        self._file.write('{"displayTimeUnit":"ms","traceEvents":[')

    @property
    def is_full(self) -> bool:
        """Whether later events are left out."""
        return self._count >= self.most

    def watch(self, simulation: Simulation) -> None:
        """Write what happens in a simulation from now on."""
        simulation.on_step, simulation.on_end = self._step, self._request
        for number in range(len(simulation.replicas)):
            name = {"name": f"replica {number}, {simulation.roles[number]}"}
            self._add({"ph": "M", "name": "process_name", "pid": number, "tid": _DEVICE, "args": name})
            self._add({"ph": "M", "name": "thread_name", "pid": number, "tid": _DEVICE, "args": {"name": "device"}})

    def _step(self, number: int, plan: StepPlan, begun: float, seconds: float, values: dict[str, float]) -> None:
        if self.is_full:
            return
        sizes = {"sequences": len(plan.counts), "tokens": plan.tokens, "preempted": len(plan.preempted)}
        kind = "prefill" if plan.tokens > len(plan.counts) else "decode"
        place = {"pid": number, "tid": _DEVICE, "ts": _us(begun)}
        self._add({"ph": "X", "name": kind, "cat": "step", **place, "dur": _us(seconds), "args": sizes})
        for name in ("running", "waiting", "kv"):
            self._add({"ph": "C", "name": name, **place, "args": {name: round(values[name], 4)}})

    def _request(self, number: int, life: Life) -> None:
        if self.is_full or not isfinite(life.first):
            return
        common = {"cat": "request", "id": life.number, "pid": number, "tid": _DEVICE}
        sizes = {"prompt tokens": life.query.prompt_tokens, "output tokens": life.tokens, "tenant": life.query.tenant}
        started = min(life.started, life.first)
        self._add({"ph": "b", "name": f"request {life.number}", **common, "ts": _us(life.sent), "args": sizes})
        for name, start, end in (
            ("waiting", life.sent, started),
            ("prefill", started, life.first),
            ("decode", life.first, life.end),
        ):
            self._add({"ph": "b", "name": name, **common, "ts": _us(start)})
            self._add({"ph": "e", "name": name, **common, "ts": _us(end)})
        self._add({"ph": "e", "name": f"request {life.number}", **common, "ts": _us(life.end)})

    def _add(self, event: dict[str, Any]) -> None:
        self._count += 1
        self._lines.append(json.dumps(event, separators=(",", ":")))
        if len(self._lines) >= _FLUSH:
            self._write()

    def _write(self) -> None:
        if not self._lines:
            return
        try:
            self._file.write(self._separator + ",\n".join(self._lines))
        except OSError as error:
            raise self._failed(error) from None
        self._separator = ",\n"
        self._lines = []

    def _failed(self, error: OSError) -> ChairliftError:
        return ChairliftError(f"{self._path} cannot be written: {error.strerror or error}; name another file")

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the file, also after an error: what it has can be opened."""
        try:
            if error is None or not isinstance(error, ChairliftError):
                self._write()
                self._file.write("\n]}\n")
            self._file.close()
        except OSError as failed:
            raise self._failed(failed) from None


def _us(seconds: float) -> float:
    """Return microseconds, the unit of trace events."""
    return round(1e6 * seconds, 3)
