"""Conversations as clients send them: tool calls of earlier turns reach the chat template as it expects them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chairlift.core.errors import RequestError
from chairlift.openai.conversation import read_messages
from chairlift.text.template import render

QUESTION = {"role": "user", "content": "How warm is it in Paris?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"}


def calling(**changes: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [CALL], **changes}


def test_a_message_without_calls_is_left_as_it_came() -> None:
    messages = [QUESTION, {"role": "assistant", "content": "21", "name": "x"}, RESULT]
    assert read_messages({"messages": messages}) == messages


@pytest.mark.parametrize("message", [calling(), {"role": "assistant", "tool_calls": [CALL]}, calling(content="")])
def test_an_answer_that_only_called_tools_has_an_empty_content_and_arguments_as_values(message: Any) -> None:
    [_, read, result] = read_messages({"messages": [QUESTION, message, RESULT]})
    assert read["content"] == ""
    assert read["tool_calls"] == [{**CALL, "function": {"name": "weather", "arguments": {"city": "Paris"}}}]
    assert result == RESULT
    assert CALL["function"]["arguments"] == '{"city": "Paris"}', "what came is left as it was"  # type: ignore[index]


@pytest.mark.parametrize("arguments", ["", None, {}, "{}"])
def test_no_arguments_are_an_empty_mapping(arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": arguments}}
    assert read_messages({"messages": [calling(tool_calls=[call])]})[0]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("calls", [None, []])
def test_no_calls_are_none(calls: Any) -> None:
    [read] = read_messages({"messages": [{"role": "assistant", "content": "Hi", "tool_calls": calls}]})
    assert read == {"role": "assistant", "content": "Hi"}


@pytest.mark.parametrize("messages", [None, [], "Hi", ["Hi"], [{"content": "Hi"}], [{"role": "user"}]])
def test_messages_must_be_a_conversation(messages: Any) -> None:
    with pytest.raises(RequestError):
        read_messages({"messages": messages})


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "assistant", "content": None}, "message 0 has no content"),
        (calling(tool_calls=[]), "message 0 has no content"),
        (calling(role="user"), "message 0 has no content"),
        (calling(content=3), "message 0 has no content"),
        (calling(tool_calls="weather"), "tool_calls that are not a list"),
        (calling(tool_calls=[CALL, 3]), "message 0's tool call 1 must be an object with a function"),
        (calling(tool_calls=[{"function": {"arguments": "{}"}}]), "tool call 0 must be an object with a function"),
        (calling(tool_calls=[{"function": {"name": "f", "arguments": "{city"}}]), "arguments that are not JSON"),
        (calling(tool_calls=[{"function": {"name": "f", "arguments": "[" * 10**6}}]), "arguments that are not JSON"),
        (calling(tool_calls=[{"function": {"name": "f", "arguments": "9" * 10**6}}]), "arguments that are not JSON"),
    ],
    ids=str,
)
def test_calls_that_no_template_could_read_are_refused_by_their_place(message: Any, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        read_messages({"messages": [message]})


@pytest.mark.parametrize(
    "end", ["", "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}"]
)
def test_templates_that_loop_over_arguments_or_write_them_as_json_both_work(end: str, tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}[{{ message.role }}]{{ message.content + '' }}"
        "{% for call in message.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>"
        + end
        + "{% endfor %}{% endfor %}"
    )
    written = render(
        template, read_messages({"messages": [QUESTION, calling(), RESULT]}), bos_token=None, eos_token=None
    )
    shown = "city=Paris" if end else ""
    assert f'[assistant]<weather {{"city": "Paris"}}>{shown}[tool]21 degrees' in written
