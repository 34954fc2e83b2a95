"""Who may enter, when the others may come again, and that nothing stays behind."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.errors import SettingsError
from chairlift.serving.admission import Admission, Refusal, Refused, Ticket
from chairlift.serving.keys import Tenant


def refusal(admission: Admission, *args: Any, **more: Any) -> Refusal:
    with pytest.raises(Refused) as caught:
        admission.admit(*args, **more)
    assert str(caught.value) == caught.value.refusal.message
    return caught.value.refusal


def test_a_ticket_waits_until_its_first_token_and_lives_until_released() -> None:
    admission = Admission(4, 100)
    ticket = admission.admit(None, 10, 5, 0.0, requests=2)
    assert (admission.waiting, admission.waiting_tokens, admission.live) == (2, 10, 2)
    ticket.started(1.0)
    ticket.started(1.0)
    assert (admission.waiting, admission.waiting_tokens, admission.live) == (0, 0, 2)
    ticket.release(2.0)
    ticket.release(2.0)
    ticket.started(3.0)
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
    assert (found.reason, found.status, found.retry_after) == ("queue_full", 429, 1)
    assert "2 requests with 20 prompt tokens" in found.message


def test_prompt_tokens_fill_the_queue_too() -> None:
    admission = Admission(10, 100)
    first = admission.admit(None, 60, 5, 0.0)
    assert refusal(admission, None, 41, 5, 0.0).reason == "queue_full"
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


def drained(seconds_each: float, departures: int) -> Admission:
    """Four wait, and one leaves every so often."""
    admission = Admission(4, 1000)
    tickets = [admission.admit(None, 100, 5, 0.0) for _ in range(4)]
    now = 0.0
    for _ in range(departures):
        now += seconds_each
        tickets.pop(0).release(now)
        tickets.append(admission.admit(None, 100, 5, now))
    return admission


@pytest.mark.parametrize("seconds_each", [0.01, 0.5, 3.0, 7.0, 20.0])
def test_come_again_when_there_will_be_room(seconds_each: float) -> None:
    admission = drained(seconds_each, 50)
    now = 50 * seconds_each
    told = refusal(admission, None, 100, 5, now).retry_after
    assert math.ceil(seconds_each * 0.6) <= told <= math.ceil(seconds_each * 1.2), "one has to leave"
    two = refusal(admission, None, 100, 5, now, requests=2).retry_after
    assert math.ceil(seconds_each * 1.2) <= two <= math.ceil(seconds_each * 2.4), "two have to"


def test_tokens_may_be_what_there_is_no_room_for() -> None:
    admission = Admission(100, 1000)
    tickets = [admission.admit(None, 100, 5, 0.0) for _ in range(10)]
    for now in range(1, 61):  # 100 tokens each second
        tickets.pop(0).started(float(now))
        tickets.append(admission.admit(None, 100, 5, float(now)))
    assert 4 <= refusal(admission, None, 500, 5, 60.0).retry_after <= 6
    assert 8 <= refusal(admission, None, 5000, 5, 60.0).retry_after <= 12, "all must go first"


def test_idle_time_is_not_slowness_but_a_queue_that_stands_still_is() -> None:
    admission = Admission(1, 1000)
    for now in range(10):
        admission.admit(None, 10, 5, float(now)).started(now + 0.5)
    admission.admit(None, 10, 5, 10_000.0)
    assert refusal(admission, None, 10, 5, 10_000.0).retry_after == 1
    assert refusal(admission, None, 10, 5, 10_020.0).retry_after > 1
    assert refusal(admission, None, 10, 5, 10_300.0).retry_after == 120
    assert refusal(admission, None, 10, 5, 100_000.0).retry_after == 120


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
    assert (found.reason, found.status, found.retry_after) == ("tenant_limit", 429, 1)
    assert "alice has 2 of 2" in found.message
    admission.admit(Tenant("bob", max_concurrent=2), 1, 5, 1.0)
    first.release(2.0)
    admission.admit(tenant, 1, 5, 2.0)


def test_a_tenant_in_debt_waits_until_it_is_paid() -> None:
    admission = Admission(100, 100_000)
    tenant = Tenant("alice", tokens_per_minute=600)  # 10 a second
    admission.admit(tenant, 500, 5, 0.0)
    ticket = admission.admit(tenant, 150, 5, 0.0)  # 50 in debt
    found = refusal(admission, tenant, 1, 5, 0.0)
    assert (found.reason, found.status, found.retry_after) == ("tenant_rate", 429, 5)
    ticket.count(100)
    assert refusal(admission, tenant, 1, 5, 0.0).retry_after == 15
    assert refusal(admission, tenant, 1, 5, 14.5).retry_after == 1
    admission.admit(tenant, 1, 5, 15.0)
    admission.admit(Tenant("bob", tokens_per_minute=600), 1, 5, 0.0)


def test_a_full_bucket_admits_anything_once_and_holds_a_minute_at_most() -> None:
    admission = Admission(100, 1_000_000)
    tenant = Tenant("alice", tokens_per_minute=60)
    ticket = admission.admit(tenant, 6000, 5, 1000.0)
    assert refusal(admission, tenant, 1, 5, 1000.0).retry_after == 5940
    ticket.release(1000.0)
    much_later = 1e6
    admission.admit(tenant, 90, 5, much_later)
    assert refusal(admission, tenant, 1, 5, much_later).retry_after == 30


def test_output_long_after_admission_is_charged_at_its_own_time() -> None:
    admission = Admission(100, 1_000_000)
    tenant = Tenant("alice", tokens_per_minute=60)
    ticket = admission.admit(tenant, 10, 5, 0.0)
    ticket.started(600.0)  # the bucket is full again
    ticket.count(90)
    assert refusal(admission, tenant, 1, 5, 600.0).retry_after == 30


def test_the_refused_pay_nothing() -> None:
    admission = Admission(1, 100)
    tenant = Tenant("alice", max_concurrent=5, tokens_per_minute=60)
    ticket = admission.admit(tenant, 30, 5, 0.0)
    for _ in range(10):
        assert refusal(admission, tenant, 30, 5, 0.0).reason == "queue_full"
    ticket.started(0.0)
    admission.admit(tenant, 30, 5, 0.0)


def test_bounds_that_let_nobody_in_are_refused() -> None:
    with pytest.raises(SettingsError, match="max_waiting is 0"):
        Admission(0, 1)
    with pytest.raises(SettingsError, match="max_waiting_tokens is 0"):
        Admission(1, 0)


TENANTS = [None, Tenant("a", max_concurrent=3), Tenant("b", tokens_per_minute=600), Tenant("c")]
MOVES = st.tuples(
    st.sampled_from(["admit", "admit", "start", "count", "release", "release"]),
    st.integers(0, 50),  # which ticket
    st.integers(0, 300),  # tokens
    st.integers(1, 3),  # requests
    st.sampled_from(TENANTS),
    st.floats(-1, 40),  # time may seem to stand still or go back, where callers race
)


@given(st.lists(MOVES, max_size=80), st.integers(1, 6), st.integers(1, 1000))
@settings(max_examples=300)
def test_nothing_leaks_and_no_bound_is_passed(moves: list[Any], max_waiting: int, max_tokens: int) -> None:
    admission = Admission(max_waiting, max_tokens)
    tickets: list[Ticket] = []
    started: set[int] = set()
    released: set[int] = set()
    now = 0.0
    for move, which, tokens, requests, tenant, later in moves:
        now += later
        if move == "admit":
            before = (admission.waiting, admission.waiting_tokens, admission.live)
            try:
                tickets.append(admission.admit(tenant, tokens, 5, now, requests=requests))
            except Refused as refused:
                assert before == (admission.waiting, admission.waiting_tokens, admission.live)
                assert refused.refusal.retry_after == math.ceil(refused.refusal.retry_after)
                if refused.refusal.reason == "queue_full":
                    assert before[0] > 0 and 1 <= refused.refusal.retry_after <= 120
        elif tickets:
            index = which % len(tickets)
            ticket = tickets[index]
            if move == "start":
                ticket.started(now)
                started.add(index)
            elif move == "count":
                ticket.count(tokens)
            else:
                ticket.release(now)
                released.add(index)
        live = [index for index in range(len(tickets)) if index not in released]
        waiting = [tickets[index] for index in live if index not in started]
        assert admission.live == sum(tickets[index].requests for index in live)
        assert admission.waiting == sum(ticket.requests for ticket in waiting) <= max_waiting
        assert admission.waiting_tokens == sum(ticket.prompt_tokens for ticket in waiting)
        assert admission.waiting_tokens <= max_tokens or any(each.prompt_tokens > max_tokens for each in waiting)
        assert sum(tickets[index].requests for index in live if tickets[index].tenant == TENANTS[1]) <= 3
    for ticket in tickets:
        ticket.release(now)
    assert admission.waiting == admission.waiting_tokens == admission.live == 0
    for _ in range(3):
        admission.admit(TENANTS[1], 0, 5, now).started(now)  # all three of its places are free again
