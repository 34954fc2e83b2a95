"""Why a request waits, or how far it has come: read from the scheduler, which stays as it was.

Nothing here calls what may move anything, such as the queue's `peek`, a policy's `choose` or a lookup that keeps what
it finds: a question must not change what happens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chairlift.core.policies import POLICIES, Deadline, Fair, LongestPrefix, MultiBin, Priority, ShortestFirst
from chairlift.core.policy import Lane, Policy
from chairlift.core.request import Phase, Request, Sequence
from chairlift.core.scheduler import Scheduler
from chairlift.core.words import counted

MOST = 16  # answers of a request that are described


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one answer is, in numbers and in words."""

    tenant: str
    index: int  # which of the request's n answers
    state: str  # waiting or running
    ahead: int | None  # how many go before it in its lane; None when it runs
    lanes: int  # in which somebody waits
    waiting: int  # in all lanes
    blocked_by: str  # what keeps the first in line out, as the scheduler calls it
    prompt_tokens: int
    computed_tokens: int
    generated_tokens: int
    preemptions: int
    seconds: float  # since it came
    why: list[str]  # sentences


Lanes = dict[Lane, list[Sequence]]


def explain(scheduler: Scheduler, is_asked: Callable[[Request], bool], now: float) -> tuple[list[Standing], int]:
    """The answers under way of the requests that are asked about, the oldest first, and how many there are in all."""
    found = [each for each in (*scheduler.running, *scheduler.waiting) if is_asked(each.request)]
    found.sort(key=lambda each: (each.order, each.index))
    lanes: Lanes = {}
    for each in scheduler.waiting if found else ():
        lanes.setdefault(scheduler.policy.lane(each, now), []).append(each)
    return [_describe(scheduler, lanes, each, now) for each in found[:MOST]], len(found)


def _describe(scheduler: Scheduler, lanes: Lanes, sequence: Sequence, now: float) -> Standing:
    is_waiting = sequence.phase is Phase.WAITING
    ahead = None
    if is_waiting:
        own = lanes[scheduler.policy.lane(sequence, now)]
        ahead = sum(each.rank < sequence.rank for each in own)
        # Whose turn it is among several lanes, only the policy's own `choose` could tell.
        first = min(own, key=lambda each: each.rank) if len(lanes) == 1 else None
        why = [
            _place(ahead, len(own), len(lanes), len(scheduler.waiting)),
            _obstacle(scheduler, sequence, first),
            f"Policy {_name(scheduler.policy)}: {_order(scheduler, sequence, now)}.",
        ]
    else:
        why = [_progress(sequence)]
    if sequence.preemptions:
        why.append(f"It had to yield to others {counted(sequence.preemptions, 'time')}, and kept its place.")
    seconds = now - sequence.request.arrival
    why.append(f"It came {seconds:.2f} s ago, with a prompt of {counted(sequence.prompt_length, 'token')}.")
    return Standing(
        tenant=sequence.request.tenant,
        index=sequence.index,
        state="waiting" if is_waiting else "running",
        ahead=ahead,
        lanes=len(lanes),
        waiting=len(scheduler.waiting),
        blocked_by=scheduler.blocked_by if is_waiting else "",
        prompt_tokens=sequence.prompt_length,
        computed_tokens=sequence.computed,
        generated_tokens=len(sequence.output),
        preemptions=sequence.preemptions,
        seconds=round(seconds, 3),
        why=why,
    )


def _progress(sequence: Sequence) -> str:
    known, came = len(sequence.tokens), len(sequence.output)
    if not came or known - sequence.computed > 1:
        again = " again" if came else ""
        return f"It runs: {sequence.computed:,} of {counted(known, 'token')} are computed{again}."
    most = sequence.limit - sequence.prompt_length
    return f"It runs: {counted(came, 'token')} of its answer came so far, and {most:,} may come at most."


def _place(ahead: int, in_lane: int, lanes: int, waiting: int) -> str:
    if lanes > 1:
        where = f"is behind {ahead:,}" if ahead else "is first"
        all_wait = f"{waiting:,} wait in {lanes} lanes that take turns"
        return f"It waits: it {where} of the {in_lane:,} in its lane, and {all_wait}."
    where = f"{counted(ahead, 'other')} {'goes' if ahead == 1 else 'go'} before it" if ahead else "it goes next"
    return f"It waits: {where}, and {counted(waiting, 'request')} {'waits' if waiting == 1 else 'wait'} in all."


# ---- what keeps the first in line out


def _obstacle(scheduler: Scheduler, sequence: Sequence, first: Sequence | None) -> str:
    who = "It" if first is sequence else "The first in line"
    running, seats = scheduler.running, scheduler.limits.max_sequences
    match scheduler.blocked_by:
        case "seats":
            free = seats - sum(each.seats for each in running)
            if not free:
                return f"All {counted(seats, 'seat')} are taken."
            if first is not None and first.seats > free:
                return f"{who} needs {counted(first.seats, 'seat')} at once, and {free:,} of {seats:,} are free."
            return (
                f"All seats were taken when the last step was planned, and {counted(free, 'seat')} became free since."
            )
        case "blocks":
            memory = scheduler.memory
            free, kept = scheduler.pool.available, memory.watermark.blocks
            if first is None:
                return f"The KV cache is too full for whose turn it is: {_free_blocks(free, kept)}."
            path = memory.look_up(first)
            needs = memory.needs(first, path)
            if memory.has_room(first, not running, path):
                return f"{who} needs {counted(needs, 'block')} of the KV cache, which became free since the last step."
            return f"{who} needs {counted(needs, 'block')} of the KV cache: {_free_blocks(free, kept)}."
        case "tokens":
            most = scheduler.prefill.step_tokens
            return f"The last step was full: it holds up to {counted(most, 'token')}, and those who run come first."
        case "gate" if running:
            return f"The batch is closed until all of it is done: {len(running):,} still run."
        case "gate":
            return f"The batch waits to be full: {len(scheduler.waiting):,} of {seats:,} are here."
    return "Nothing is known to be in its way: the next step decides."


def _free_blocks(free: int, kept: int) -> str:
    return f"{free:,} are free, {min(kept, free):,} of them kept for those who run"


# ---- how its policy orders it


def _order(scheduler: Scheduler, sequence: Sequence, now: float) -> str:
    return _ORDERS.get(type(scheduler.policy), _by_arrival)(scheduler, sequence, now)


def _by_arrival(scheduler: Scheduler, sequence: Sequence, now: float) -> str:
    return "who came first goes first"


def _by_priority(scheduler: Scheduler, sequence: Sequence, now: float) -> str:
    return f"its priority is {sequence.request.priority}; higher goes first, and of equals who came first"


def _by_length(scheduler: Scheduler, sequence: Sequence, now: float) -> str:
    if not scheduler.predictor.is_trusted:
        return "predicted lengths were worse than chance of late, so who came first goes first"
    return f"its answer is predicted to have {counted(sequence.expected, 'token')}; the shortest goes first"


def _by_bin(scheduler: Scheduler, sequence: Sequence, now: float) -> str:
    return (
        f"its answer is predicted to have {counted(sequence.expected, 'token')}; it waits with those of similar "
        "length, in order of arrival"
    )


def _by_service(scheduler: Scheduler, sequence: Sequence, now: float) -> str:
    assert isinstance(scheduler.policy, Fair)
    service, request = scheduler.policy.service, sequence.request
    own, least = service[request.tenant], min(service[each.request.tenant] for each in scheduler.waiting)
    others = f"and another who waits {least:,.0f}" if least < own else "no more than anybody who waits"
    return (
        f"its tenant, with weight {request.weight:g}, was served {counted(round(own), 'token')}, {others}; "
        "who was served least goes next"
    )


def _by_deadline(scheduler: Scheduler, sequence: Sequence, now: float) -> str:
    deadline = sequence.request.deadline
    aside = "it stands aside, and gets every eighth turn"
    if deadline is None:
        return f"it has no deadline; {aside}"
    if now > deadline:
        return f"its first token was due {now - deadline:.2f} s ago; {aside}"
    due = f"its first token is due in {deadline - now:.2f} s"
    if scheduler.policy.lane(sequence, now):
        return f"{due}, too soon for its prompt; {aside}"
    return f"{due}; the earliest goes first"


def _by_prefix(scheduler: Scheduler, sequence: Sequence, now: float) -> str:
    found = scheduler.memory.known(sequence, scheduler.memory.look_up(sequence))
    return (
        f"{counted(found, 'token')} of it {'is' if found == 1 else 'are'} in the prefix cache; who has most goes first"
    )


_ORDERS: dict[type[Policy], Callable[[Scheduler, Sequence, float], str]] = {
    Priority: _by_priority,
    ShortestFirst: _by_length,
    MultiBin: _by_bin,
    Fair: _by_service,
    Deadline: _by_deadline,
    LongestPrefix: _by_prefix,
}


def _name(policy: Policy) -> str:
    return next((name for name, kind in POLICIES.items() if type(policy) is kind), "fcfs")
