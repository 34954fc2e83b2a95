"""The fronts of the Responses and the Messages API by themselves: whatever a body holds, it is read or refused."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from chairlift.apis.front import Front
from chairlift.apis.fronts import CHAT, FRONTS, MESSAGES, RESPONSES
from chairlift.core.errors import RequestError
from chairlift.openai.chunks import ChatChunks
from chairlift.openai.replies import chat_completion, error_object, usage
from chairlift.text.message import MessageFormat
from chairlift.text.outputs import Answer, Chunk, RequestMetrics, RequestOutput
from chairlift.text.parsers.reasoning import ReasoningMarkers
from chairlift.text.parsers.tools import Tool

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
RESPONSE: dict[str, Any] = {
    "model": "m",
    "instructions": "Be brief.",
    "input": [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "rain"}]},
    ],
    "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}],
    "tool_choice": {"type": "function", "name": "weather"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}, "verbosity": "medium"},
    "reasoning": {"effort": "low"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "max_output_tokens": 5,
    "metadata": {"a": "b"},
    "store": False,
    "stream": True,
    "truncation": "auto",
}
MESSAGE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "A"},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ],
    "tools": [{"name": "weather", "description": "x", "input_schema": SCHEMA}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "stop_sequences": ["x"],
    "metadata": {"user_id": "u"},
    "stream": True,
}
WHOLE = pytest.mark.parametrize(("front", "body"), [(RESPONSES, RESPONSE), (MESSAGES, MESSAGE)], ids=["resp", "msg"])
VALUES: tuple[Any, ...] = (None, 0, -1, 2**40, 1.5, True, False, "", "text", [], {}, [None], [{}], {"type": "text"})


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a body with one of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


@WHOLE
def test_any_value_at_any_place_is_read_or_refused_in_one_line(front: Front, body: dict[str, Any]) -> None:
    count = sum(1 for _ in places(body))
    refused = 0
    for place in range(count):
        for value in (*VALUES, "missing"):
            changed = copy.deepcopy(body)
            container, key = list(places(changed))[place]
            if value == "missing":
                del container[key]
            else:
                container[key] = copy.deepcopy(value)
            try:
                read, _ = front.read(changed)
                assert read["messages"]
            except RequestError as error:
                refused += 1
                assert "\n" not in str(error)
                assert ":" in str(error), error
    assert refused > count


@WHOLE
def test_bodies_broken_in_several_places_are_read_or_refused(front: Front, body: dict[str, Any]) -> None:
    draw = random.Random(7)
    for _ in range(3000):
        changed = copy.deepcopy(body)
        for _ in range(draw.randint(2, 5)):
            container, key = draw.choice(list(places(changed)))
            container[key] = copy.deepcopy(draw.choice([*VALUES, *body.values()]))
        try:
            front.read(changed)
        except RequestError:
            continue


def test_a_response_s_items_become_one_message_for_each_answer() -> None:
    body, repeated = RESPONSES.read(RESPONSE)
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "tool", "tool"]
    assert body["messages"][0]["content"] == "Be brief.\n\nBe kind."
    answer = body["messages"][2]
    assert (answer["content"], answer["reasoning_content"]) == ("A", "Hm.")
    assert [call["id"] for call in answer["tool_calls"]] == ["1", "2"]
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA
    assert (body["max_tokens"], body["logprobs"], body["top_logprobs"]) == (5, True, 2)
    assert body["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert repeated["tools"] == RESPONSE["tools"]


def test_a_message_s_blocks_become_messages_in_their_order() -> None:
    body, _ = MESSAGES.read(MESSAGE)
    assert [each["role"] for each in body["messages"]] == ["system", "user", "assistant", "tool", "user"]
    assert body["messages"][2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert body["messages"][3] == {"role": "tool", "content": "sunny", "tool_call_id": "1"}
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("required", False)
    assert (body["max_thinking_tokens"], body["chat_template_kwargs"]) == (5, {"enable_thinking": True})
    assert (body["stop"], body["reasoning_effort"]) == (["x"], "low")


def test_chat_completions_are_read_as_they_are() -> None:
    assert CHAT.read(RESPONSE) == (RESPONSE, {})
    assert set(FRONTS) == {"chat", "completions", "responses", "messages"}


def test_errors_name_the_fields_of_their_own_api_and_leave_plain_words_alone() -> None:
    about = error_object("stop is '': use max_tokens", param="stop")["error"]
    assert MESSAGES.error(about, 400, "1")["error"]["message"] == "stop_sequences is '': use max_tokens"
    assert RESPONSES.error(about, 400, "1")["error"]["message"] == "stop is '': use max_output_tokens"
    other = error_object("forbidden as stop tokens")["error"]
    assert MESSAGES.error(other, 400, "1")["error"]["message"] == "forbidden as stop tokens"
    own = RESPONSES.error(error_object("input[3] is 7: use an object")["error"], 400, "1")["error"]
    assert own["param"] == "input"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (408, "timeout_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_each_status_has_anthropic_s_type_of_error(status: int, kind: str) -> None:
    assert MESSAGES.error(error_object("no")["error"], status, "id") == {
        "type": "error",
        "error": {"type": kind, "message": "no"},
        "request_id": "id",
    }


# ---- a stream says what the whole reply says

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "%s"}}</tool_call>'
ANSWERS = {
    "text": "Hello there.",
    "nothing": "",
    "reasoning alone": "<think>Hm, let me",
    "reasoning and text": "<think>Hm.</think>Hello.",
    "text and calls": "Let me see.\n" + CALL % "Oslo" + "\n" + CALL % "Rome",
    "everything": "<think>Hm.</think>Let me see." + CALL % "Oslo",
    "a call that is cut off": '<tool_call>{"name": "weather", "arguments": {"city": "Os',
}


def replies(front: Front, text: str, reason: str, piece: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole reply with this text, and the events of its stream in pieces."""
    form = MessageFormat("hermes", (Tool("weather"),), ReasoningMarkers("<think>", "</think>"))
    answer = Answer(text=text, token_ids=[5] * 9, finish_reason=reason)
    output = RequestOutput("", None, [1, 2, 3], [answer], RequestMetrics(0.0, output_tokens=9))
    _, repeated = front.read(RESPONSE if front is RESPONSES else MESSAGE)
    whole = front.reply(chat_completion(output, "m", None, None, id="id-1", form=form), repeated)
    chunks = ChatChunks("id-1", "m", None, [output], usage=True, token_ids=False, top=0, form=form)
    writer = front.events(chunks.common, repeated, lambda: usage([output]))
    written = b""
    for start in range(0, len(text), piece):
        written += writer.write(list(chunks.of(Chunk(text[start : start + piece], [5]))))
    written += writer.write(list(chunks.of(Chunk("", [], finish_reason=reason))))
    written += writer.write([chunks.usage(usage([output]))])
    events = []
    for event in written.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return whole, events


EVERY_ANSWER = pytest.mark.parametrize(
    ("text", "reason", "piece"),
    [
        pytest.param(text, reason, piece, id=f"{name}, {reason}, {piece}")
        for name, text in ANSWERS.items()
        for reason in ("stop", "length")
        for piece in (1, 7, 1000)
    ],
)


@EVERY_ANSWER
def test_a_streamed_response_is_the_whole_one(text: str, reason: str, piece: int) -> None:
    whole, events = replies(RESPONSES, text, reason, piece)
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    by_client = TypeAdapter(ResponseStreamEvent)
    for event in events:
        by_client.validate_python(event)
    for response in (whole, last):
        for item in response["output"]:
            item["id"] = item["call_id"] = "any"
        response["created_at"] = response["completed_at"] = 0
    assert last == whole
    ended = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in ended] == [item["type"] for item in whole["output"]]
    assert [event["output_index"] for event in events if event["type"] == "response.output_item.added"] == list(
        range(len(ended))
    )


@EVERY_ANSWER
def test_a_streamed_message_is_the_whole_one(text: str, reason: str, piece: int) -> None:
    whole, events = replies(MESSAGES, text, reason, piece)
    by_client = TypeAdapter(RawMessageStreamEvent)
    for event in events:
        by_client.validate_python(event)
    started = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in started] == [block["type"] for block in whole["content"]]
    for index, block in enumerate(whole["content"]):
        found = [each["delta"] for each in events if each.get("index") == index and "delta" in each]
        said = "".join(str(delta[name]) for delta in found for name in delta if name != "type")
        if block["type"] != "tool_use":
            assert said == block[block["type"]]
        elif not text.endswith('"Os'):
            assert json.loads(said) == block["input"]
    assert events[-2]["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    assert events[-2]["usage"] == whole["usage"] == events[0]["message"]["usage"]
    assert events[-1] == {"type": "message_stop"}
    AnthropicMessage.model_validate(whole)
