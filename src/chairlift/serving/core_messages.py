"""Messages made from the core's objects, and requests made from messages."""

from __future__ import annotations

import msgspec

from chairlift.core.constraint import Constraint
from chairlift.core.drafting import MAX_DRAFTS
from chairlift.core.plan import Event
from chairlift.core.request import Request
from chairlift.core.step import TokenLogprobs
from chairlift.engine.engine import Engine
from chairlift.serving import messages
from chairlift.serving.messages import AnswerUpdate, PromptScores, SampledLogprob, Stats, Submit


def address_of(request: Request) -> tuple[int, int]:
    """Return the number of the request's HTTP process and its key there, from its id in the engine."""
    number, key, _ = request.id.split(".", 2)
    return int(number), int(key)


def as_request(name: str, order: Submit, constraint: Constraint | None = None) -> Request:
    """Convert an order to a core request."""
    return Request(
        id=name,
        prompt=order.prompt,
        params=order.params,
        arrival=order.arrival,
        seed=order.seed,
        eos_ids=frozenset(order.eos_ids),
        bad_words=tuple(map(tuple, order.bad_words)),
        tenant=order.tenant,
        weight=order.weight,
        priority=order.priority,
        deadline=order.deadline,
        salt=order.salt,
        endpoint=order.endpoint,
        constraint=constraint,
        prediction=tuple(order.prediction),
        prefilled=order.prefilled,
    )


def _reason(event: Event) -> str | None:
    if event.is_request_error:
        return messages.REFUSED
    return None if event.finish_reason is None else event.finish_reason.value


def as_update(key: int, event: Event) -> AnswerUpdate:
    """Convert a core event to an update message."""
    sequence = event.sequence
    # A step may bring several tokens, each with an update, and a beam search has all its tokens before it reports the
    # first: so all updates that may be the first say when it was admitted.
    is_first = len(sequence.tokens) <= sequence.prompt_length + 1 + MAX_DRAFTS or sequence.is_search
    return AnswerUpdate(
        key,
        sequence.index,
        event.token,
        _reason(event),
        sequence.started if is_first else None,
        sequence.cached if is_first else 0,
        None if event.logprobs is None else _scored(event.logprobs),
        None
        if event.prompt_logprobs is None
        else PromptScores(event.prompt_logprobs.start, msgspec.Raw(messages.encode(event.prompt_logprobs.entries))),
        event.error,
        (sequence.drafted, sequence.accepted) if sequence.drafted else None,
    )


def _scored(entry: TokenLogprobs) -> SampledLogprob:
    return SampledLogprob(entry.token, entry.logprob, entry.rank, msgspec.Raw(messages.encode(entry.top)))


def stats_of(engine: Engine, took: float, swapped: tuple[int, int], sent_blocks: int) -> Stats:
    """Return the engine's counts after a step that took so many seconds; `swapped` are blocks out and in so far."""
    scheduler = engine.scheduler
    count, pool, memory = scheduler.counters, scheduler.pool, scheduler.memory
    cache = memory.prefix_cache
    from_host, from_disk = (*(cache.returns if cache is not None else []), 0, 0)[:2]
    speculation = scheduler.planner.speculation
    drafts = None if speculation is None else speculation.counts
    return Stats(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        free_blocks=pool.free,
        total_blocks=pool.total,
        submitted=count.submitted,
        finished=count.finished,
        aborted=count.aborted,
        rejected=count.rejected,
        failed=count.failed,
        preemptions=count.preemptions,
        step_seconds=took,
        step_tokens=engine.last_tokens if took else 0,
        blocked_by=scheduler.planner.blocked_by,
        swapped_out=swapped[0],
        swapped_in=swapped[1],
        cached_blocks=pool.cached,
        queried_tokens=0 if cache is None else count.prompt_tokens,
        cached_tokens=count.cached_tokens,
        evicted_blocks=0 if cache is None else cache.evictions,
        copied_blocks=memory.copied,
        from_host=from_host,
        from_disk=from_disk,
        sent_blocks=sent_blocks,
        received_blocks=memory.prefixes.exchange.taken,
        checks=0 if drafts is None else drafts.checks,
        drafted=() if drafts is None else tuple(drafts.drafted),
        accepted=() if drafts is None else tuple(drafts.accepted),
        correlation=scheduler.predictor.correlation,
        # One entry per tenant with requests. A copy, because these stats are compared with the next.
        service=scheduler.policy.service_of_tenants(),
        policy=scheduler.policy.stats(),
    )
