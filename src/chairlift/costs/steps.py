"""The host's time per step, measured by wrapping the four calls of the engine's loop."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from rich.table import Table

from chairlift.core.plan import StepPlan
from chairlift.core.step import Step
from chairlift.core.words import counted
from chairlift.engine.engine import Engine
from chairlift.report.numbers import percentile
from chairlift.report.tables import table

PARTS = ("plan", "launch", "wait", "copy", "apply", "rest")
LABELS = {
    "plan": "plan",
    "launch": "launch: metadata and launches (on a CPU, the pass itself)",
    "wait": "wait for the device",
    "copy": "read the tokens",
    "apply": "apply",
    "rest": "deliver tokens, and the loop",
    "host": "the host's time: all but waiting",
    "step": "the whole step",
}
_FULL = 0.9  # steps with at least this share of the largest batch are reported


class Stopwatch:
    """Times an engine's steps until `stop`; an engine without a Stopwatch has no overhead.

    A step is the time from one `plan` to the next. In it the engine plans and submits a pass and, overlapped, collects
    the previous one: it waits for the device, copies the tokens and applies them. The rest is the engine's caller.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps: list[tuple[int, dict[str, float]]] = []  # sequences, and seconds by part
        self._open: dict[str, float] = {}
        self._sequences = 0
        self._began = 0.0
        scheduler, executor = engine.scheduler, engine._executor
        self._wrapped: list[tuple[Any, str]] = [(scheduler, "plan"), (scheduler, "apply")]
        self._wrapped += [(executor, "launch"), (executor, "collect")]
        for owner, name in self._wrapped:
            # Set on the object, which hides the class's method until `stop` deletes it.
            setattr(owner, name, getattr(self, f"_{name}")(getattr(owner, name)))

    def stop(self) -> None:
        """Restore the engine."""
        for owner, name in self._wrapped:
            delattr(owner, name)

    def summary(self) -> dict[str, Any]:
        """Return median and p95 in microseconds, by part and in total, of steps with a full or nearly full batch."""
        most = max((count for count, _ in self._steps), default=0)
        full = [parts for count, parts in self._steps if count and count >= _FULL * most]
        if not full:
            return {"sequences": 0, "steps": 0, "parts": {}}
        times = {part: [each.get(part, 0.0) for each in full] for part in PARTS}
        times["host"] = [sum(each.values()) - each.get("wait", 0.0) for each in full]
        times["step"] = [sum(each.values()) for each in full]
        parts = {
            name: {kind: 1e6 * percentile(values, share) for kind, share in (("median", 50), ("p95", 95))}
            for name, values in times.items()
        }
        return {"sequences": most, "steps": len(full), "parts": parts}

    # ---- timed versions of the four calls

    def _plan(self, plan: Callable[[float], StepPlan]) -> Callable[[float], StepPlan]:
        def timed(now: float) -> StepPlan:
            start = perf_counter()
            self._close(start)
            found = plan(now)
            self._began, self._sequences = start, len(found.sequences)
            self._open = {"plan": perf_counter() - start}
            return found

        return timed

    def _launch(self, launch: Callable[[Step], Any]) -> Callable[[Step], Any]:
        def timed(step: Step) -> Any:
            start = perf_counter()
            launched = launch(step)
            self._open["launch"] = perf_counter() - start
            return launched

        return timed

    def _collect(self, collect: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(launched: Any) -> Any:
            start = perf_counter()
            if getattr(launched, "done", None) is not None:
                launched.done.synchronize()
            arrived = perf_counter()
            result = collect(launched)
            self._open["wait"], self._open["copy"] = arrived - start, perf_counter() - arrived
            return result

        return timed

    def _apply(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*step: Any) -> Any:
            start = perf_counter()
            events = apply(*step)
            end = perf_counter()
            self._open["apply"] = end - start
            if not self._engine.has_work:
                self._close(end)  # the time until the next step is not part of this one
            return events

        return timed

    def _close(self, now: float) -> None:
        if self._open:
            rest = now - self._began - sum(self._open.values())
            self._steps.append((self._sequences, {**self._open, "rest": rest}))
            self._open = {}


def steps_table(steps: dict[str, Any]) -> Table:
    """Return the table of the host's time per step, by part."""
    rows: list[tuple[str, ...] | None] = []
    for name, each in steps["parts"].items():
        if name == "host":
            rows.append(None)
        rows.append((LABELS[name], f"{each['median']:,.0f}", f"{each['p95']:,.0f}"))
    steps_timed, most = counted(steps["steps"], "step"), counted(steps["sequences"], "sequence")
    title = f"microseconds a step: {steps_timed} with 90% to all of {most}"
    return table(title, ("", "median", "p95"), rows, is_centered=True)
