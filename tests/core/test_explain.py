"""What the scheduler says of a request, in each way it can wait; and that asking changes nothing."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from fakes import VOCAB, drafts_of

from chairlift.core.assemble import assemble_scheduler
from chairlift.core.blocks import BlockPool
from chairlift.core.cost import Cost
from chairlift.core.explain import MOST, Standing, explain
from chairlift.core.limits import Limits
from chairlift.core.params import SamplingParams
from chairlift.core.plan import StepPlan
from chairlift.core.policies import POLICIES
from chairlift.core.predictor import ScoredPredictor
from chairlift.core.prefix_cache import PrefixCache
from chairlift.core.request import Request
from chairlift.core.scheduler import Scheduler
from chairlift.core.settings import SchedulingSettings
from chairlift.core.step import StepResult
from mostly_long import mostly_long

BLOCK = 4


def scheduler(
    seats: int = 2, blocks: int = 64, step_tokens: int = 64, *, caches: bool = False, **chosen: Any
) -> Scheduler:
    limits = Limits(seats, step_tokens, max_length=32, vocab_size=VOCAB)
    pools = BlockPool(blocks, BLOCK), BlockPool(blocks, BLOCK)
    cache = PrefixCache(*pools[:1]) if caches else None
    return assemble_scheduler(SchedulingSettings(**chosen), limits, *pools, Cost(), cache)


def ask(found: Scheduler, name: str, prompt: int = 4, answer: int = 8, n: int = 1, **more: Any) -> None:
    found.submit(Request(name, [1] * prompt, SamplingParams(max_tokens=answer, n=n, ignore_eos=True), **more))


def step(found: Scheduler, now: float = 0.0) -> StepPlan:
    plan = found.plan(now)
    found.apply(plan, StepResult([2] * len(plan.samples)))
    return plan


def standing(found: Scheduler, name: str, now: float = 0.0) -> Standing:
    [only], count = explain(found, lambda request: request.id == name, now)
    assert count == 1
    return only


def words(found: Scheduler, name: str, now: float = 0.0) -> str:
    return " ".join(standing(found, name, now).why)


def test_nobody_knows_of_a_request_that_is_not_there() -> None:
    found = scheduler()
    ask(found, "a", answer=1)
    assert explain(found, lambda request: request.id == "b", 0.0) == ([], 0)
    step(found)
    assert explain(found, lambda request: True, 0.0) == ([], 0), "it has ended"


def test_one_that_no_step_has_seen_goes_next() -> None:
    found = scheduler()
    ask(found, "a", arrival=1.0)
    told = standing(found, "a", now=1.5)
    assert (told.state, told.ahead, told.waiting, told.lanes, told.blocked_by) == ("waiting", 0, 1, 1, "")
    assert told.seconds == 0.5
    assert told.why == [
        "It waits: it is next, and 1 request waits in all.",
        "Nothing is known to block it: the next step may admit it.",
        "Policy fcfs: requests are admitted in order of arrival.",
        "It arrived 0.50 s ago, with a prompt of 4 tokens.",
    ]


def test_one_that_runs_says_how_far_it_has_come() -> None:
    found = scheduler(step_tokens=8)
    ask(found, "a", prompt=20, answer=3)
    step(found)
    assert "It runs: 8 of 20 tokens are computed." in words(found, "a")
    step(found)
    step(found)
    step(found)
    told = standing(found, "a")
    assert (told.state, told.ahead, told.blocked_by) == ("running", None, "")
    assert (told.prompt_tokens, told.computed_tokens, told.generated_tokens) == (20, 21, 2)
    assert told.why[0] == "It runs: its answer has 2 tokens so far, of 3 at most."


def test_one_that_waits_for_a_seat_says_who_goes_before_it() -> None:
    found = scheduler()
    for name in "abcde":
        ask(found, name)
    step(found)
    assert [standing(found, name).ahead for name in "cde"] == [0, 1, 2]
    assert standing(found, "e").blocked_by == "rows"
    assert "It waits: 1 request is before it, and 3 requests wait in all. All 2 rows of the batch are in use." in words(
        found, "d"
    )
    found.abort("a")
    assert "All rows were in use when the last step was planned; 1 row became free since." in words(found, "d")


def test_siblings_that_wait_count_as_one_request() -> None:
    found = scheduler(policy="priority", preemption="recompute")
    ask(found, "a", n=2)
    step(found)
    ask(found, "first", n=2, priority=1)
    ask(found, "last")
    step(found)
    told, count = explain(found, lambda request: request.id == "a", 0.0)
    assert (count, [(each.ahead, each.waiting) for each in told]) == (2, [(0, 2), (0, 2)])
    assert "It waits: 1 request is before it, and 2 requests wait in all." in words(found, "last")


def test_one_that_needs_several_seats_says_how_many() -> None:
    found = scheduler(seats=4)
    ask(found, "a", n=2)
    ask(found, "b", n=3)
    step(found)
    assert "It needs 3 rows at once, and 2 of 4 are free." in words(found, "b")
    ask(found, "c")
    assert "The next request needs 3 rows at once" in words(found, "c")
    told, count = explain(found, lambda request: request.id == "a", 0.0)
    assert [each.index for each in told] == [0, 1] and count == 2, "each of its answers has its own"


def test_no_more_answers_are_described_than_anybody_reads() -> None:
    found = scheduler(seats=20)
    ask(found, "a", n=20)
    step(found)
    told, count = explain(found, lambda request: True, 0.0)
    assert (len(told), count) == (MOST, 20)


def test_one_that_waits_for_memory_says_how_much_it_needs_and_how_much_there_is() -> None:
    found = scheduler(blocks=8)
    ask(found, "a", prompt=20, answer=4)
    ask(found, "b", prompt=12)
    ask(found, "c")
    step(found)
    assert "It needs 3 KV blocks: 3 are free, 1 of them kept for running requests." in words(found, "b")
    assert "The next request needs 3 KV blocks" in words(found, "c")
    assert standing(found, "c").blocked_by == "blocks"
    found.abort("a")
    assert "It needs 3 KV blocks, which became free since the last step." in words(found, "b")


def test_one_that_had_to_yield_says_so() -> None:
    found = scheduler(blocks=8)
    ask(found, "a", prompt=8, answer=20)
    ask(found, "b", prompt=8, answer=20)
    while not step(found).preempted:
        pass
    told = standing(found, "b")
    assert (told.state, told.preemptions) == ("waiting", 1)
    assert told.generated_tokens and not told.computed_tokens
    assert "It was preempted 1 time, and kept its place in the queue." in told.why
    found.abort("a")
    step(found)
    assert "at most. It was preempted" in words(found, "b"), "it runs again, and all is computed"


def test_one_that_waits_for_tokens_says_how_many_a_step_holds() -> None:
    found = scheduler(step_tokens=8)
    ask(found, "a", prompt=20)
    ask(found, "b")
    step(found)
    assert "The last step was full: it holds up to 8 tokens, and running requests come first." in words(found, "b")
    assert standing(found, "b").blocked_by == "tokens"


def test_one_that_waits_for_tokens_of_a_latency_target_says_so() -> None:
    found = scheduler(step_tokens=64, target_tpot=0.0015)
    ask(found, "a", prompt=20)
    ask(found, "b")
    step(found)
    assert standing(found, "b").blocked_by == "tokens"
    said = "The last step was full: it may take 2 ms by the predicted times of its tokens, and running requests"
    assert said in words(found, "b")


def test_a_whole_prompt_that_waits_for_tokens_says_that_it_needs_them_together() -> None:
    found = scheduler(step_tokens=34, prefill="whole")
    ask(found, "a", prompt=20)
    ask(found, "b", prompt=20)
    assert step(found).tokens == 20
    said = "The last step had no room for a whole prompt: it holds up to 34 tokens, and running requests come first."
    assert said in words(found, "b")


def test_drafts_in_flight_are_not_counted_as_computed() -> None:
    found = scheduler(step_tokens=8)
    ask(found, "a", prompt=9)
    found.planner.speculation = drafts_of([1] * 8)
    step(found)
    assert found.plan(0.0).drafts, "behind the prompt's last token"
    assert "It runs: 9 of 9 tokens are computed." in words(found, "a")


def test_one_that_waits_for_a_batch_says_what_the_batch_waits_for() -> None:
    found = scheduler(seats=3, batching="dynamic", batch_window=1.0)
    ask(found, "a", arrival=0.0)
    ask(found, "b", arrival=0.0)
    step(found, now=0.5)
    assert "The batch starts when it is full: 2 of 3 requests wait for it." in words(found, "a", 0.5)
    step(found, now=1.5)
    ask(found, "c", arrival=1.5)
    step(found, now=1.5)
    assert "The batch admits no request until all of it has ended: 2 still run." in words(found, "c", 1.5)
    assert standing(found, "c").blocked_by == "gate"


# ---- how each policy orders it


def test_priority_tells_the_priority() -> None:
    found = scheduler(seats=1, policy="priority")
    for name, priority in (("a", 9), ("low", -1), ("high", 5)):
        ask(found, name, priority=priority)
    step(found)
    assert (standing(found, "high").ahead, standing(found, "low").ahead) == (0, 1)
    assert "Policy priority: its priority is -1; higher priorities are admitted first, then by arrival." in words(
        found, "low"
    )


def test_shortest_first_tells_the_prediction_and_whether_it_is_trusted() -> None:
    found = scheduler(seats=1, policy="sjf", predictor="max_tokens")
    ask(found, "a")
    step(found)
    for name, answer in (("long", 20), ("short", 1)):
        ask(found, name, answer=answer)
    assert (standing(found, "short").ahead, standing(found, "long").ahead) == (0, 1)
    said = "Policy sjf: its answer is predicted to have {}; the shortest is admitted first."
    assert said.format("20 tokens") in words(found, "long")
    assert said.format("1 token") in words(found, "short")
    assert isinstance(found.predictor, ScoredPredictor)
    found.predictor.is_trusted = False
    assert "predicted lengths have been worse than chance, so requests are admitted in order of arrival" in words(
        found, "long"
    )


def test_bins_tell_the_prediction_and_count_only_their_own() -> None:
    found = scheduler(seats=1, policy="multibin", predictor="max_tokens")
    for name, answer in (("a", 4), ("long", 20), ("b", 2), ("c", 2)):
        ask(found, name, answer=answer)
    step(found)
    assert standing(found, "long").ahead == 0
    assert standing(found, "c").ahead == 1
    assert "It waits: it is behind 1 of the 2 in its lane, and 3 wait in 2 lanes." in words(found, "c")
    assert "It waits: it is first of the 1 in its lane" in words(found, "long")
    assert "its answer is predicted to have 2 tokens; it waits in the bin of similar lengths" in words(found, "c")


def test_fair_tells_what_a_tenant_was_served_and_nobody_s_name() -> None:
    found = scheduler(seats=2, blocks=16, policy="fair", predictor="max_tokens")
    for number in range(3):
        ask(found, f"a{number}", tenant="alice", weight=2.0)
    step(found)
    ask(found, "b0", prompt=4, tenant="bob", n=2)
    step(found)
    said = "Policy fair: its tenant, with weight {}, was served {} tokens and {}; the tenant served least is admitted"
    assert said.format(2, 20, "no waiting tenant fewer") in words(found, "a2")
    assert "alice" not in words(found, "b0") + words(found, "a2")
    assert standing(found, "b0").tenant == "bob"


def test_fair_tells_that_another_was_served_less() -> None:
    found = scheduler(seats=1, policy="fair", predictor="max_tokens")
    ask(found, "a0", tenant="alice", weight=1000.0, prompt=20)
    step(found)
    ask(found, "b0", tenant="bob")
    ask(found, "a1", tenant="alice", weight=1000.0)
    assert found.policy.service["alice"] == found.policy.service["bob"]  # type: ignore[attr-defined]
    found.policy.service["bob"] = 17.0  # type: ignore[attr-defined]
    assert "was served 17 tokens and another waiting tenant 0; the tenant served least" in words(found, "b0")


def test_a_deadline_is_told_in_seconds_from_now() -> None:
    found = scheduler(seats=1, policy="deadline")
    ask(found, "a")
    step(found)
    for name, deadline in (("never", None), ("late", 1.0), ("soon", 2.01), ("later", 3.0), ("first", 2.5)):
        ask(found, name, prompt=20 if name == "soon" else 4, deadline=deadline)
    now = 2.0085
    aside = "it waits in the second lane, from which every eighth request is admitted"
    assert f"Policy deadline: it has no deadline; {aside}." in words(found, "never", now)
    assert f"its first token was due 1.01 s ago; {aside}." in words(found, "late", now)
    assert f"its first token is due in 0.00 s, too soon for its prompt; {aside}." in words(found, "soon", now)
    assert "its first token is due in 0.99 s; the earliest deadline is admitted first." in words(found, "later", now)
    assert (standing(found, "first", now).ahead, standing(found, "later", now).ahead) == (0, 1)


# ---- asking changes nothing


def cached(found: Scheduler) -> list[Any]:
    """All that the prefix cache knows, and all that was looked up in it."""
    cache = found.memory.prefix_cache
    nodes = [] if cache is None else [None if node is None else (node.chunk, node.passes) for node in cache._nodes]
    sequences = sorted([*found.running, *found.waiting], key=lambda each: (each.order, each.index))
    paths = [(each.prefix.key, [node.block for node in each.prefix.path], each.prefix.kept) for each in sequences]
    return [nodes, paths, found.memory.prefixes.has_new_tokens, found.pool.free, found.pool.cached]


def history(policy: str, batching: str, caches: bool, asks: bool) -> list[Any]:
    """What a small busy world does, step by step."""
    chance, seen = Random(7), []
    found = scheduler(blocks=10, policy=policy, batching=batching, preemption="swap", caches=caches)
    for number in range(300):
        now = 0.01 * number
        for _ in range(chance.randint(0, 1)):
            shape = {"prompt": chance.randint(1, 20), "answer": chance.randint(1, 9), "n": chance.randint(1, 2)}
            terms = {"tenant": chance.choice("abc"), "priority": chance.randint(0, 3)}
            deadline = chance.choice((None, now + 0.1))
            ask(found, f"{number}.{len(seen)}", arrival=now, deadline=deadline, **shape, **terms)
        if asks:
            before = cached(found)
            told, count = explain(found, lambda request: True, now)
            assert len(told) == min(count, MOST)
            assert cached(found) == before
        plan = step(found, now)
        seen.append([(piece.sequence.request.id, piece.start, piece.count) for piece in plan.slices])
        found.check()
    return seen


@pytest.mark.parametrize("batching", mostly_long(["continuous", "dynamic"]))
@pytest.mark.parametrize("caches", mostly_long([True, False]), ids=["cached", "plain"])
@pytest.mark.parametrize("policy", POLICIES)
def test_that_somebody_asks_changes_nothing(policy: str, caches: bool, batching: str) -> None:
    assert history(policy, batching, caches, asks=True) == history(policy, batching, caches, asks=False)
