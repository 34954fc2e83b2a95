"""A sampling field is written once, in SamplingParams: HTTP, its description and the engine's socket derive from it."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from chairlift.core.errors import RequestError
from chairlift.core.params import ABOUT, SamplingParams
from chairlift.core.structured import Structured
from chairlift.openai import params as http
from chairlift.openai.params import FIELDS, NOT_OVER_HTTP, READ_APART, read_chat_params, read_completion_params
from chairlift.serving import core_messages, engine_process, generation, messages, openapi
from chairlift.serving.link import Link

NAMES = {field.name for field in fields(SamplingParams)}
# A value of each kind that is not the default of any field.
VALUES: dict[str, Any] = {
    "a whole number": 3,
    "a number": 0.5,
    "true, false or 'never'": "never",
    "a list of whole numbers": [7, 8],
    "a string or a list of strings": ["of", "course"],
}
APART: dict[str, tuple[dict[str, Any], Any]] = {  # a completion's body, and what it means
    "max_tokens": ({"max_tokens": 3}, 3),
    "logprobs": ({"logprobs": 3}, 3),
    "logit_bias": ({"logit_bias": {"7": 2}}, {7: 2}),
    "structured": ({"structured": {"regex": "a+"}}, Structured("regex", "a+")),
}
REACHABLE = sorted(NAMES - NOT_OVER_HTTP.keys())


def asked(name: str) -> tuple[dict[str, Any], Any]:
    """A body that sets the field, and the value that SamplingParams must have for it."""
    if name in APART:
        return APART[name]
    default = next(field.default for field in fields(SamplingParams) if field.name == name)
    value = VALUES.get(FIELDS[name], not default)
    return {name: value, **({"n": 1} if name == "best_of" else {})}, tuple(value) if isinstance(value, list) else value


def sent(params: SamplingParams) -> SamplingParams:
    """The parameters as the engine's process has them."""
    order = messages.decode_order(messages.encode(messages.Submit(1, "r", [5], params.for_engine())))
    assert isinstance(order, messages.Submit)
    return core_messages.as_request("0.1.r", order).params


def test_every_field_is_read_over_http_or_has_a_reason_not_to_be() -> None:
    groups = (FIELDS.keys(), READ_APART, NOT_OVER_HTTP.keys())
    assert set().union(*groups) == NAMES
    assert sum(map(len, groups)) == len(NAMES), "a field is in one of them"
    assert sorted(NOT_OVER_HTTP) == ["detokenize", "logits_processors"]
    assert all(len(reason) > 10 for reason in NOT_OVER_HTTP.values())
    assert all(about.text.endswith(".") for about in ABOUT.values())


@pytest.mark.parametrize("name", REACHABLE)
def test_a_field_reaches_sampling_params_the_engine_and_the_description(name: str) -> None:
    body, value = asked(name)
    params = read_completion_params({"prompt": "p", **body})
    assert getattr(params, name) == value
    if name not in ("logprobs", "max_tokens"):  # a chat gives them other forms
        assert getattr(read_chat_params({"messages": [], **body}), name) == value
    at_engine = getattr(sent(params), name)
    assert at_engine == (value if ABOUT[name].for_engine else getattr(SamplingParams(), name))
    described = {**openapi._SAMPLING, **openapi._COMPLETION["properties"]}[name]
    assert name == "logprobs" or described["description"] == ABOUT[name].text


def test_no_other_file_of_the_way_to_the_engine_names_a_field_just_to_pass_it_on() -> None:
    """A field may be named where it means something; these mean nothing between HTTP and the sampler."""
    for module in (http, messages, generation, core_messages, engine_process, openapi):
        source = inspect.getsource(module)
        assert not [name for name in ("min_p", "presence_penalty", "min_tokens") if name in source], module


def test_functions_of_a_caller_cannot_cross_to_the_engine() -> None:
    params = SamplingParams(logits_processors=[lambda ids, logits: logits], stop="end", bad_words="word")
    assert sent(params) == SamplingParams()
    with pytest.raises(TypeError):
        messages.encode(messages.Submit(1, "r", [5], params))
    for value in ([5], ["os.system"], "os.system"):
        raw = msgspec.msgpack.encode([1, 1, "r", [5], {"logits_processors": value}])
        with pytest.raises(msgspec.DecodeError):
            messages.decode_order(raw)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n is 0, out of range"),
    ({"temperature": -1.0}, "temperature is -1.0, out of range"),
    ({"top_p": float("nan")}, "top_p is nan, not a finite number"),
    ({"stop_token_ids": list(range(5000))}, "stop_token_ids has 5,000 entries: use at most 4,096"),
    ({"logit_bias": dict.fromkeys(range(70_000), 1.0)}, "logit_bias has 70,000 entries: use at most 65,536"),
    ({"allowed_token_ids": [1] * ((1 << 20) + 1)}, "allowed_token_ids has 1,048,577 entries: use at most 1,048,576"),
    ({"temperature": "hot"}, "Expected `float`, got `str`"),
    ({"stop_token_ids": [1.5]}, "Expected `int`, got `float`"),
    ({"logit_bias": {"x": 1.0}}, "Expected `int`, got `str`"),
]


def test_parameters_that_are_not_valid_are_answered_with_an_error(tmp_path: Path) -> None:
    """Whatever is wrong with them, the sender is told under the request's own key, and the next order is read."""
    context: zmq.Context[Any] = zmq.Context()
    server = context.socket(zmq.DEALER)
    server.bind(f"ipc://{tmp_path}/line")
    link = Link(context, f"ipc://{tmp_path}/line")
    for key, (params, _) in enumerate(WRONG):
        server.send(msgspec.msgpack.encode([1, key, "r", [5], params]))
    server.send(messages.encode(messages.Abort(5)))
    received: list[messages.Order] = []
    while not received:
        received += link.receive()
    assert received == [messages.Abort(5)]
    for key, (_, expected) in enumerate(WRONG):
        assert server.poll(5000)
        told = messages.decode_report(server.recv())
        if isinstance(told, messages.StepReport):
            [update] = told.updates
            assert (update.key, update.finish_reason) == (key, messages.REFUSED)
            assert expected in (update.error or "")
        else:
            assert isinstance(told, messages.Unreadable) and told.key == key
            assert expected in told.message
    link.close()
    server.close(0)
    context.term()


def test_the_lists_of_a_field_are_bounded_in_process_too() -> None:
    for name, about in ABOUT.items():
        if about.most is not None:
            value: Any = dict.fromkeys(range(about.most + 1), 1.0) if name == "logit_bias" else [1] * (about.most + 1)
            with pytest.raises(RequestError, match=f"{name} has .* entries: use at most"):
                replace(SamplingParams(), **{name: value})
