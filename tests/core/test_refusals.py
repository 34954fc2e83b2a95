"""Requests that cannot be served are refused at once, in words that name the value, and leave no trace."""

from __future__ import annotations

import re

import pytest
from examples import ask, request, scheduler_of, shape_of, step
from fakes import VOCAB

from chairlift.core.errors import RequestError
from chairlift.core.params import SamplingParams
from chairlift.core.request import Request


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
