"""A failed pass leaves garbage in the KV cache: no later request may find it, whoever was planned before it was known.

In the overlapped loop pass N+1 is planned and submitted before N is collected. What N+1 does with what N should have
written, in the same block, in host memory or behind it in the tree, is lost with N.
"""

from __future__ import annotations

import pytest
from device import FakeExecutor
from fakes import VOCAB, ManualClock, answer_to
from test_properties import quiet_engine

from chairlift.core.blocks import BlockPool
from chairlift.core.limits import Limits
from chairlift.core.params import SamplingParams
from chairlift.core.policy import Lane, Policy
from chairlift.core.preemption import Swap
from chairlift.core.prefix_cache import PrefixCache
from chairlift.core.request import Request, Sequence
from chairlift.core.scheduler import Scheduler
from chairlift.engine.engine import Engine

__all__ = ["quiet_engine"]  # a fixture that all tests here use


class Thrash(Policy):
    """Any sequence is preempted for any that waits, until it has been preempted too often."""

    is_preemptive = True

    def lane(self, sequence: Sequence, now: float) -> Lane:
        return sequence.request.id

    def victim_for(self, newcomer: Sequence, running: list[Sequence]) -> Sequence | None:
        return running[-1] if running else None


def made(step_tokens: int, *, policy: Policy | None = None, caches: bool = True) -> tuple[Engine, FakeExecutor]:
    pool, host = BlockPool(8, 4), BlockPool(16, 4)
    cache = PrefixCache(pool) if caches else None
    limits = Limits(1, step_tokens, 32, VOCAB)
    scheduler = Scheduler(limits, pool, policy=policy, preemption=Swap(host), prefix_cache=cache)
    executor = FakeExecutor(1, pool.total, 4, 32, host.total)
    return Engine(scheduler, executor, ManualClock(), overlap=True), executor


def ask(engine: Engine, name: str, prompt: list[int], answer: int = 2) -> Request:
    request = Request(name, prompt, SamplingParams(max_tokens=answer, ignore_eos=True))
    engine.submit(request)
    return request


def finish(engine: Engine) -> dict[str, list[int]]:
    """Step until nothing is left; the tokens that came for each request."""
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            if event.token is not None:
                found.setdefault(event.sequence.request.id, []).append(event.token)
        engine.scheduler.check()
    return found


def test_a_block_that_a_failed_pass_began_and_the_next_one_filled_is_not_found() -> None:
    engine, executor = made(step_tokens=2)
    prompt = [1, 2, 3, 4, 5, 6]
    ask(engine, "fails", prompt)
    executor.breaks_at_collect = True
    engine.step()  # computes half of the first block: garbage
    engine.step()  # fills the block, and only then learns of the failure
    assert engine.scheduler.counters.failed == 1
    assert finish(engine) == {}
    later = ask(engine, "later", prompt)
    assert finish(engine) == {"later": answer_to(later, 0, 8)[0]}
    assert engine.scheduler.counters.cached_tokens == 0


@pytest.mark.parametrize("caches", [False, True], ids=["no cache", "cache"])
def test_a_sequence_that_was_restored_from_what_a_failed_pass_was_to_save_fails_with_it(caches: bool) -> None:
    engine, executor = made(step_tokens=32, policy=Thrash(), caches=caches)
    ask(engine, "first", [1, 2, 3, 4, 5], answer=8)
    engine.step()
    engine.step()
    ask(engine, "second", [6] * 29, answer=2)  # takes all blocks, those in the prefix cache too
    executor.breaks_at_collect = True
    engine.step()  # saves the first sequence's blocks: garbage
    engine.step()  # restores them, and only then learns of the failure
    assert (executor.swapped, engine.scheduler.counters.failed) == (2, 2)
    assert finish(engine) == {}
    later = ask(engine, "later", [1, 2, 3, 4, 5])
    assert finish(engine) == {"later": answer_to(later, 0, 7)[0]}
