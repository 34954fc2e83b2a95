"""Every field that OpenAI and vLLM document for a request's body: read, harmless, or refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from running import Running, running

from chairlift.openai.fields import IGNORED, refused_fields
from chairlift.openai.params import set_aside_unknown

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1},
    COMPLETION: {"prompt": "Hello", "max_tokens": 1},
}

# As of openai 3.49 and vLLM of August 2026, and vLLM's earlier names.
OPENAI_CHAT = """
    audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
    messages metadata modalities model moderation n parallel_tool_calls prediction presence_penalty
    prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format
    safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools
    top_logprobs top_p user verbosity web_search_options
"""
OPENAI_COMPLETION = """
    best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop
    stream stream_options suffix temperature top_p user
"""
VLLM = """
    add_special_tokens allowed_token_ids bad_words cache_salt echo ec_transfer_params guided_choice
    guided_decoding_backend guided_grammar guided_json guided_json_object guided_regex
    guided_whitespace_pattern ignore_eos include_stop_str_in_output kv_transfer_params length_penalty
    logits_processors logprob_token_ids max_repetition_pattern_size min_p min_repetition_pattern_size
    min_tokens priority prompt_logprobs repetition_detection repetition_min_count repetition_penalty
    request_id response_format return_token_ids return_token_offsets return_tokens_as_token_ids
    routed_experts_prompt_start session_id skip_special_tokens spaces_between_special_tokens stop_token_ids
    stream_interval structured_outputs thinking_token_budget top_k truncate_prompt_tokens truncation_side
    use_beam_search vllm_xargs
"""
VLLM_CHAT = """
    add_generation_prompt chat_template chat_template_kwargs continue_final_message documents
    include_reasoning media_io_kwargs mm_processor_kwargs return_assistant_tokens_mask return_prompt_text
"""
FIELDS = {
    CHAT: sorted({*OPENAI_CHAT.split(), *VLLM.split(), *VLLM_CHAT.split()}),
    COMPLETION: sorted({*OPENAI_COMPLETION.split(), *VLLM.split(), "prompt_embeds"}),
}
# Values that ask for something, for fields that are refused then.
ASKING: dict[str, Any] = {
    "add_special_tokens": {CHAT: True, COMPLETION: False},
    "audio": {"voice": "alloy", "format": "wav"},
    "chat_template": "{{ messages }}",
    "documents": [{"title": "a", "text": "b"}],
    "echo": True,
    "ec_transfer_params": {"a": 1},
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "guided_choice": ["yes", "no"],
    "guided_grammar": 'root ::= "yes"',
    "guided_json": {"type": "object"},
    "guided_json_object": True,
    "guided_regex": "[0-9]+",
    "include_reasoning": False,
    "kv_transfer_params": {"a": 1},
    "logits_processors": ["module.Class"],
    "logprob_token_ids": [5],
    "max_repetition_pattern_size": 4,
    "media_io_kwargs": {"video": {}},
    "min_repetition_pattern_size": 2,
    "mm_processor_kwargs": {"a": 1},
    "modalities": ["text", "audio"],
    "moderation": {"model": "omni"},
    "parallel_tool_calls": "yes",
    "prompt_embeds": ["aGk="],
    "repetition_detection": {"min_count": 3},
    "repetition_min_count": 3,
    "response_format": {"type": "json_object"},
    "return_prompt_text": True,
    "return_tokens_as_token_ids": True,
    "structured_outputs": {"json": {"type": "object"}},
    "suffix": "the end",
    "thinking_token_budget": 100,
    "tool_choice": "required",
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "truncation_side": "right",
    "verbosity": "low",
    "vllm_xargs": {"a": 1},
    "web_search_options": {"search_context_size": "low"},
}


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_every_documented_field_is_known(path: str) -> None:
    _, unknown = set_aside_unknown(dict.fromkeys(FIELDS[path], 1), chat=path == CHAT)
    assert unknown == []
    assert not IGNORED & refused_fields(chat=path == CHAT).keys()


REFUSED = [(path, name) for path in FIELDS for name in FIELDS[path] if name in refused_fields(chat=path == CHAT)]


@pytest.mark.parametrize(("path", "name"), REFUSED)
def test_a_field_that_would_change_the_answer_is_refused_by_name(server: Running, path: str, name: str) -> None:
    value = ASKING[name]
    value = value[path] if isinstance(value, dict) and path in value else value
    response = server.post(path, {**BODIES[path], name: value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", name)
    assert error["message"].startswith(f"{name} is ")
    for harmless in (None, *refused_fields(chat=path == CHAT)[name].neutral):
        response = server.post(path, {**BODIES[path], name: harmless})
        assert response.status_code == 200, response.text
        assert "x-chairlift-ignored-fields" not in response.headers


def test_the_documentation_lists_the_refused_fields() -> None:
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    rows = page.partition("These are refused:")[2].partition("\n\nConversations")[0].splitlines()
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row.rpartition(" | ")[0])} - {"left", "medium"}
    assert listed == refused_fields(chat=True).keys() | refused_fields(chat=False).keys()


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ({"guided_json": {"enum": [1, 2]}}, r"\s*[12]\s*"),
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "yes"'}, "yes"),
        ({"structured_outputs": {"choice": ["yes"]}}, "yes"),
        ({"structured": {"regex": "b+a"}}, "b+a"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 7}}}},
            r"\s*7\s*",
        ),
    ],
    ids=lambda each: str(next(iter(each))) if isinstance(each, dict) else "",
)
def test_an_answer_is_held_to_a_format_under_each_of_its_names(
    server: Running, path: str, field: dict[str, Any], expected: str
) -> None:
    reply = server.post(path, {**BODIES[path], **field, "max_tokens": 60, "logit_bias": {}})
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    text = choice["text"] if path == COMPLETION else choice["message"]["content"]
    assert choice["finish_reason"] != "stop" or re.fullmatch(expected, text), text
    two = server.post(path, {**BODIES[path], "guided_regex": "a", "structured": {"regex": "b"}})
    assert (two.status_code, two.json()["error"]["param"]) == (400, "structured")


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path in FIELDS for name in FIELDS[path] if name in IGNORED - {"stream_options"}]
)
def test_a_field_that_changes_nothing_is_accepted(server: Running, path: str, name: str) -> None:
    response = server.post(path, {**BODIES[path], name: False})
    assert response.status_code == 200
    assert "x-chairlift-ignored-fields" not in response.headers


def test_tools_that_are_not_to_be_called_change_nothing(server: Running) -> None:
    body = {**BODIES[CHAT], "max_tokens": 5, "temperature": 0}
    plain = server.post(CHAT, body).json()
    for declined in (
        {"tools": ASKING["tools"], "tool_choice": "none"},
        {"functions": ASKING["functions"], "function_call": "none"},
    ):
        reply = server.post(CHAT, {**body, **declined})
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"] == plain["choices"]
        assert reply.json()["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    shown = server.post(CHAT, {**body, "tools": ASKING["tools"], "tool_choice": "auto"})
    assert shown.json()["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]


def test_a_conversation_with_tool_calls_and_their_results_is_answered(server: Running) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "user", "content": "How warm is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"},
    ]
    reply = server.post(CHAT, {"messages": messages, "max_tokens": 2})
    assert reply.status_code == 200, reply.text
    ids = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    prompt = server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert '"name": "weather", "arguments": {"city": "Paris"}' in prompt  # the template has no tools of its own
    assert "21 degrees" in prompt and "None" not in prompt
    messages[1]["tool_calls"] = [{**call, "function": {"name": "weather", "arguments": "{city"}}]
    refused = server.post(CHAT, {"messages": messages})
    assert refused.status_code == 400 and "not JSON" in refused.json()["error"]["message"]


@pytest.mark.long
def test_the_effort_of_reasoning_reaches_the_chat_template(tmp_path: Path) -> None:
    from tiny import CHAT_TEMPLATE, make_tiny_model

    model = make_tiny_model(tmp_path / "reasoning", chat_template="{{ reasoning_effort }}" + CHAT_TEMPLATE)
    with running(model) as server:
        ids = server.post("/tokenize", {**BODIES[CHAT], "reasoning_effort": "low"}).json()["tokens"]
        assert server.post("/detokenize", {"tokens": ids}).json()["prompt"].startswith("low")
        assert server.post(CHAT, {**BODIES[CHAT], "reasoning_effort": 3}).status_code == 400
