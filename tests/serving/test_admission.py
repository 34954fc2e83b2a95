"""What is admitted, when refused clients are to try again, and that nothing stays behind."""

from __future__ import annotations

import heapq
import math
from collections import deque
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.errors import SettingsError
from chairlift.serving.admission import Admission, Admitted, Refusal, Refused
from chairlift.serving.drain import Returns
from chairlift.serving.keys import Tenant


def refusal(admission: Admission, *args: Any, **more: Any) -> Refusal:
    with pytest.raises(Refused) as caught:
        admission.admit(*args, **more)
    assert str(caught.value) == caught.value.refusal.message
    return caught.value.refusal


def test_a_ticket_waits_until_its_first_token_and_lives_until_released() -> None:
    admission = Admission(4, 100)
    admitted = admission.admit(None, 10, 5, 0.0, requests=2)
    assert (admission.waiting, admission.waiting_tokens, admission.live) == (2, 10, 2)
    admitted.started(1.0)
    admitted.started(1.0)
    assert (admission.waiting, admission.waiting_tokens, admission.live) == (0, 0, 2)
    admitted.release(2.0)
    admitted.release(2.0)
    admitted.started(3.0)
    assert (admission.waiting, admission.waiting_tokens, admission.live) == (0, 0, 0)


def test_a_ticket_may_be_released_before_it_starts() -> None:
    admission = Admission(4, 100)
    admission.admit(None, 10, 5, 0.0).release(1.0)
    assert (admission.waiting, admission.waiting_tokens, admission.live) == (0, 0, 0)


def test_a_full_queue_refuses_and_knows_nothing_at_first() -> None:
    admission = Admission(2, 100)
    admission.admit(None, 10, 5, 0.0)
    admission.admit(None, 10, 5, 0.0)
    found = refusal(admission, None, 10, 5, 100.0)
    assert (found.reason, found.status) == ("queue_full", 429)
    assert "2 requests are waiting and the server's --max-waiting is 2" in found.message
    assert f"try again in {found.retry_after:.0f} s" in found.message


def test_prompt_tokens_fill_the_queue_too() -> None:
    admission = Admission(10, 100)
    first = admission.admit(None, 60, 5, 0.0)
    found = refusal(admission, None, 41, 5, 0.0)
    assert found.reason == "queue_full"
    assert "60 prompt tokens are waiting and the server's --max-waiting-tokens is 100" in found.message
    admission.admit(None, 40, 5, 0.0)
    first.started(1.0)
    admission.admit(None, 60, 5, 1.0)


def test_a_prompt_beyond_the_bound_enters_when_nobody_waits() -> None:
    admission = Admission(10, 100)
    small = admission.admit(None, 1, 5, 0.0)
    assert refusal(admission, None, 101, 5, 0.0).reason == "queue_full"
    small.started(1.0)
    admission.admit(None, 101, 5, 1.0)
    assert refusal(admission, None, 1, 5, 1.0).reason == "queue_full"


def test_a_body_with_more_in_it_than_its_prompts_counts_by_its_bytes() -> None:
    admission = Admission(10, 1000)
    large = admission.admit(None, 10, 5, 0.0, requests=2, body_bytes=7200)
    assert admission.waiting_tokens == 900
    assert refusal(admission, None, 101, 5, 0.0).reason == "queue_full"
    for admitted in large.split([4, 6]):
        admitted.release(1.0)
    assert (admission.waiting, admission.waiting_tokens, admission.live) == (0, 0, 0)
    admission.admit(None, 1000, 5, 1.0, body_bytes=7999)
    assert admission.waiting_tokens == 1000


# ---- when to try again


def drained(seconds_each: float, departures: int, **more: Any) -> Admission:
    """Four wait, and one leaves every so often; chance makes nothing later."""
    admission = Admission(4, 1000, random=lambda: 0.0, **more)
    admitted = [admission.admit(None, 100, 5, 0.0) for _ in range(4)]
    now = 0.0
    for _ in range(departures):
        now += seconds_each
        admitted.pop(0).release(now)
        admitted.append(admission.admit(None, 100, 5, now))
    return admission


@pytest.mark.parametrize("seconds_each", [0.01, 0.5, 3.0, 7.0, 20.0])
def test_try_again_when_there_will_be_room(seconds_each: float) -> None:
    now = 50 * seconds_each
    told = refusal(drained(seconds_each, 50), None, 100, 5, now).retry_after
    assert math.ceil(seconds_each * 0.6) <= told <= math.ceil(seconds_each * 1.2), "one has to leave"
    two = refusal(drained(seconds_each, 50), None, 100, 5, now, requests=2).retry_after
    assert math.ceil(seconds_each * 1.2) <= two <= math.ceil(seconds_each * 2.4), "two have to"


def test_tokens_may_be_what_there_is_no_room_for() -> None:
    def full() -> Admission:
        admission = Admission(100, 1000, random=lambda: 0.0)
        admitted = [admission.admit(None, 100, 5, 0.0) for _ in range(10)]
        for now in range(1, 61):  # 100 tokens each second
            admitted.pop(0).started(float(now))
            admitted.append(admission.admit(None, 100, 5, float(now)))
        return admission

    assert 4 <= refusal(full(), None, 500, 5, 60.0).retry_after <= 6
    assert 8 <= refusal(full(), None, 5000, 5, 60.0).retry_after <= 12, "all must leave first"


def test_idle_time_is_not_slowness_but_a_queue_that_stands_still_is() -> None:
    admission = Admission(1, 1000, random=lambda: 0.5)
    for now in range(30):
        admission.admit(None, 10, 5, float(now)).started(now + 0.5)
    admission.admit(None, 10, 5, 10_000.0)
    assert refusal(admission, None, 10, 5, 10_000.0).retry_after <= 2
    assert 20 <= refusal(admission, None, 10, 5, 10_020.0).retry_after <= 22
    assert refusal(admission, None, 10, 5, 10_300.0).retry_after == 45
    assert refusal(admission, None, 10, 5, 100_000.0).retry_after == 45


@pytest.mark.parametrize("known", [False, True], ids=["before a rate is known", "at a known rate"])
def test_refused_clients_are_told_to_return_one_after_the_other(known: bool) -> None:
    admission = drained(0.1, 50) if known else Admission(4, 1000)
    for _ in range(0 if known else 4):
        admission.admit(None, 100, 5, 5.0)
    told = [refusal(admission, None, 100, 5, 5.0).retry_after for _ in range(300)]
    first, later = told[:20], told[-20:]
    assert max(first) <= 6 and min(later) > max(first), "it grows with the number refused"
    assert max(told) <= 60, "OpenAI's client does not heed more"
    busiest = max(told.count(seconds) for seconds in set(told))
    assert busiest <= (12 if known else 60), f"{busiest} of 300 return in the same second"


def test_when_there_are_too_many_to_book_they_are_spread_by_chance() -> None:
    admission = drained(5.0, 50)
    admission._returns = Returns(Random(1).random)
    told = [refusal(admission, None, 100, 5, 250.0).retry_after for _ in range(300)][20:]
    assert min(told) >= 30 and max(told) <= 60 and len(set(told)) > 25


# ---- the predicted wait


def test_a_wait_that_is_predicted_to_be_too_long_is_refused_by_its_flag() -> None:
    admission = Admission(1000, 10**6, max_wait=10.0)
    admitted = [admission.admit(None, 10, 5, 0.0) for _ in range(40)]  # nothing is known: all are admitted
    for now in range(1, 21):  # one a second
        admitted.pop(0).started(float(now))
    found = refusal(admission, None, 10, 5, 20.0)  # 20 wait
    assert (found.reason, found.status) == ("long_wait", 429)
    assert "the predicted wait is" in found.message and "the server's --max-wait is 10 s" in found.message
    assert 8 <= found.retry_after <= 15
    for now in range(21, 33):
        admitted.pop(0).started(float(now))
    admission.admit(None, 10, 5, 32.0)  # 8 wait


def test_requests_that_only_wait_for_their_own_prompt_say_nothing_about_the_rate() -> None:
    admission = Admission(10_000, 10**6, max_wait=10.0, is_busy=lambda: False)
    for now in range(100):  # alone in the server, each takes a second for its prompt
        admission.admit(None, 10, 5, float(now)).started(now + 0.99)
    for _ in range(5000):
        admission.admit(None, 10, 5, 100.0)
    assert admission.waiting == 5000


def one_in_five_seconds() -> Admission:
    """A rate is known from 30 requests that left one after the other; then nothing waits."""
    admission = Admission(10_000, 10**6, max_wait=10.0)
    for number, admitted in enumerate([admission.admit(None, 10, 5, 0.0) for _ in range(30)], start=1):
        admitted.started(5.0 * number)
    return admission


def test_a_rate_is_forgotten_when_the_queue_has_long_not_been_busy() -> None:
    soon, late = one_in_five_seconds(), one_in_five_seconds()
    for _ in range(2):
        soon.admit(None, 10, 5, 200.0)
    assert refusal(soon, None, 10, 5, 200.0).reason == "long_wait"
    for _ in range(1000):
        late.admit(None, 10, 5, 250.0)


class Visits:
    """A server that runs in steps: a free seat is taken between two steps, and its first token comes with the next.

    A request has its seat for a number of steps that varies by half; clients may try again.
    """

    def __init__(self, seats: int, steps: int, step: float, max_wait: float, chance: Random) -> None:
        self.admission = Admission(4096, 1 << 20, max_wait, is_busy=lambda: self._is_blocked, random=chance.random)
        self.now = 0.0
        self.waits: list[float] = []
        self.refusals = 0
        self.lost = 0
        self._seats, self._steps, self._step, self._chance = seats, steps, step, chance
        self._queue: deque[tuple[float, Admitted]] = deque()
        self._running: list[tuple[float, Admitted, int]] = []  # when it arrived, and how many steps it has left
        self._is_blocked = False

    def run(self, arrivals: list[float], retries: int = 0) -> None:
        coming = [(at, retries) for at in arrivals]
        heapq.heapify(coming)
        while coming or self._queue or self._running:
            while self._queue and len(self._running) < self._seats:
                steps = round(self._steps * self._chance.uniform(0.5, 1.5))
                self._running.append((*self._queue.popleft(), steps))
            self._is_blocked = bool(self._queue)
            end = self.now + self._step
            while coming and coming[0][0] <= end:
                at, left = heapq.heappop(coming)
                self._arrive(at, left, coming)
            self.now = end
            self._running = [self._advance(*each) for each in self._running]
            self._running = [each for each in self._running if each[2]]

    def _arrive(self, at: float, retries: int, coming: list[tuple[float, int]]) -> None:
        try:
            self._queue.append((at, self.admission.admit(None, 10, 5, at)))
        except Refused as refused:
            self.refusals += 1
            if retries:
                heapq.heappush(coming, (at + refused.refusal.retry_after, retries - 1))
            else:
                self.lost += 1

    def _advance(self, arrived: float, admitted: Admitted, steps: int) -> tuple[float, Admitted, int]:
        if arrived >= 0:  # its first token
            admitted.started(self.now)
            self.waits.append(self.now - arrived)
        if steps == 1:
            admitted.release(self.now)
        return -1.0, admitted, steps - 1


def poisson(rate: float, seconds: float, chance: Random) -> list[float]:
    found, now = [], 0.0
    while (now := now + chance.expovariate(rate)) < seconds:
        found.append(now)
    return found


@pytest.mark.parametrize("capacity", [5.0, 50.0])
@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
def test_500_clients_at_once_are_all_served(capacity: float, is_warm: bool) -> None:
    visits = Visits(10, 20, 0.5 / capacity, 60.0, Random(1))
    if is_warm:  # it has been busy: the rate is known, and for some the wait would be too long
        visits.run([0.0] * 300)
        assert visits.refusals == 0
    visits.run([visits.now + number / 1000 for number in range(500)], retries=2)
    assert visits.lost == 0
    assert visits.refusals == 0 or (is_warm and capacity == 5)


@pytest.mark.parametrize("seats", [1, 8, 64])
@pytest.mark.parametrize("max_wait", [2.0, 10.0])
def test_at_three_times_the_load_admitted_requests_wait_no_longer_than_was_promised(
    max_wait: float, seats: int
) -> None:
    capacity, seconds, chance = 10.0, 300.0, Random(1)
    visits = Visits(seats, 20, seats / capacity / 20, max_wait, chance)
    visits.run(poisson(3 * capacity, seconds, chance))
    steady = visits.waits[int(30 * capacity) :]  # the queue is built before anything is known of its rate
    late = [wait for wait in steady if wait > 1.5 * max_wait]
    assert len(late) < 0.03 * len(steady), f"{len(late)} of {len(steady)}, up to {max(steady)} s"
    assert len(visits.waits) > 0.97 * seconds * capacity, "the server is never idle"


@pytest.mark.parametrize("capacity", [4.0, 10.0])
@pytest.mark.parametrize("seats", [1, 8, 64])
@pytest.mark.parametrize("after_overload", [False, True], ids=["from the start", "after an overload"])
def test_below_capacity_next_to_nothing_is_refused(capacity: float, seats: int, after_overload: bool) -> None:
    chance = Random(1)
    visits = Visits(seats, 20, seats / capacity / 20, 2.0, chance)
    if after_overload:
        visits.run(poisson(3 * capacity, 60.0, chance))
    before, start = visits.refusals, visits.now
    arrivals = [start + at for at in poisson(0.7 * capacity, 600.0, chance)]
    visits.run(arrivals)
    assert visits.refusals - before < 0.01 * len(arrivals), f"{visits.refusals - before} of {len(arrivals)}"


def test_more_requests_in_one_call_than_can_ever_enter_are_no_case_for_trying_again() -> None:
    found = refusal(Admission(4, 100), None, 10, 5, 0.0, requests=5)
    assert (found.reason, found.status, found.retry_after) == ("too_many_requests", 400, 0)
    found = refusal(Admission(10, 100), Tenant("a", max_concurrent=2), 10, 5, 0.0, requests=3)
    assert (found.reason, found.status, found.retry_after) == ("too_many_requests", 400, 0)


def test_a_tenant_has_so_many_requests_at_once() -> None:
    admission = Admission(10, 1000)
    tenant = Tenant("alice", max_concurrent=2)
    first = admission.admit(tenant, 1, 5, 0.0)
    admission.admit(tenant, 1, 5, 0.0)
    first.started(1.0)
    found = refusal(admission, tenant, 1, 5, 1.0)
    assert (found.reason, found.status) == ("tenant_limit", 429)
    assert "alice has 2 requests at once and its max_concurrent is 2" in found.message
    told = [found.retry_after, *(refusal(admission, tenant, 1, 5, 1.0).retry_after for _ in range(100))]
    assert max(told[:3]) <= 4 and max(told) <= 30 and len(set(told)) > 10, "not all at the same time"
    admission.admit(Tenant("bob", max_concurrent=2), 1, 5, 1.0)
    first.release(2.0)
    admission.admit(tenant, 1, 5, 2.0)


def test_a_tenant_in_debt_waits_until_it_is_paid() -> None:
    admission = Admission(100, 100_000)
    tenant = Tenant("alice", tokens_per_minute=600)  # 10 a second
    admission.admit(tenant, 500, 5, 0.0)
    admitted = admission.admit(tenant, 150, 5, 0.0)  # 50 in debt
    found = refusal(admission, tenant, 1, 5, 0.0)
    assert (found.reason, found.status, found.retry_after) == ("tenant_rate", 429, 5)
    admitted.count(100)
    assert refusal(admission, tenant, 1, 5, 0.0).retry_after == 15
    assert refusal(admission, tenant, 1, 5, 14.5).retry_after == 1
    admission.admit(tenant, 1, 5, 15.0)
    admission.admit(Tenant("bob", tokens_per_minute=600), 1, 5, 0.0)


def test_a_full_bucket_admits_anything_once_and_holds_a_minute_at_most() -> None:
    admission = Admission(100, 1_000_000)
    tenant = Tenant("alice", tokens_per_minute=60)
    admitted = admission.admit(tenant, 6000, 5, 1000.0)
    assert refusal(admission, tenant, 1, 5, 1000.0).retry_after == 5940
    admitted.release(1000.0)
    much_later = 1e6
    admission.admit(tenant, 90, 5, much_later)
    assert refusal(admission, tenant, 1, 5, much_later).retry_after == 30


def test_output_long_after_admission_is_charged_at_its_own_time() -> None:
    admission = Admission(100, 1_000_000)
    tenant = Tenant("alice", tokens_per_minute=60)
    admitted = admission.admit(tenant, 10, 5, 0.0)
    admitted.started(600.0)  # the bucket is full again
    admitted.count(90)
    assert refusal(admission, tenant, 1, 5, 600.0).retry_after == 30


def test_the_refused_pay_nothing() -> None:
    admission = Admission(1, 100)
    tenant = Tenant("alice", max_concurrent=5, tokens_per_minute=60)
    admitted = admission.admit(tenant, 30, 5, 0.0)
    for _ in range(10):
        assert refusal(admission, tenant, 30, 5, 0.0).reason == "queue_full"
    admitted.started(0.0)
    admission.admit(tenant, 30, 5, 0.0)


def test_bounds_that_let_nobody_in_are_refused() -> None:
    with pytest.raises(SettingsError, match="max_waiting is 0"):
        Admission(0, 1)
    with pytest.raises(SettingsError, match="max_waiting_tokens is 0"):
        Admission(1, 0)
    with pytest.raises(SettingsError, match=r"max_wait is 0"):
        Admission(1, 1, 0.0)


TENANTS = [None, Tenant("a", max_concurrent=3), Tenant("b", tokens_per_minute=600), Tenant("c")]
MOVES = st.tuples(
    st.sampled_from(["admit", "admit", "start", "count", "release", "release"]),
    st.integers(0, 50),  # which of the admitted
    st.integers(0, 300),  # tokens
    st.integers(1, 3),  # requests
    st.sampled_from(TENANTS),
    st.floats(-1, 40),  # time may seem to stand still or go back, where callers race
)


@given(st.lists(MOVES, max_size=80), st.integers(1, 6), st.integers(1, 1000), st.sampled_from([0.5, 20.0, math.inf]))
@settings(max_examples=300)
def test_nothing_leaks_and_no_bound_is_passed(
    moves: list[Any], max_waiting: int, max_tokens: int, max_wait: float
) -> None:
    admission = Admission(max_waiting, max_tokens, max_wait)
    admitted: list[Admitted] = []
    started: set[int] = set()
    released: set[int] = set()
    now = 0.0
    for move, which, tokens, requests, tenant, later in moves:
        now += later
        if move == "admit":
            before = (admission.waiting, admission.waiting_tokens, admission.live)
            try:
                admitted.append(admission.admit(tenant, tokens, 5, now, requests=requests))
            except Refused as refused:
                assert before == (admission.waiting, admission.waiting_tokens, admission.live)
                assert refused.refusal.retry_after == math.ceil(refused.refusal.retry_after)
                if refused.refusal.reason in ("queue_full", "long_wait"):
                    assert before[0] > 0 and 1 <= refused.refusal.retry_after <= 60
        elif admitted:
            index = which % len(admitted)
            one = admitted[index]
            if move == "start":
                one.started(now)
                started.add(index)
            elif move == "count":
                one.count(tokens)
            else:
                one.release(now)
                released.add(index)
        live = [index for index in range(len(admitted)) if index not in released]
        waiting = [admitted[index] for index in live if index not in started]
        assert admission.live == sum(admitted[index].requests for index in live)
        assert admission.waiting == sum(each.requests for each in waiting) <= max_waiting
        assert admission.waiting_tokens == sum(each.tokens for each in waiting)
        assert admission.waiting_tokens <= max_tokens or any(each.tokens > max_tokens for each in waiting)
        assert sum(admitted[index].requests for index in live if admitted[index].tenant == TENANTS[1]) <= 3
    for each in admitted:
        each.release(now)
    assert admission.waiting == admission.waiting_tokens == admission.live == 0
    for _ in range(3):
        admission.admit(TENANTS[1], 0, 5, now).started(now)  # all three of its places are free again
