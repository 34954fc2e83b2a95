"""OpenAI's Responses API, as OpenAI's own client meets it; each answer is also that of a chat completion."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pydantic
import pytest
from api_model import MODEL, SCHEMA, wrong_bodies
from openai import OpenAI
from running import Running

GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 12, "extra_body": {"ignore_eos": True}}
WEATHER: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
TIME: Any = {**WEATHER, "name": "time"}
INPUT: Any = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "What is the answer?"}]},
    {"role": "assistant", "content": "42"},
    {"type": "message", "role": "user", "content": "And the question?"},
]


@pytest.fixture(scope="module")
def server(thinker: Running) -> Running:
    return thinker


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def respond(client: OpenAI, **params: Any) -> Any:
    return client.responses.create(**{"model": MODEL, "input": "What is the answer?", **GREEDY, **params})


def chat(client: OpenAI, messages: Any, **params: Any) -> Any:
    call = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}, **params}
    return client.chat.completions.create(model=MODEL, messages=messages, **call).choices[0]


def thinking(budget: int) -> dict[str, Any]:
    return {"ignore_eos": True, "max_thinking_tokens": budget, "chat_template_kwargs": {"enable_thinking": True}}


def ending(client: OpenAI) -> dict[str, Any]:
    """What makes the usual answer stop before its most tokens."""
    ids = chat(client, [{"role": "user", "content": "What is the answer?"}], extra_body={"return_token_ids": True})
    return {"stop_token_ids": ids.model_extra["token_ids"][-1:]}


# ---- text


def test_a_response_has_openai_s_shape_and_the_text_of_a_chat_completion(client: OpenAI) -> None:
    reply = respond(client, instructions="Be brief.", metadata={"run": "7"})
    expected = chat(
        client, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the answer?"}]
    )
    assert reply.output_text == expected.message.content
    assert (reply.object, reply.status, reply.model) == ("response", "incomplete", MODEL)
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.id.startswith("resp_")
    assert [item.type for item in reply.output] == ["message"]
    assert (reply.instructions, reply.metadata, reply.store) == ("Be brief.", {"run": "7"}, False)
    assert reply.usage.output_tokens == 12
    assert reply.usage.total_tokens == reply.usage.input_tokens + 12
    assert reply.usage.input_tokens_details.cached_tokens >= 0
    openai.types.responses.Response.model_validate_json(reply.model_dump_json())


def test_items_are_read_as_the_messages_of_a_chat(client: OpenAI) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the answer?"}]
    messages += [{"role": "assistant", "content": "42"}, {"role": "user", "content": "And the question?"}]
    assert respond(client, input=INPUT).output_text == chat(client, messages).message.content


def test_an_answer_that_ends_by_itself_is_complete(client: OpenAI) -> None:
    reply = respond(client, extra_body=ending(client))
    assert reply.output_text
    assert (reply.status, reply.incomplete_details, reply.output[0].status) == ("completed", None, "completed")
    assert reply.completed_at >= reply.created_at


@pytest.mark.parametrize("given", ["What is the answer?", INPUT], ids=["text", "items"])
def test_a_stream_has_every_event_in_order_and_ends_with_the_same_response(client: OpenAI, given: Any) -> None:
    whole = respond(client, input=given)
    events = list(respond(client, input=given, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == whole.output_text == events[-4].text
    last = events[-1].response
    assert last.output_text == whole.output_text
    assert last.usage.output_tokens == 12
    assert last.id == events[0].response.id
    same = {"id", "created_at", "output", "usage"}
    assert last.model_dump(exclude=same) == whole.model_dump(exclude=same)


def test_the_client_s_own_stream_reads_it(client: OpenAI) -> None:
    params = {**GREEDY, "extra_body": ending(client)}
    with client.responses.stream(model=MODEL, input="What is the answer?", **params) as stream:
        said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == said


def test_log_probabilities_are_those_of_the_chat_completion(client: OpenAI) -> None:
    params: Any = {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    expected = chat(client, [{"role": "user", "content": "What is the answer?"}], logprobs=True, top_logprobs=2)
    wanted = [entry.model_dump() for entry in expected.logprobs.content]
    found = respond(client, **params).output[0].content[0].logprobs
    assert [entry.model_dump() for entry in found] == wanted
    events = list(respond(client, stream=True, **params))
    deltas = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in deltas] == [entry["token"] for entry in wanted]
    assert [entry.model_dump() for entry in events[-1].response.output[0].content[0].logprobs] == wanted


@pytest.mark.long
def test_many_log_probabilities_are_written_by_a_text_process_and_streamed_only_once(client: OpenAI) -> None:
    params: Any = {"top_logprobs": 20, "include": ["message.output_text.logprobs"], "max_output_tokens": 300}
    scores = {"logprobs": True, "top_logprobs": 20, "max_tokens": 300}
    expected = chat(client, [{"role": "user", "content": "What is the answer?"}], **scores).logprobs.content
    found = respond(client, **params).output[0].content[0].logprobs
    assert [entry.model_dump() for entry in found] == [entry.model_dump() for entry in expected]
    events = list(respond(client, stream=True, **params))
    deltas = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in deltas] == [entry.token for entry in expected]
    assert events[-1].response.output[0].content[0].logprobs == []


def test_reasoning_is_an_item_of_its_own_streamed_or_not(client: OpenAI) -> None:
    params = {"extra_body": thinking(4), "max_output_tokens": 24}
    reply = respond(client, **params)
    assert [item.type for item in reply.output] == ["reasoning", "message"]
    assert 0 < reply.usage.output_tokens_details.reasoning_tokens < 24
    events = list(respond(client, stream=True, **params))
    said = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    [done] = [event for event in events if event.type == "response.reasoning_text.done"]
    assert said == done.text == reply.output[0].content[0].text
    assert events[-1].response.output_text == reply.output_text
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]
    following = [*INPUT, *reply.output, {"role": "user", "content": "Why?"}]
    answer = {"role": "assistant", "content": reply.output_text, "reasoning_content": said}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the answer?"}]
    messages += [{"role": "assistant", "content": "42"}, {"role": "user", "content": "And the question?"}]
    messages += [answer, {"role": "user", "content": "Why?"}]
    assert respond(client, input=following).output_text == chat(client, messages).message.content


# ---- structured text


class Answer(pydantic.BaseModel):
    city: Literal["Oslo", "Rome"]


def test_parse_and_stream_return_objects(client: OpenAI) -> None:
    params: Any = {"model": MODEL, "input": "Where?", "temperature": 0, "max_output_tokens": 60, "text_format": Answer}
    reply = client.responses.parse(**params)
    assert isinstance(reply.output_parsed, Answer)
    with client.responses.stream(**params) as stream:
        assert stream.get_final_response().output_parsed == reply.output_parsed


def test_json_object_is_json(client: OpenAI) -> None:
    reply = respond(client, text={"format": {"type": "json_object"}}, max_output_tokens=4)
    assert reply.output_text.lstrip().startswith("{")


# ---- tools


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}], ids=str)
def test_a_call_is_an_item_streamed_or_not(client: OpenAI, choice: Any) -> None:
    tools = [WEATHER, TIME] if isinstance(choice, dict) else [WEATHER]
    params = {"tools": tools, "tool_choice": choice, "max_output_tokens": 200, "parallel_tool_calls": False}
    reply = respond(client, **params, extra_body={})
    [call] = reply.output
    assert (call.type, call.name, call.status, reply.status) == ("function_call", "weather", "completed", "completed")
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    events = list(respond(client, **params, extra_body={}, stream=True))
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert "".join(event.delta for event in deltas) == done.arguments == call.arguments
    added = next(event for event in events if event.type == "response.output_item.added").item
    last = events[-1].response.output[0]
    assert events[-1].type == "response.completed"
    assert (added.name, added.arguments, added.call_id) == ("weather", "", last.call_id)
    assert (last.id, last.arguments) == (done.item_id, call.arguments)


def test_an_agent_s_loop_of_three_calls(client: OpenAI) -> None:
    given: list[Any] = [{"role": "user", "content": "What is the weather?"}]
    messages: list[Any] = list(given)
    for _ in range(2):
        params = {"tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 200, "parallel_tool_calls": False}
        reply = respond(client, input=given, **params, extra_body={})
        [call] = reply.output
        given += [*reply.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
        function = {"name": "weather", "arguments": call.arguments}
        calls = [{"id": call.call_id, "type": "function", "function": function}]
        messages += [{"role": "assistant", "content": None, "tool_calls": calls}]
        messages += [{"role": "tool", "tool_call_id": call.call_id, "content": "sunny"}]
    reply = respond(client, input=given, tools=[WEATHER], tool_choice="none")
    assert reply.output_text == chat(client, messages).message.content != ""


# ---- what is refused


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"previous_response_id": "resp_1"}, "stores no responses"),
        ({"conversation": "conv_1"}, "stores no responses"),
        ({"background": True}, "stores no responses"),
        ({"store": True}, "set store to false"),
        ({"prompt": {"id": "pmpt_1"}}, "send instructions and input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0] has the type 'web_search'"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "send the item itself"),
        ({"input": [{"type": "computer_call"}]}, "'computer_call', which is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "reads text alone"),
        ({"input": [{"role": "nobody", "content": "Hi"}]}, "has the role 'nobody'"),
        ({"top_logprobs": 2}, "needs include"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
        ({"extra_body": {"n": 2}}, "n is 2"),
        ({"extra_body": {"messages": []}}, "not a field of this API"),
        ({"extra_body": {"input": None}}, "input is None"),
        ({"text": {"format": {"type": "xml"}}}, "text has the format"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"input": "long " * 4000}, "Please shorten the input"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_with_advice(client: OpenAI, params: Any, words: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            respond(client, **params, stream=stream)
        assert words in caught.value.message
    first = next(iter(params))
    if words.startswith(first):
        assert caught.value.param == first


def test_nothing_is_stored(client: OpenAI) -> None:
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="stores none"):
            call("resp_1")


def test_values_without_effect_are_accepted(client: OpenAI) -> None:
    more: Any = {"store": False, "background": False, "truncation": "auto", "service_tier": "auto", "user": "me"}
    assert respond(client, **more, include=["reasoning.encrypted_content"]).output_text == respond(client).output_text


def test_a_wrong_value_anywhere_is_a_400_of_openai_s_shape(server: Running) -> None:
    fields = ("input", "instructions", "tools", "tool_choice", "text", "reasoning", "include", "metadata", "stream")
    more = ("max_output_tokens", "top_logprobs", "truncation", "store", "background", "parallel_tool_calls", "user")
    body = {"input": "Hi", "max_output_tokens": 1}
    nested = [{"input": [{"role": "user", "content": value}]} for value in (7, [7], [{}], [{"type": 3}], None)]
    nested += [{"input": [{"type": "function_call", name: 7}]} for name in ("name", "call_id", "arguments")]
    nested += [{"input": [{"type": kind}]} for kind in ("function_call", "function_call_output", "message")]
    nested += [{"input": [{"type": "reasoning", "content": [7]}]}, {"text": {"format": {"type": "json_schema"}}}]
    nested += [{**body, "tools": [{"type": "function", "name": 7}]}, {**body, "tool_choice": {"type": "function"}}]
    statuses = []
    for wrong in [*wrong_bodies(body, fields + more), *nested]:
        response = server.post("/v1/responses", wrong)
        statuses.append(response.status_code)
        if response.status_code != 200:
            assert response.status_code == 400, (wrong, response.text)
            assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    assert statuses.count(400) > len(statuses) * 0.7
    assert "Traceback" not in server.logged()


def test_a_long_request_is_not_repeated_in_its_reply(server: Running) -> None:
    tools = [{**WEATHER, "description": "x" * 70_000}]
    body = {"input": "Hi", "max_output_tokens": 1, "tools": tools, "tool_choice": "none"}
    reply = server.post("/v1/responses", body).json()
    assert reply["tools"] == []
    assert server.post("/v1/responses", body | {"tools": [WEATHER]}).json()["tools"] == [WEATHER]
