"""Requests that cannot be served are refused at once, in words that name the value, and leave no trace."""

from __future__ import annotations

import re

import pytest
from examples import ask, request, scheduler_of, shape_of, step
from fakes import VOCAB

from chairlift.core.blocks import BlockPool
from chairlift.core.errors import RequestError, SettingsError
from chairlift.core.limits import Limits
from chairlift.core.params import SamplingParams
from chairlift.core.request import Request
from chairlift.core.scheduler import Scheduler


def asked_with(**params: object) -> Request:
    return Request("a", [1], SamplingParams(**params))  # type: ignore[arg-type]


REFUSALS = {
    "an empty prompt": (request("a", prompt=0), "the prompt is empty"),
    "a prompt that fills the context": (request("a", prompt=20), "the prompt has 20 tokens and the context holds 20"),
    "a prompt beyond the context": (request("a", prompt=31), "the prompt has 31 tokens and the context holds 20"),
    "more answers than seats": (request("a", n=5), "n is 5 and the batch holds 4 sequences"),
    "a prompt token beyond the vocabulary": (Request("a", [1, VOCAB, 2]), f"the prompt holds token id {VOCAB}"),
    "a negative prompt token": (Request("a", [1, -3, 2]), "the prompt holds token id -3"),
    "an unknown stop token": (asked_with(stop_token_ids=[3, 999]), "stop_token_ids holds token id 999"),
    "a bias on an unknown token": (asked_with(logit_bias={999: 1.0}), "logit_bias holds token id 999"),
    "an unknown allowed token": (asked_with(allowed_token_ids=[1, 999]), "allowed_token_ids holds token id 999"),
    "a bad word of unknown tokens": (Request("a", [1], bad_words=((1, 2), (3, 999))), "bad_words holds token id 999"),
    "a bad word of negative tokens": (Request("a", [1], bad_words=((-1, 2),)), "bad_words holds token id -1"),
}


@pytest.mark.parametrize(("refused", "message"), REFUSALS.values(), ids=list(REFUSALS))
def test_it_refuses(refused: Request, message: str) -> None:
    scheduler = scheduler_of(seats=4, max_length=20)
    with pytest.raises(RequestError, match=re.escape(message)):
        scheduler.submit(refused)
    assert not scheduler.has_work
    assert (scheduler.counters.submitted, scheduler.counters.rejected) == (1, 1)
    scheduler.check()


def test_it_refuses_an_id_that_is_in_use_and_serves_the_first() -> None:
    scheduler = scheduler_of()
    ask(scheduler, "twin", prompt=3)
    with pytest.raises(RequestError, match="request id 'twin' is in use"):
        scheduler.submit(request("twin", prompt=5))
    assert shape_of(step(scheduler)) == [("twin", 0, 3)]


def test_it_serves_the_longest_prompt_the_most_answers_and_the_last_token_that_fit() -> None:
    scheduler = scheduler_of(seats=4, max_length=20)
    scheduler.submit(Request("a", [VOCAB - 1] * 19, SamplingParams(n=4, stop_token_ids=[0, VOCAB - 1])))
    assert len(step(scheduler).samples) == 4


# ---- settings that could never work


@pytest.mark.parametrize("name", ["max_sequences", "step_tokens", "max_length", "vocab_size"])
def test_a_limit_below_one_is_refused_by_name(name: str) -> None:
    limits = {"max_sequences": 1, "step_tokens": 1, "max_length": 1, "vocab_size": 1, name: 0}
    with pytest.raises(SettingsError, match=f"{name} is 0"):
        Limits(**limits)


def test_a_step_smaller_than_the_batch_is_refused() -> None:
    with pytest.raises(SettingsError, match="step_tokens is 3, less than max_sequences 4"):
        Limits(max_sequences=4, step_tokens=3, max_length=10, vocab_size=10)


def test_a_cache_that_cannot_hold_one_full_sequence_is_refused() -> None:
    with pytest.raises(SettingsError, match="has 3 blocks, and one sequence of max_length 13 tokens needs 4"):
        Scheduler(Limits(1, 1, 13, 10), BlockPool(3, 4))
