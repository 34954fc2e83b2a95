"""Structured output, tools and reasoning over HTTP, with a real engine and the clients that people use."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from running import Running, running

from processes import is_running
from schemas import UNSUPPORTED, corpus
from tiny import make_tiny_model

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TALK = [{"role": "user", "content": "Hi"}]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look_up", "parameters": PERSON, "strict": True}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = make_tiny_model(tmp_path_factory.mktemp("structured") / "llama", max_position_embeddings=1024)
    with running(model, "--kv-tokens", "4096", "--max-sequences", "32") as started:
        yield started
        started.wait_until(started.is_idle)
        assert started.metric("kv_cache_usage_perc") == 0
        ends = ("finished", "aborted", "rejected", "failed")
        counts = {name: started.metric(f"requests_{name}_total") for name in ("submitted", *ends)}
        assert counts["submitted"] == sum(counts[name] for name in ends)
        assert "Traceback" not in started.logged()


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def name(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_schemas_hold_for_many_at_once_beside_plain_requests(server: Running) -> None:
    schemas = corpus()[::8]
    alone = server.post(COMPLETION, {"prompt": [5, 6], "max_tokens": 20, "temperature": 0}).json()["choices"][0]["text"]

    def ask(number: int) -> bool:
        if number % 3 == 0:
            reply = server.post(COMPLETION, {"prompt": [5, 6], "max_tokens": 20, "temperature": 0})
            assert reply.json()["choices"][0]["text"] == alone, "a plain answer does not change"
            return True
        schema = schemas[number % len(schemas)]
        body = {"messages": TALK, "response_format": schema_format(schema), "max_tokens": 300, "n": 1 + number % 2}
        reply = server.post(CHAT, body)
        assert reply.status_code == 200, reply.text
        for choice in reply.json()["choices"]:
            if choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(choice["message"]["content"]), schema)
        return any(choice["finish_reason"] == "stop" for choice in reply.json()["choices"])

    with ThreadPoolExecutor(12) as pool:
        done = list(pool.map(ask, range(60)))
    assert sum(done) > 45


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 2, "logprobs": True, "top_logprobs": 2},
        {"temperature": 0, "stop": ["@"], "return_token_ids": True},
        {"prompt_logprobs": 1, "presence_penalty": 1.0},
    ],
    ids=str,
)
def test_a_stream_gives_what_a_whole_reply_gives(server: Running, more: dict[str, Any]) -> None:
    body = {"messages": TALK, "response_format": schema_format(PERSON), "max_tokens": 200, "seed": 4, **more}
    whole = server.post(CHAT, body).json()
    texts = [""] * len(whole["choices"])
    for line in server.post(CHAT, {**body, "stream": True}).text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]


def test_the_client_parses_into_a_class(client: openai.OpenAI, name: str) -> None:
    pydantic = pytest.importorskip("pydantic")
    small = pydantic.create_model("Small", ok=(bool, ...), kind=(str, pydantic.Field(pattern="^(a|b)$")))
    reply = client.chat.completions.parse(model=name, messages=TALK, response_format=small, max_tokens=300)  # type: ignore[arg-type]
    assert reply.choices[0].finish_reason == "stop"
    assert isinstance(reply.choices[0].message.parsed.ok, bool)  # type: ignore[union-attr]


@pytest.mark.parametrize(("schema", "path"), UNSUPPORTED, ids=[path for _, path in UNSUPPORTED])
def test_what_cannot_be_enforced_is_a_400_with_its_path(server: Running, schema: dict[str, Any], path: str) -> None:
    reply = server.post(CHAT, {"messages": TALK, "response_format": schema_format(schema)})
    assert reply.status_code == 400
    assert f"(at {path})" in reply.json()["error"]["message"]


# ---- tools


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


def test_a_required_call_is_made_and_matches_its_schema(server: Running) -> None:
    body = {
        "messages": TALK,
        "tools": TOOLS,
        "tool_choice": "required",
        "max_tokens": 400,
        "parallel_tool_calls": False,
    }
    for seed in range(6):
        [choice] = server.post(CHAT, {**body, "seed": seed}).json()["choices"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        [(called, arguments)] = calls_of(choice["message"])
        assert called in ("look_up", "now")
        jsonschema.validate(arguments, PERSON if called == "look_up" else {"type": "object", "maxProperties": 0})


def test_a_named_tool_is_called(server: Running) -> None:
    body = {"messages": TALK, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}}}
    [choice] = server.post(CHAT, {**body, "max_tokens": 200}).json()["choices"]
    assert [called for called, _ in calls_of(choice["message"])] == ["now"]


def test_streamed_calls_join_to_the_whole_ones(server: Running, client: openai.OpenAI, name: str) -> None:
    body: dict[str, Any] = {"messages": TALK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 300, "seed": 3}
    whole = server.post(CHAT, body).json()["choices"][0]
    calls: dict[int, list[str]] = {}
    ids, reason = set(), None
    for chunk in client.chat.completions.create(model=name, stream=True, **body):
        choice = chunk.choices[0]
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            if call.id:
                ids.add(call.id)
                calls[call.index] = [call.function.name or "", ""]
            calls[call.index][1] += call.function.arguments or ""
    made = whole["message"]["tool_calls"]
    assert [tuple(each) for each in calls.values()] == [
        (call["function"]["name"], call["function"]["arguments"]) for call in made
    ]
    assert len(ids) == len(calls) and reason == whole["finish_reason"]


def test_an_agent_loop_of_three_calls(client: openai.OpenAI, name: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "Who is it, and what time is it?"}]
    for turn in range(3):
        reply = client.chat.completions.create(
            model=name, messages=messages, tools=TOOLS, tool_choice="required", max_tokens=400, seed=turn,
            parallel_tool_calls=False,
        )  # fmt: skip
        message = reply.choices[0].message
        assert message.tool_calls
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"turn": turn})}
            for call in message.tool_calls
        ]
    last = client.chat.completions.create(model=name, messages=messages, tools=TOOLS, max_tokens=10)
    assert last.choices[0].finish_reason in ("length", "stop", "tool_calls")


def test_calls_of_earlier_turns_are_in_the_prompt_without_tools_too(server: Running) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"name": "Ana"}'}}
    talk = [*TALK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    talk.append({"role": "tool", "tool_call_id": "call_1", "content": "42"})
    tokens = server.post("/tokenize", {"messages": talk}).json()["tokens"]
    prompt = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert '"look_up"' in prompt and '"Ana"' in prompt, prompt


def test_a_call_or_json_if_both_are_asked_for(server: Running) -> None:
    body = {"messages": TALK, "tools": TOOLS, "response_format": schema_format(PERSON), "max_tokens": 300}
    for seed in range(4):
        [choice] = server.post(CHAT, {**body, "seed": seed}).json()["choices"]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
        elif choice["finish_reason"] == "tool_calls":
            assert calls_of(choice["message"])


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0] is"),
        ({"tools": [{"type": "web_search"}]}, "tools[0] is"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0] has the name 'a b'"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "two functions with the name 'now'"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice is 'sometimes'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "names 'x', which is not"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "leave one"),
        ({"tools": TOOLS, "parallel_tool_calls": "yes"}, "parallel_tool_calls is 'yes'"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}]},
            'tools cannot be used: Unimplemented keys: ["not"]',
        ),
        ({"max_thinking_tokens": -1}, "max_thinking_tokens is -1"),
        ({"use_beam_search": True, "temperature": 0, "best_of": 2, "response_format": {"type": "json_object"}}, "beam"),
    ],
    ids=str,
)
def test_wrong_fields_are_a_400(server: Running, field: dict[str, Any], why: str) -> None:
    reply = server.post(CHAT, {"messages": TALK, **field})
    assert reply.status_code == 400, reply.text
    assert why in reply.json()["error"]["message"]


# ---- reasoning

REASONS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}\n{% endfor %}assistant: "
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif opens %}<think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def reasoner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_tiny_model(tmp_path_factory.mktemp("thinker") / "llama", max_position_embeddings=1024)
    (folder / "chat_template.jinja").write_text(REASONS)
    with running(folder, "--kv-tokens", "4096") as started:
        yield started


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("opens", [False, True])
def test_reasoning_is_bounded_and_the_answer_behind_it_matches(reasoner: Running, opens: bool, stream: bool) -> None:
    body = {
        "messages": TALK,
        "chat_template_kwargs": {"opens": opens},
        "max_thinking_tokens": 12,
        "response_format": schema_format(PERSON),
        "max_tokens": 300,
        "stream": stream,
        "stream_options": {"include_usage": True} if stream else None,
    }
    seen = 0
    for seed in range(4):
        reply = reasoner.post(CHAT, {**body, "seed": seed})
        assert reply.status_code == 200, reply.text
        content, reasoning, reason, used = read_reply(reply.text if stream else reply.json())
        seen += bool(reasoning)
        tokens = used["completion_tokens_details"]["reasoning_tokens"]
        assert bool(tokens) >= bool(reasoning) and tokens <= 40  # the markers are several tokens here
        if reason == "stop":
            jsonschema.validate(json.loads(content), PERSON)
    assert seen > 0 or not opens


def read_reply(found: Any) -> tuple[str, str, str | None, dict[str, Any]]:
    """The content, the reasoning, the finish reason and the usage of a reply, whole or streamed."""
    if isinstance(found, dict):
        message = found["choices"][0]["message"]
        assert message.get("reasoning") == message.get("reasoning_content")
        return message["content"], message.get("reasoning") or "", found["choices"][0]["finish_reason"], found["usage"]
    content = reasoning = ""
    reason, used = None, {}
    for line in found.splitlines():
        if line.startswith("data: {"):
            chunk = json.loads(line.removeprefix("data: "))
            used = chunk.get("usage") or used
            for choice in chunk["choices"]:
                content += choice["delta"].get("content") or ""
                reasoning += choice["delta"].get("reasoning") or ""
                reason = choice["finish_reason"] or reason
    return content, reasoning, reason, used


def test_reasoning_is_left_out_if_asked(thinker: Running) -> None:
    body = {
        "messages": TALK,
        "chat_template_kwargs": {"enable_thinking": True},
        "max_thinking_tokens": 5,
        "max_tokens": 40,
    }
    shown = thinker.post(CHAT, {**body, "seed": 1}).json()["choices"][0]["message"]
    hidden = thinker.post(CHAT, {**body, "seed": 1, "include_reasoning": False}).json()["choices"][0]["message"]
    assert shown["reasoning"] and "reasoning" not in hidden and hidden["content"] == shown["content"]


def test_a_prompt_that_closes_the_reasoning_has_none(thinker: Running) -> None:
    body = {"messages": TALK, "chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 200}
    reply = thinker.post(CHAT, {**body, "response_format": schema_format({"enum": ["a", "b"]})}).json()
    assert re.fullmatch(r'\s*"[ab]"\s*', reply["choices"][0]["message"]["content"])
    assert "completion_tokens_details" not in reply["usage"]


# ---- what goes wrong


def test_clients_that_leave_while_their_grammar_is_compiled_leave_nothing(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")

    def leave(number: int) -> None:
        values = [f"{number}-{place}" for place in range(2000)]
        body = json.dumps({"messages": TALK, "response_format": schema_format({"enum": values})}).encode()
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(
                b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body))
            )
            connection.sendall(body)
            threading.Event().wait(0.02 * (number % 8))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(24)))
    server.wait_until(server.is_idle)
    assert server.metric("kv_cache_usage_perc") == 0


@pytest.mark.long
@pytest.mark.parametrize("signal_to_server", [signal.SIGTERM, signal.SIGKILL], ids=["TERM", "KILL"])
def test_an_engine_killed_and_a_server_ended_while_grammars_are_compiled_leave_nothing(
    tmp_path: Path, signal_to_server: signal.Signals
) -> None:
    model, clients, kills = make_tiny_model(tmp_path / "llama", max_position_embeddings=1024), 8, 2
    ends: Counter[int] = Counter()
    with running(model, "--kv-tokens", "4096", "--log-level", "error") as server, ThreadPoolExecutor(clients) as pool:

        def ask(number: int) -> int:
            """Send a schema that no other request has, and retry as the server asks for it."""
            schema = {"enum": [f"{number}-{place}" for place in range(3000)]}
            body = {"messages": TALK, "response_format": schema_format(schema), "max_tokens": 40, "temperature": 0}
            while (reply := server.post(CHAT, body)).status_code == 503:
                ends[503] += 1
                time.sleep(float(reply.headers["retry-after"]))
            if reply.status_code == 200 and reply.json()["choices"][0]["finish_reason"] == "stop":
                jsonschema.validate(json.loads(reply.json()["choices"][0]["message"]["content"]), schema)
            ends[reply.status_code] += 1
            return reply.status_code

        for kill in range(kills):
            asked = [pool.submit(ask, kill * 100 + number) for number in range(2 * clients)]
            server.wait_until(lambda known=ends[200]: ends[200] > known)
            os.kill(server.engine_pid(), signal.SIGKILL)
            assert {each.result() for each in asked} == {200}
            server.wait_until(server.is_idle)
        assert server.metric("engine_restarts_total") == kills and ends[503] > 0
        assert server.metric("kv_cache_usage_perc") == 0

        asked = [pool.submit(ask, 1000 + number) for number in range(4 * clients)]
        server.wait_until(lambda known=ends[200]: ends[200] > known)
        processes = server._children(("",))
        server.process.send_signal(signal_to_server)
        server.process.wait(60)
        for each in asked:
            each.cancel()
        server.wait_until(lambda: not any(map(is_running, processes)), 30)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for level in range(levels):
        schema = {"type": "object", "properties": {str(level): schema}, "required": [str(level)]}
    return schema


HOSTILE: list[dict[str, Any]] = [
    {"regex": "(a|a)*" * 200 + "b"},
    {"regex": "((a{1,50}){1,50}){1,50}"},
    {"regex": "(.*.*.*.*.*){10,60}x"},
    {"regex": "(x+x+)+y" * 50},
    {"json": {"type": "string", "minLength": 100_000_000}},
    {"json": {"type": "array", "minItems": 1_000_000, "items": {"type": "integer"}}},
    {"json": {"enum": [f"value {number}" for number in range(15_000)]}},
    {"json": {"allOf": [{"anyOf": [{"type": "string", "maxLength": i + j} for i in range(6)]} for j in range(12)]}},
    {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
    {"json": nested(180)},
    {"json": nested(300)},
    {
        "json": {
            "$ref": "#/$defs/t",
            "$defs": {"t": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/t"}}] * 60}},
        }
    },
    {"grammar": 'start: a\na: a a | a a a | "x"'},
    {
        "grammar": "start: "
        + " ".join(f"r{i}" for i in range(3000))
        + "\n"
        + "\n".join(f'r{i}: "x"*' for i in range(3000))
    },
    {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)) + '\nr40: "x"'},
]


@pytest.mark.parametrize("structured", HOSTILE, ids=lambda each: str(each)[:40])
def test_a_hostile_format_is_refused_or_served_within_its_limits(server: Running, structured: dict[str, Any]) -> None:
    reply = server.post(COMPLETION, {"prompt": [5], "max_tokens": 8, "structured": structured}, timeout=60)
    assert reply.status_code in (200, 400), reply.text
    assert reply.status_code == 200 or "\n" not in reply.json()["error"]["message"]
    assert server.is_healthy()
