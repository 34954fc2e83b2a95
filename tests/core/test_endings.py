"""How requests end: by themselves, by their caller, by a failure; and that all they held is free at once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from device import sequences_of
from examples import (
    END,
    WORD,
    ask,
    engine_of,
    give,
    names,
    request,
    scheduler_of,
    shape_of,
    step,
    step_until_one_yields,
)
from fakes import answer_to

from chairlift.core.plan import Event
from chairlift.core.request import FinishReason, Phase
from chairlift.core.scheduler import Scheduler
from chairlift.core.step import StepResult
from chairlift.engine.engine import Engine


def ends(events: list[Event]) -> list[tuple[str, int, FinishReason]]:
    """The sequences that ended, and why."""
    return [
        (event.sequence.request.id, event.sequence.index, event.finish_reason)
        for event in events
        if event.finish_reason is not None
    ]


def run_dry(engine: Engine) -> list[Event]:
    """Step until nothing is left."""
    events: list[Event] = []
    for _ in range(200):
        if not engine.has_work:
            return events
        events += engine.step()
    raise AssertionError("the engine never came to an end")


def holds_nothing(scheduler: Scheduler) -> bool:
    scheduler.check()
    return not scheduler.has_work and scheduler.pool.owned == 0 and not scheduler.running and not len(scheduler.waiting)


# ---- by themselves


def test_blocks_seat_and_row_are_free_as_soon_as_a_sequence_ends() -> None:
    scheduler = scheduler_of()
    sequence = ask(scheduler, "a", prompt=9)
    assert step(scheduler, END).samples == [sequence]
    assert holds_nothing(scheduler)
    assert (sequence.phase, sequence.row, sequence.tables[0].blocks) == (Phase.DONE, -1, [])


def test_the_very_next_step_seats_who_waited_for_the_one_that_ended() -> None:
    scheduler = scheduler_of(seats=1)
    ask(scheduler, "a")
    ask(scheduler, "b")
    step(scheduler, END)
    assert names(step(scheduler).placed) == ["b"]


# ---- abort


def test_aborting_who_waits_takes_it_out_of_the_queue() -> None:
    scheduler = scheduler_of(seats=1)
    for name in "abc":
        ask(scheduler, name)
    step(scheduler)
    assert ends(scheduler.abort("b")) == [("b", 0, FinishReason.ABORT)]
    scheduler.check()
    step(scheduler, END)
    assert names(step(scheduler).placed) == ["c"]


def test_aborting_in_mid_prompt_frees_all_its_blocks() -> None:
    scheduler = scheduler_of(step_tokens=4)
    ask(scheduler, "a", prompt=20)
    step(scheduler)
    assert ends(scheduler.abort("a")) == [("a", 0, FinishReason.ABORT)]
    assert holds_nothing(scheduler)
    assert not scheduler.plan(0.0)


def test_aborting_a_prompt_that_was_to_fork_frees_the_seats_of_all_its_siblings() -> None:
    scheduler = scheduler_of(seats=4, step_tokens=4)
    ask(scheduler, "a", prompt=20, n=4)
    step(scheduler)
    scheduler.abort("a")
    ask(scheduler, "b", prompt=2, n=4)
    assert len(step(scheduler).placed) == 4


def test_aborting_while_it_decodes_ends_every_sibling() -> None:
    scheduler = scheduler_of()
    ask(scheduler, "a", n=3)
    step(scheduler)
    step(scheduler)
    assert ends(scheduler.abort("a")) == [("a", index, FinishReason.ABORT) for index in range(3)]
    assert holds_nothing(scheduler)


def test_aborting_who_was_preempted_ends_it_in_the_queue() -> None:
    scheduler = scheduler_of(blocks=5, max_length=20)
    ask(scheduler, "old", prompt=8)
    ask(scheduler, "young", prompt=4)
    step_until_one_yields(scheduler)
    assert ends(scheduler.abort("young")) == [("young", 0, FinishReason.ABORT)]
    scheduler.check()
    assert not len(scheduler.waiting)


def test_aborting_an_unknown_or_ended_request_is_no_error() -> None:
    scheduler = scheduler_of()
    ask(scheduler, "a")
    step(scheduler, END)
    assert scheduler.abort("a") == []
    assert scheduler.abort("never came") == []
    assert scheduler.counters.aborted == 0


def test_an_id_is_free_again_once_its_request_has_ended_even_with_its_step_in_flight() -> None:
    scheduler = scheduler_of()
    ask(scheduler, "a")
    in_flight = scheduler.plan(0.0)
    scheduler.abort("a")
    again = ask(scheduler, "a", prompt=2)
    assert give(scheduler, in_flight) == []
    assert again.output == []
    assert scheduler.fail(in_flight, "too late") == []
    assert shape_of(step(scheduler)) == [("a", 0, 2)]


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_aborting_with_a_step_in_flight_discards_its_token_and_harms_nobody(steps: int) -> None:
    scheduler = scheduler_of(seats=2, step_tokens=4, blocks=8, block_size=2, max_length=16)
    engine, _ = engine_of(scheduler, overlap=True)
    leaver = request("leaver", prompt=6, seed=1, eos=None)
    stayer = request("stayer", prompt=4, seed=2, eos=None, max_tokens=6)
    engine.submit(leaver)
    engine.submit(stayer)
    engine.submit(request("next", prompt=4, seed=3, eos=None, max_tokens=4))
    events = [event for _ in range(steps) for event in engine.step()]
    gone = engine.abort("leaver")
    assert ends(gone) == [("leaver", 0, FinishReason.ABORT)]
    scheduler.check()
    rest = run_dry(engine)
    assert "leaver" not in {event.sequence.request.id for event in rest}
    told = [event.token for event in events + rest if event.sequence.request.id == "stayer"]
    assert told == answer_to(stayer, 0, 10)[0]
    assert holds_nothing(scheduler)


# ---- stop


def test_stopping_a_sequence_ends_it_alone_and_as_stopped() -> None:
    scheduler = scheduler_of()
    first = ask(scheduler, "a", n=2)
    step(scheduler)
    assert ends(scheduler.stop(first)) == [("a", 0, FinishReason.STOP)]
    scheduler.check()
    assert [sequence.index for sequence in sequences_of(step(scheduler))] == [1]
    assert scheduler.counters.finished == 0
    scheduler.stop(scheduler.running[0])
    assert scheduler.counters.finished == 1
    assert holds_nothing(scheduler)


def test_stopping_twice_is_stopping_once() -> None:
    scheduler = scheduler_of()
    sequence = ask(scheduler, "a")
    step(scheduler)
    scheduler.stop(sequence)
    assert scheduler.stop(sequence) == []
    assert scheduler.counters.finished == 1


def test_stopping_who_was_preempted_ends_it_in_the_queue() -> None:
    scheduler = scheduler_of(blocks=5, max_length=20)
    ask(scheduler, "old", prompt=8)
    young = ask(scheduler, "young", prompt=4)
    step_until_one_yields(scheduler)
    assert ends(scheduler.stop(young)) == [("young", 0, FinishReason.STOP)]
    scheduler.check()


# ---- failure


def test_a_failed_step_ends_the_requests_in_it_and_only_those() -> None:
    scheduler = scheduler_of(seats=2)
    for name in "abc":
        ask(scheduler, name)
    plan = scheduler.plan(0.0)
    events = scheduler.fail(plan, "out of luck")
    assert ends(events) == [("a", 0, FinishReason.ERROR), ("b", 0, FinishReason.ERROR)]
    assert {event.error for event in events} == {"out of luck"}
    scheduler.check()
    assert scheduler.counters.failed == 2
    assert names(step(scheduler).placed) == ["c"]


def test_a_failed_step_takes_the_siblings_of_its_sequences_along() -> None:
    scheduler = scheduler_of(seats=2, blocks=2, max_length=8)
    ask(scheduler, "a", prompt=6, n=2)
    step(scheduler)
    plan = scheduler.plan(0.0)
    assert [sequence.index for sequence in plan.preempted] == [1]
    assert ends(scheduler.fail(plan, "x")) == [("a", 0, FinishReason.ERROR), ("a", 1, FinishReason.ERROR)]
    assert scheduler.counters.failed == 1
    assert holds_nothing(scheduler)


def test_a_failed_step_says_nothing_of_requests_that_ended_before() -> None:
    scheduler = scheduler_of()
    ask(scheduler, "a")
    plan = scheduler.plan(0.0)
    scheduler.abort("a")
    assert scheduler.fail(plan, "x") == []
    assert (scheduler.counters.aborted, scheduler.counters.failed) == (1, 0)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlapped"])
@pytest.mark.parametrize("at", ["submit", "collect"])
def test_the_engine_survives_an_executor_that_breaks(at: str, overlap: bool, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = scheduler_of(seats=1)
    engine, executor = engine_of(scheduler, overlap=overlap)
    engine.submit(request("broken", eos=None, max_tokens=5))
    engine.submit(fine := request("fine", eos=None, max_tokens=3))
    setattr(executor, f"breaks_at_{at}", True)
    with caplog.at_level(logging.ERROR, logger="chairlift"):
        events = run_dry(engine)
    assert ends(events) == [("broken", 0, FinishReason.ERROR), ("fine", 0, FinishReason.LENGTH)]
    (error,) = [event.error for event in events if event.error]
    assert error.startswith("the step failed: BrokenPassError: the device")
    assert [event.token for event in events if event.sequence.request is fine] == answer_to(fine, 0, 6)[0]
    assert "a step of 1 slices failed" in caplog.text
    assert holds_nothing(scheduler)


# ---- two steps in flight


def served(overlap: bool, *requests: Any, **room: int) -> tuple[list[Event], int]:
    """All events of these requests, and how many passes they took."""
    scheduler = scheduler_of(**room)
    engine, executor = engine_of(scheduler, overlap=overlap)
    passes = 0
    launch = executor.launch

    def counted(plan: Any) -> Any:
        nonlocal passes
        passes += 1
        return launch(plan)

    executor.launch = counted  # type: ignore[method-assign]
    for asked in requests:
        engine.submit(asked)
    events = run_dry(engine)
    assert holds_nothing(scheduler)
    return events, passes


def test_an_answer_that_ends_by_length_takes_no_extra_step_when_overlapped() -> None:
    alone, passes = served(False, request("a", eos=None, max_tokens=6))
    overlapped, same = served(True, request("a", eos=None, max_tokens=6))
    assert passes == same == 6
    assert [event.token for event in alone] == [event.token for event in overlapped]


def test_an_answer_that_ends_by_itself_costs_one_discarded_token_when_overlapped() -> None:
    asked = request("a", eos=None, max_tokens=20)
    third = answer_to(asked, 0, 23)[0][2]
    stopped = request("a", eos=third, max_tokens=20)
    (tokens, reason) = answer_to(stopped, 0, 23)
    assert reason is FinishReason.STOP
    for overlap in (False, True):
        events, passes = served(overlap, stopped)
        assert [event.token for event in events] == tokens
        assert passes == len(tokens) + overlap


def test_overlapped_the_next_step_is_under_way_before_the_last_is_seen() -> None:
    scheduler = scheduler_of()
    engine, _ = engine_of(scheduler, overlap=True)
    sequence = ask(scheduler, "a", prompt=3)
    assert not engine.step()
    assert (sequence.computed, sequence.length, sequence.output) == (3, 4, [])
    (event,) = engine.step()
    assert sequence.output == [event.token]
    assert (sequence.computed, sequence.length, len(sequence.tokens)) == (4, 5, 4)


def test_a_sequence_preempted_with_its_last_token_in_flight_ends_in_the_queue() -> None:
    scheduler = scheduler_of(blocks=4, block_size=2, max_length=8)
    old, young = ask(scheduler, "old", prompt=2), ask(scheduler, "young", prompt=1, max_tokens=3)
    step(scheduler)
    step(scheduler)
    in_flight = scheduler.plan(0.0)  # both now hold two blocks, and the last token of the young one is on its way
    assert young.length == young.limit
    later = scheduler.plan(0.0)  # the old one needs a third
    assert (later.preempted, sequences_of(later)) == ([young], [old])
    assert ends(give(scheduler, in_flight)) == [("young", 0, FinishReason.LENGTH)]
    scheduler.check()
    assert not len(scheduler.waiting)
    assert names(scheduler.running) == ["old"]


def test_a_sequence_preempted_with_a_token_in_flight_comes_back_with_it() -> None:
    scheduler = scheduler_of(blocks=4, block_size=2, max_length=8)
    ask(scheduler, "old", prompt=2)
    young = ask(scheduler, "young", prompt=1, max_tokens=7)
    step(scheduler)
    step(scheduler)
    in_flight = scheduler.plan(0.0)
    later = scheduler.plan(0.0)
    assert later.preempted == [young]
    give(scheduler, in_flight, 5, 6)
    give(scheduler, later, END)
    plan = scheduler.plan(0.0)
    assert plan.slices == [(young, 0, 4)]
    assert young.tokens[-1] == 6


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlapped"])
def test_an_engine_with_nothing_to_do_does_nothing(overlap: bool) -> None:
    scheduler = scheduler_of()
    engine, _ = engine_of(scheduler, overlap=overlap)
    assert not engine.step()
    assert not engine.has_work
    engine.submit(request("a"))
    assert engine.has_work
    engine.abort("a")
    assert not engine.has_work


def test_an_overlapped_engine_has_work_until_its_last_step_has_resume() -> None:
    scheduler = scheduler_of()
    engine, _ = engine_of(scheduler, overlap=True)
    engine.submit(request("a"))
    engine.step()
    engine.abort("a")
    assert not scheduler.has_work
    assert engine.has_work
    assert not engine.step()
    assert not engine.has_work


# ---- counting


def test_every_request_is_counted_once_for_how_it_ended() -> None:
    scheduler = scheduler_of(seats=1)
    for name in ("finished", "failed", "aborted", "live"):
        ask(scheduler, name)
    with pytest.raises(Exception, match="empty"):
        scheduler.submit(request("rejected", prompt=0))
    step(scheduler, END)
    scheduler.fail(scheduler.plan(0.0), "x")
    scheduler.abort("aborted")
    scheduler.check()
    counters = scheduler.counters
    assert (counters.submitted, counters.finished, counters.failed) == (5, 1, 1)
    assert (counters.aborted, counters.rejected, counters.preemptions) == (1, 1, 0)


def test_a_request_of_several_answers_counts_as_one() -> None:
    scheduler = scheduler_of()
    ask(scheduler, "a", n=3, max_tokens=1)
    step(scheduler)
    assert scheduler.counters.submitted == scheduler.counters.finished == 1


# ---- without a token to choose


@pytest.mark.parametrize("caches", [False, True])
def test_a_sample_without_a_token_ends_its_request_and_no_other(caches: bool) -> None:
    scheduler = scheduler_of(seats=6, caches=caches)
    scheduler.submit(request("several", prompt=9, n=3, min_tokens=2))
    other = ask(scheduler, "other", prompt=9)
    step(scheduler)
    plan = scheduler.plan(0.0)
    late = scheduler.plan(0.0)  # overlapped: it is in flight when the failure comes back
    failing = next(place for place, each in enumerate(plan.samples) if each.request.id == "several")
    events = list(scheduler.apply(plan, StepResult([WORD] * len(plan.samples), failed=[failing])))
    assert sorted(ends(events)) == [("several", index, FinishReason.ERROR) for index in range(3)]
    assert {event.error for event in events if event.finish_reason} == {
        "no token is left to choose under min_tokens: allow more tokens"
    }
    assert all(event.token is None for event in events if event.sequence.request.id == "several")
    scheduler.check()
    # The token after the one that there is not may be missing, too; it is no news.
    missing = [place for place, each in enumerate(late.samples) if each.request.id == "several"]
    late_news = scheduler.apply(late, StepResult([WORD] * len(late.samples), failed=missing))
    assert names([event.sequence for event in late_news]) == ["other"]
    assert other.output == [WORD] * 3
    scheduler.abort("other")
    assert holds_nothing(scheduler)
    assert (scheduler.counters.failed, scheduler.counters.aborted) == (1, 1)


def test_logits_that_are_not_numbers_are_the_model_s_fault() -> None:
    scheduler = scheduler_of()
    ask(scheduler, "a")
    plan = scheduler.plan(0.0)
    [event] = scheduler.apply(plan, StepResult([WORD], failed=[0]))
    assert event.error is not None and "logits are not numbers" in event.error
    assert holds_nothing(scheduler)
