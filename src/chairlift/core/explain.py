"""Explain in words why a request waits, or what it has computed so far, without changing the scheduler.

So nothing here calls the queue's `peek`, a policy's `choose` or a prefix lookup that keeps its path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import nsmallest

from chairlift.core.budget import LatencyBudget
from chairlift.core.planner import Planner
from chairlift.core.policy import Lane
from chairlift.core.prefill import Whole
from chairlift.core.request import Phase, Request, Sequence
from chairlift.core.scheduler import Scheduler
from chairlift.core.words import counted

MOST = 16  # described answers


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of one answer, in numbers and in words."""

    tenant: str
    index: int  # which of the request's n answers
    state: str  # waiting or running
    ahead: int | None  # requests before it in its lane; None when it runs
    lanes: int  # with waiting requests
    waiting: int  # requests in all lanes
    blocked_by: str  # what keeps the next request out: rows, blocks, tokens or gate
    prompt_tokens: int
    computed_tokens: int
    generated_tokens: int
    preemptions: int
    seconds: float  # since its arrival
    why: list[str]  # sentences


Lanes = dict[Lane, list[Sequence]]  # of each waiting request, its first waiting answer


def explain(scheduler: Scheduler, is_asked: Callable[[Request], bool], now: float) -> tuple[list[Standing], int]:
    """Describe the live answers of the requests that are asked about, the oldest first; also return their number."""
    found = [each for each in (*scheduler.running, *scheduler.waiting) if is_asked(each.request)]
    found.sort(key=lambda each: (each.order, each.index))
    lanes = _lanes(scheduler, now) if found else {}
    return [_describe(scheduler, lanes, each, now) for each in found[:MOST]], len(found)


def explain_head(scheduler: Scheduler, most: int, now: float) -> list[tuple[Sequence, Standing]]:
    """Describe the first waiting requests of every lane, as many as `most` in all; the lane with the oldest first."""
    lanes = _lanes(scheduler, now)
    share = max(1, most // max(1, len(lanes)))
    heads = [nsmallest(share, own, key=lambda each: each.rank) for own in lanes.values()]
    heads.sort(key=lambda head: head[0].order)
    found = [(place, each) for head in heads for place, each in enumerate(head)]
    return [(each, _describe(scheduler, lanes, each, now, (place, heads[0][0]))) for place, each in found[:most]]


def _lanes(scheduler: Scheduler, now: float) -> Lanes:
    lanes: dict[Lane, dict[int, Sequence]] = {}
    for each in scheduler.waiting:
        own = lanes.setdefault(scheduler.policy.lane(each, now), {})
        if each.order not in own or each.rank < own[each.order].rank:
            own[each.order] = each
    return {lane: list(own.values()) for lane, own in lanes.items()}


def _describe(
    scheduler: Scheduler, lanes: Lanes, sequence: Sequence, now: float, place: tuple[int, Sequence] | None = None
) -> Standing:
    """Describe an answer; `place` is the number of requests before it in its lane, and the first of all."""
    is_waiting = sequence.phase is Phase.WAITING
    ahead, waiting = None, sum(map(len, lanes.values()))
    if is_waiting:
        own = lanes[scheduler.policy.lane(sequence, now)]
        if place is None:
            before = [each for each in own if each.rank < sequence.rank and each.order != sequence.order]
            place = len(before), min(own, key=lambda each: each.rank)
        ahead, first_of_lane = place
        # Which of several lanes is next, only the policy's `choose` could tell.
        first = first_of_lane if len(lanes) == 1 else None
        why = [
            _place(ahead, len(own), len(lanes), waiting),
            _obstacle(scheduler, sequence, first),
            f"Policy {scheduler.policy.name}: {scheduler.policy.explain(sequence, scheduler.waiting, now)}.",
        ]
    else:
        why = [_progress(sequence)]
        if sequence.drafted:
            drafts = counted(sequence.drafted, "draft token")
            why.append(f"Of {drafts} checked for it, {sequence.accepted:,} were accepted.")
    if sequence.preemptions:
        why.append(f"It was preempted {counted(sequence.preemptions, 'time')}, and kept its place in the queue.")
    seconds = now - sequence.request.arrival
    why.append(f"It arrived {seconds:.2f} s ago, with a prompt of {counted(sequence.prompt_length, 'token')}.")
    return Standing(
        tenant=sequence.request.tenant,
        index=sequence.index,
        state="waiting" if is_waiting else "running",
        ahead=ahead,
        lanes=len(lanes),
        waiting=waiting,
        blocked_by=scheduler.planner.blocked_by if is_waiting else "",
        prompt_tokens=sequence.prompt_length,
        computed_tokens=sequence.computed - sequence.unchecked,
        generated_tokens=len(sequence.output),
        preemptions=sequence.preemptions,
        seconds=round(seconds, 3),
        why=why,
    )


def _progress(sequence: Sequence) -> str:
    known, came = len(sequence.tokens), len(sequence.output)
    computed = sequence.computed - sequence.unchecked
    if not came or known - computed > 1:
        again = " again" if came else ""
        return f"It runs: {computed:,} of {counted(known, 'token')} are computed{again}."
    most = sequence.limit - sequence.prompt_length
    return f"It runs: its answer has {counted(came, 'token')} so far, of {most:,} at most."


def _place(ahead: int, in_lane: int, lanes: int, waiting: int) -> str:
    if lanes > 1:
        where = f"is behind {ahead:,}" if ahead else "is first"
        return f"It waits: it {where} of the {in_lane:,} in its lane, and {waiting:,} wait in {lanes} lanes."
    where = f"{counted(ahead, 'request')} {'is' if ahead == 1 else 'are'} before it" if ahead else "it is next"
    return f"It waits: {where}, and {counted(waiting, 'request')} {'waits' if waiting == 1 else 'wait'} in all."


# ---- what keeps the next request out


def _obstacle(scheduler: Scheduler, sequence: Sequence, first: Sequence | None) -> str:
    subject = "It" if first is sequence else "The next request"
    running, rows = scheduler.running, scheduler.limits.max_sequences
    match scheduler.planner.blocked_by:
        case "rows":
            free = scheduler.batch.free_rows
            if not free:
                return f"All {counted(rows, 'row')} of the batch are in use."
            if first is not None and first.group.rows > free:
                return f"{subject} needs {counted(first.group.rows, 'row')} at once, and {free:,} of {rows:,} are free."
            return f"All rows were in use when the last step was planned; {counted(free, 'row')} became free since."
        case "blocks":
            admission = scheduler.admission
            free, kept = scheduler.pool.available, admission.watermark.blocks
            if first is None:
                return f"The KV cache is too full for the next request: {_free_blocks(free, kept)}."
            path = scheduler.memory.prefixes.look_up(first)
            needs = admission.needs(first, path)
            if admission.has_room(first, not running, path):
                return f"{subject} needs {counted(needs, 'KV block')}, which became free since the last step."
            return f"{subject} needs {counted(needs, 'KV block')}: {_free_blocks(free, kept)}."
        case "tokens":
            return f"The last step {_full(scheduler.planner)}, and running requests come first."
        case "gate" if running:
            return f"The batch admits no request until all of it has ended: {len(running):,} still run."
        case "gate":
            return f"The batch starts when it is full: {len(scheduler.waiting):,} of {rows:,} requests wait for it."
    return "Nothing is known to block it: the next step may admit it."


def _full(planner: Planner) -> str:
    if isinstance(planner.budget, LatencyBudget):
        return f"was full: it may take {1000 * planner.budget.target:,.0f} ms by the predicted times of its tokens"
    most = counted(planner.prefill.step_tokens, "token")
    if isinstance(planner.prefill, Whole):
        return f"had no room for a whole prompt: it holds up to {most}"
    return f"was full: it holds up to {most}"


def _free_blocks(free: int, kept: int) -> str:
    return f"{free:,} are free, {min(kept, free):,} of them kept for running requests"
