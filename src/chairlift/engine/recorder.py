"""Recorder: what each step did, as plain numbers in columns, for the live page and for recorded runs.

A record is a dict that JSON can hold. It has any of these parts:

    start    the engine's limits and choices, and its open lanes; a reader forgets the lanes it knew
    steps    [number, start, duration, tokens, sampled tokens, rows, chunks, drafts]; rows is 0 if they are those of the
             step before. Each row has a decode of one token, unless it is in chunks as [row, first position, tokens] or
             in drafts as [row, drafts, accepted drafts]
    events   ["admit", step, ...lane], ["preempt", step, row, swapped out], ["end", step, row, reason, output tokens,
             time to first token or null, time since arrival]
    look     the cache, the queue and the counters, now and then
    skipped  steps that are missing

A lane is a row of the batch while one sequence has it: [row, id, index, tenant, prompt tokens, cached tokens, arrival,
wait, most tokens, preemptions, priority, is a fork, known tokens, the prompt's last token ids if asked for]. Times are
microseconds since the recorder was made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chairlift.core.budget import LatencyBudget
from chairlift.core.plan import Outcome, StepPlan
from chairlift.core.request import FinishReason, Phase, Request, Sequence
from chairlift.core.step import StepResult
from chairlift.engine.engine import Engine
from chairlift.engine.looks import look_at

MOST_STEPS = 64  # in one record; further ones are skipped
MOST_EVENTS = 4096  # in one record; further ones are lost
_LOOK_EVERY = 0.5  # seconds between two looks
_LOOK_SHARE = 0.002  # of the time, at most, for looks: a slow one is repeated later
_SWEEP = 8  # steps between two searches for single answers that have ended between steps
_ENDED = "ended"  # reason of a sequence that ended between two steps: its client stopped it, or disconnected


class Recorder:
    """Records the steps of an engine from now on, until it is closed."""

    def __init__(
        self,
        engine: Engine,
        name_of: Callable[[Request], str] = lambda request: request.id,
        prompt_tokens: int = 0,  # the last ones of each prompt, to show them
    ) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._name_of = name_of
        self._prompt_tokens = prompt_tokens
        self._epoch = engine.clock.now()
        self._number = 0  # of steps
        self._lanes: dict[int, Sequence] = {}  # by row
        self._row_of: dict[Sequence, int] = {}  # the same, the other way round
        self._prefills: dict[int, int] = {}  # known tokens of the rows in prefill
        self._almost: set[int] = set()  # rows in prefill with one token left, or of which little is known
        self._firsts: dict[int, int] = {}  # when rows got their first token, if that was seen
        self._preempted_firsts: dict[Sequence, int] = {}  # the same, of preempted sequences
        self._rows: list[int] | None = None  # of the last step in the record
        self._steps: list[tuple[Any, ...]] = []
        self._events: list[tuple[Any, ...]] = []
        self._start: dict[str, Any] | None = None
        self._look: dict[str, Any] | None = None
        self._next_look = 0.0
        self._skipped = 0
        self._last_end = 0  # of a step
        self._gone = -1  # requests that had ended by the last step
        self.stride = 1  # record one step of so many
        self.on_full: Callable[[], None] | None = None  # called after a step, if a record should be taken now
        self._take_over()
        engine.on_applied = self._applied
        self.begin()

    def _take_over(self) -> None:
        """Open the lanes of sequences that run already, and find those in prefill."""
        for sequence in self._scheduler.running:
            self._open(sequence.row, sequence)
            if sequence.length - sequence.computed > 1 or len(sequence.tokens) == sequence.prompt_length:
                self._prefills[sequence.row] = len(sequence.tokens)
        for plan in self._scheduler.memory.prefixes.in_flight:
            checked = {plan.sample_rows[place] for place, _ in plan.drafts}
            for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
                if count > 1 and row not in checked and row in self._lanes:
                    self._prefills.setdefault(row, start + count)  # the last chunk of a sequence that was preempted
            for row in set(plan.sample_rows).difference(plan.rows):
                self._prefills.pop(row, None)  # a fork of a prompt that is computed
        self._almost = set(self._prefills)

    def close(self) -> None:
        """Stop recording."""
        self._engine.on_applied = None

    def begin(self) -> None:
        """Let the next record have all that a new reader must know; `take` what has happened first, or it is lost."""
        scheduler, limits = self._scheduler, self._scheduler.limits
        planner, pool = scheduler.planner, scheduler.pool
        budget = planner.budget
        self._start = {
            "at": self._since(self._engine.clock.now()),
            "epoch": int(self._epoch * 1e6),  # another one is another recorder, with times and numbers of its own
            "max_sequences": limits.max_sequences,
            "step_tokens": planner.prefill.step_tokens,
            "target_us": int(budget.target * 1e6) if isinstance(budget, LatencyBudget) else None,
            "max_length": limits.max_length,
            "blocks": pool.total,
            "block_size": pool.block_size,
            "policy": scheduler.policy.name,
            "batching": type(planner.gate).__name__.lower(),
            "prefill": type(planner.prefill).__name__.lower(),
            "preemption": type(scheduler.memory.preemption).__name__.lower(),
            "lanes": [self._lane(row, sequence) for row, sequence in self._lanes.items()],
            "number": self._number,
        }
        self._steps, self._events, self._rows = [], [], None  # these are in the lanes already

    def take(self) -> dict[str, Any] | None:
        """Return what has happened since the last call, if anything has; look at the cache and the queue if due."""
        self._sweep({})  # no step may follow for a while
        now = self._engine.clock.now()
        if now >= self._next_look:
            self._look = look_at(self._scheduler, self._name_of, now, self._epoch)
            took = self._engine.clock.now() - now
            self._next_look = now + max(_LOOK_EVERY, took / _LOOK_SHARE)
        found = {
            "start": self._start,
            "steps": self._steps,
            "events": self._events,
            "look": self._look,
            "skipped": self._skipped,
        }
        self._start, self._look, self._skipped = None, None, 0
        self._steps, self._events = [], []
        record = {name: value for name, value in found.items() if value}
        return record or None

    @property
    def is_full(self) -> bool:
        """Whether further steps would be skipped, or further events soon be lost."""
        return len(self._steps) >= MOST_STEPS or len(self._events) >= MOST_EVENTS // 2

    # ---- steps

    def _since(self, moment: float) -> int:
        return int((moment - self._epoch) * 1e6)

    def _applied(self, plan: StepPlan, result: StepResult, outcome: Outcome, begun: float, seconds: float) -> None:
        end = self._since(begun + seconds)
        events = outcome.events
        reasons = {event.sequence: event.finish_reason for event in events if event.finish_reason} if events else {}
        if self._has_missed_ends(plan, reasons):
            self._sweep(reasons)
        self._number += 1
        if plan.preempted:
            self._preempt(plan)
        if plan.placed:
            self._place(plan, end)
        chunks = self._chunks(plan, end) if self._prefills else 0
        counts = result.counts
        drafts = (
            [(plan.sample_rows[place], len(tokens), counts[place] - 1) for place, tokens in plan.drafts]
            if counts is not None and plan.drafts
            else 0
        )
        if self._number % self.stride or len(self._steps) >= MOST_STEPS:
            self._skipped += 1
        else:
            rows = plan.rows
            shown = 0 if rows == self._rows else rows
            self._rows = rows
            begin, took = int((begun - self._epoch) * 1e6), int(seconds * 1e6)
            sampled = len(result.tokens)
            self._steps.append((self._number, begin, took, plan.tokens, sampled, shown, chunks, drafts))
        for sequence, reason in reasons.items():
            if (row := self._row_of.get(sequence)) is not None:
                self._end(row, reason, end)
        self._last_end = end
        if self.on_full is not None and self.is_full:
            self.on_full()

    def _has_missed_ends(self, plan: StepPlan, reasons: dict[Sequence, FinishReason]) -> bool:
        """Whether a sequence may have ended that is not in this step's outcome; single answers are found later."""
        count = self._scheduler.counters
        gone = count.finished + count.aborted + count.failed
        new, self._gone = gone - self._gone, gone
        if reasons:
            is_live = self._scheduler.is_live
            new -= len({each.request.id for each in reasons if not is_live(each.request.id)})
        return bool(new) or self._number % _SWEEP == 0 or any(each.row in self._lanes for each in plan.newcomers)

    def _sweep(self, reasons: dict[Sequence, FinishReason]) -> None:
        """Close the lanes of sequences that had ended before this step's results came: no outcome says so."""
        is_done = Phase.DONE
        ended = [row for row, each in self._lanes.items() if each.phase is is_done and each not in reasons]
        for row in ended:
            self._end(row, None, self._last_end)
        for sequence in [each for each in self._preempted_firsts if each.phase is is_done]:
            del self._preempted_firsts[sequence]

    def _place(self, plan: StepPlan, end: int) -> None:
        """Open the lanes of sequences that take a row in this step."""
        placed = {(id(each.request.sampling), each.index): each for each in plan.placed}
        for newcomer in plan.newcomers:  # not the row of a sequence itself: a later plan may have changed it
            row, sequence = newcomer.row, placed[id(newcomer.sampling), newcomer.index]
            is_computed = row not in plan.rows or plan.starts[plan.rows.index(row)] + 1 >= len(newcomer.tokens)
            if self._lanes.get(row) is sequence and is_computed:
                continue  # a beam that continues another one, or is back after a failed step
            if row in self._lanes or sequence in self._row_of:
                for old in {row, self._row_of.get(sequence, row)} & self._lanes.keys():
                    self._event("preempt", old, 0)  # by a step that failed
                    self._leave(old)
            self._open(row, sequence)
            if sequence in self._preempted_firsts:
                self._firsts[row] = self._preempted_firsts.pop(sequence)
            is_fork = sequence.index > 0 and row not in plan.rows and row in plan.sample_rows
            self._event("admit", *self._lane(row, sequence, len(newcomer.tokens), is_fork=is_fork))
            if is_fork:
                self._firsts.setdefault(row, end)
            else:
                self._prefills[row] = len(newcomer.tokens)

    def _lane(
        self, row: int, sequence: Sequence, known: int | None = None, *, is_fork: bool = False
    ) -> tuple[Any, ...]:
        request, started = sequence.request, sequence.started
        return (
            row,
            self._name_of(request),
            sequence.index,
            request.tenant,
            sequence.prompt_length,
            sequence.cached,
            int((request.arrival - self._epoch) * 1e6),
            None if started is None else int((started - request.arrival) * 1e6),
            sequence.limit,
            sequence.preemptions,
            request.priority,
            int(is_fork),
            len(sequence.tokens) if known is None else known,
            request.prompt[-self._prompt_tokens :] if self._prompt_tokens else 0,
        )

    def _chunks(self, plan: StepPlan, end: int) -> list[tuple[int, int, int]] | int:
        """Return the slices of rows in prefill; the last one of a row brings a token, and may have drafts behind it."""
        found = []
        prefills, rows = self._prefills, plan.rows
        checked = {plan.sample_rows[place] for place, _ in plan.drafts}
        # Prompts come last in a plan, but a prompt's very last token may be planned as if it were a decode.
        reads_all = bool(self._almost)
        for place in range(len(rows) - 1, -1, -1):
            row = rows[place]
            if row not in prefills:
                if reads_all:
                    continue
                break
            start, count = plan.starts[place], plan.counts[place]
            if row not in checked:
                found.append((row, start, count))
            if start + count >= prefills[row]:
                known = prefills.pop(row)
                self._almost.discard(row)
                if known == self._lanes[row].prompt_length:
                    self._firsts.setdefault(row, end)
            elif start + count == prefills[row] - 1:
                self._almost.add(row)
        return found or 0

    def _preempt(self, plan: StepPlan) -> None:
        for sequence in plan.preempted:
            if (row := self._row_of.get(sequence)) is not None:
                self._event("preempt", row, int(bool(sequence.saved)))
                self._leave(row)

    def _end(self, row: int, reason: str | None, end: int) -> None:
        sequence = self._lanes[row]
        arrival = self._since(sequence.request.arrival)
        first = self._firsts.get(row)
        ttft = None if first is None else first - arrival
        output = len(sequence.tokens) - sequence.prompt_length
        self._event("end", row, reason or _ENDED, output, ttft, max(0, end - arrival))
        self._forget(row)

    def _open(self, row: int, sequence: Sequence) -> None:
        self._lanes[row] = sequence
        self._row_of[sequence] = row

    def _leave(self, row: int) -> None:
        """Close the lane of a preempted sequence; its first token came when it came."""
        if row in self._firsts:
            self._preempted_firsts[self._lanes[row]] = self._firsts[row]
        self._forget(row)

    def _forget(self, row: int) -> None:
        del self._row_of[self._lanes.pop(row)]
        self._prefills.pop(row, None)
        self._almost.discard(row)
        self._firsts.pop(row, None)

    def _event(self, kind: str, *more: Any) -> None:
        if len(self._events) < MOST_EVENTS:
            self._events.append((kind, self._number, *more))
