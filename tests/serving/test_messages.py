"""Anthropic's Messages API, as Anthropic's own client meets it; each answer is also that of a chat completion."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import pydantic
import pytest
from anthropic import Anthropic
from api_model import MODEL, SCHEMA, wrong_bodies
from running import Running

USER: Any = {"role": "user", "content": "What is the answer?"}
GREEDY: dict[str, Any] = {"ignore_eos": True, "temperature": 0}
WEATHER: Any = {"name": "weather", "description": "The weather", "input_schema": SCHEMA, "strict": True}
TIME: Any = {**WEATHER, "name": "time"}
THINKING: Any = {"type": "enabled", "budget_tokens": 4}


@pytest.fixture(scope="module")
def server(thinker: Running) -> Running:
    return thinker


@pytest.fixture(scope="module")
def client(server: Running) -> Anthropic:
    return Anthropic(base_url=server.url, api_key="any", max_retries=0)


def ask(client: Anthropic, **params: Any) -> Any:
    return client.messages.create(
        **{"model": MODEL, "messages": [USER], "max_tokens": 12, "extra_body": GREEDY, **params}
    )


def stream(client: Anthropic, **params: Any) -> tuple[list[Any], Any]:
    """The raw events of a stream, and the message that the client makes of them."""
    call = {"model": MODEL, "messages": [USER], "max_tokens": 12, "extra_body": GREEDY, **params}
    with client.messages.stream(**call) as opened:
        own = ("text", "thinking", "input_json", "signature")
        return [event for event in opened if event.type not in own], opened.get_final_message()


def chat(server: Running, messages: Any, **params: Any) -> Any:
    body = {"model": MODEL, "messages": messages, "max_tokens": 12, **GREEDY, **params}
    return server.post("/v1/chat/completions", body).json()["choices"][0]


# ---- text


def test_a_message_has_anthropic_s_shape_and_the_text_of_a_chat_completion(server: Running, client: Anthropic) -> None:
    reply = ask(client, system="Be brief.")
    expected = chat(server, [{"role": "system", "content": "Be brief."}, USER])
    assert [block.type for block in reply.content] == ["text"]
    assert reply.content[0].text == expected["message"]["content"]
    assert (reply.type, reply.role, reply.model, reply.stop_reason) == ("message", "assistant", MODEL, "max_tokens")
    assert reply.id == f"msg_{reply._request_id}"
    assert reply.usage.output_tokens == 12
    again = ask(client, system="Be brief.").usage
    assert again.cache_read_input_tokens > 0
    total = reply.usage.input_tokens + reply.usage.cache_read_input_tokens
    assert again.input_tokens + again.cache_read_input_tokens == total


def test_blocks_are_read_as_the_messages_of_a_chat(server: Running, client: Anthropic) -> None:
    text: Any = {"type": "text", "text": "What is the answer?", "cache_control": {"type": "ephemeral"}}
    system: Any = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    given: Any = [{"role": "user", "content": [text]}, {"role": "assistant", "content": "42"}, USER]
    messages = [USER, {"role": "assistant", "content": "42"}, USER]
    expected = chat(server, [{"role": "system", "content": "Be brief.\nBe kind."}, *messages])
    assert ask(client, system=system, messages=given).content[0].text == expected["message"]["content"]


def test_a_stream_has_every_event_in_order_and_the_same_message(client: Anthropic) -> None:
    whole = ask(client)
    events, message = stream(client)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert message.content[0].text == whole.content[0].text
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 12)
    assert events[0].message.usage.input_tokens == message.usage.input_tokens
    same = {"id", "content", "usage"}
    assert message.model_dump(exclude=same) == whole.model_dump(exclude=same)


def test_a_stop_sequence_is_named(client: Anthropic) -> None:
    text = ask(client).content[0].text
    stop = text[2:4]
    for reply in (ask(client, stop_sequences=[stop]), stream(client, stop_sequences=[stop])[1]):
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", stop)
        assert reply.content[0].text == text[: text.index(stop)]


def test_the_last_message_is_continued_if_it_is_the_assistant_s(server: Running, client: Anthropic) -> None:
    messages: Any = [USER, {"role": "assistant", "content": "The answer is"}]
    expected = chat(server, messages, continue_final_message=True, add_generation_prompt=False)
    assert ask(client, messages=messages).content[0].text == expected["message"]["content"]


def test_thinking_is_a_block_of_its_own_streamed_or_not(server: Running, client: Anthropic) -> None:
    reply = ask(client, thinking=THINKING, max_tokens=24)
    assert [block.type for block in reply.content] == ["thinking", "text"]
    assert 0 < reply.usage.output_tokens_details.thinking_tokens < 24
    events, message = stream(client, thinking=THINKING, max_tokens=24)
    assert message.content[0].thinking == reply.content[0].thinking
    assert message.content[1].text == reply.content[1].text
    assert [event.index for event in events if event.type == "content_block_start"] == [0, 1]
    assert [block.type for block in ask(client, thinking={"type": "disabled"}).content] == ["text"]
    following = [USER, {"role": "assistant", "content": reply.content}, USER]
    answer = {"role": "assistant", "content": reply.content[1].text, "reasoning_content": reply.content[0].thinking}
    expected = chat(server, [USER, answer, USER])["message"]["content"]
    assert ask(client, messages=following).content[0].text == expected


class Answer(pydantic.BaseModel):
    city: Literal["Oslo", "Rome"]


def test_parse_returns_objects(client: Anthropic) -> None:
    params: Any = {"model": MODEL, "messages": [USER], "max_tokens": 60, "output_format": Answer}
    assert isinstance(client.messages.parse(**params).parsed_output, Answer)


# ---- tokens


def test_tokens_are_counted_as_a_request_reads_them(client: Anthropic) -> None:
    for more in ({}, {"system": "Be brief."}, {"tools": [WEATHER], "system": "Be brief."}):
        usage = ask(client, **more, max_tokens=1).usage
        counted = client.messages.count_tokens(model=MODEL, messages=[USER], **more).input_tokens
        assert counted == usage.input_tokens + usage.cache_read_input_tokens


# ---- tools


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}], ids=str)
def test_a_call_is_a_block_streamed_or_not(client: Anthropic, choice: Any) -> None:
    tools = [WEATHER] if choice["type"] == "any" else [WEATHER, TIME]
    params: Any = {"tools": tools, "tool_choice": {**choice, "disable_parallel_tool_use": True}, "max_tokens": 200}
    reply = ask(client, **params, extra_body={"temperature": 0})
    [call] = reply.content
    assert (call.type, call.name, reply.stop_reason) == ("tool_use", "weather", "tool_use")
    assert call.input["city"] in ("Oslo", "Rome")
    events, message = stream(client, **params, extra_body={"temperature": 0})
    assert (message.content[0].name, message.content[0].input) == ("weather", call.input)
    assert message.stop_reason == "tool_use"
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert set(deltas) == {"input_json_delta"}


def test_an_agent_s_loop_of_three_calls(server: Running, client: Anthropic) -> None:
    given: list[Any] = [USER]
    messages: list[Any] = [USER]
    for number in range(2):
        choice = {"type": "any", "disable_parallel_tool_use": True}
        params: Any = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 200, "extra_body": {"temperature": 0}}
        reply = ask(client, messages=given, **params) if number else stream(client, messages=given, **params)[1]
        [call] = reply.content
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
        given += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
        function = {"name": "weather", "arguments": call.input}
        messages += [{"role": "assistant", "content": None, "tool_calls": [{"id": call.id, "function": function}]}]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    given[-1]["content"].append({"type": "text", "text": "And tomorrow?"})
    messages.append({"role": "user", "content": "And tomorrow?"})
    reply = ask(client, messages=given, tools=[WEATHER], tool_choice={"type": "none"})
    assert reply.content[0].text == chat(server, messages)["message"]["content"] != ""


# ---- what is refused


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"extra_body": {"max_tokens": None}}, "max_tokens is missing"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "has the type 'web_search_20250305'"),
        ({"tools": [{"name": "x"}]}, "has the input_schema None"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "reads text alone"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "reads text alone"),
        ({"messages": []}, "messages is []"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "has the role 'tool'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tool_choice": {"type": "tool"}}, "or tool with a name"),
        ({"thinking": {"type": "enabled"}}, "no budget_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"container": "c"}, "container is not supported"),
        ({"extra_body": {"n": 2}}, "n is 2"),
        ({"messages": [{"role": "user", "content": "long " * 4000}]}, "Please shorten the messages"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_with_advice(client: Anthropic, params: Any, words: str) -> None:
    for streams in (False, True):
        with pytest.raises(anthropic.BadRequestError) as caught:
            ask(client, **params, stream=streams)
        assert words in caught.value.message
        body: Any = caught.value.body
        assert body.keys() == {"type", "error", "request_id"}
        assert body["error"]["type"] == "invalid_request_error"
        assert caught.value.request_id == body["request_id"]


def test_another_model_is_not_found(client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(client, model="claude")
    body: Any = caught.value.body
    assert body["error"]["type"] == "not_found_error"


def test_a_wrong_value_anywhere_is_a_400_of_anthropic_s_shape(server: Running) -> None:
    fields = ("messages", "system", "tools", "tool_choice", "thinking", "output_config", "metadata", "stream")
    body = {"messages": [USER], "max_tokens": 1}
    blocks: list[Any] = [7, [7], [{}], [{"type": 3}], None, [{"type": "text"}], [{"type": "tool_result"}]]
    blocks += [[{"type": "tool_use", "id": "1", "name": "x", "input": 7}], [{"type": "thinking", "thinking": 7}]]
    blocks += [[{"type": "tool_result", "tool_use_id": "1", "content": [7]}], [{"type": "tool_use"}]]
    nested = [{**body, "messages": [{"role": role, "content": c}]} for role in ("user", "assistant") for c in blocks]
    nested += [{**body, "thinking": {"type": "enabled", "budget_tokens": value}} for value in ("x", -1, 1.5)]
    nested += [{**body, "output_config": {"format": value}} for value in (7, {"type": "json_schema"}, [])]
    statuses = []
    for wrong in [*wrong_bodies(body, (*fields, "max_tokens", "stop_sequences")), *nested]:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            response = server.post(path, wrong)
            statuses.append(response.status_code)
            if response.status_code != 200:
                assert response.status_code == 400, (wrong, response.text)
                assert response.json()["type"] == "error"
                assert response.json()["error"].keys() == {"type", "message"}
    assert statuses.count(400) > len(statuses) * 0.6
    assert "Traceback" not in server.logged()
