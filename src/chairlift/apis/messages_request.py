"""Reads the body of Anthropic's Messages API as that of a chat completion."""

from __future__ import annotations

from typing import Any

from chairlift.apis.conversation import Conversation, other_fields, read_list, read_string, read_texts
from chairlift.core.errors import RequestError
from chairlift.core.values import show
from chairlift.openai.params import get

Fields = dict[str, Any]
_TEXT = ("text",)
_REFUSED = {
    "container": "not supported: this server runs no code; leave it out",
    "mcp_servers": "not supported: this server calls no others; leave it out",
}
_WITHOUT_EFFECT = ("cache_control", "inference_geo", "speed", "diagnostics", "user_profile_id", "workspace_id")
_OWN = frozenset(
    {
        *(
            "system",
            "messages",
            "stop_sequences",
            "thinking",
            "output_config",
            "tools",
            "tool_choice",
            "stream_options",
        ),
        *("logprobs", "top_logprobs", *_WITHOUT_EFFECT, *_REFUSED),
    }
)
FIELDS = _OWN | {"max_tokens", "metadata"}


def read_message(raw: Fields, *, is_count: bool = False) -> Fields:
    """Return the body of the chat completion; only a request that counts tokens may lack max_tokens.

    >>> read_message({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5})
    {'max_tokens': 5, 'messages': [{'role': 'user', 'content': 'Hi'}]}
    """
    for name, reason in _REFUSED.items():
        if raw.get(name):
            raise RequestError(f"{name} is {reason}")
    for name in ("logprobs", "top_logprobs"):
        if raw.get(name):
            raise RequestError(f"{name} is not supported by this API: use /v1/chat/completions or /v1/responses")
    if raw.get("max_tokens") is None and not is_count:
        raise RequestError("max_tokens is missing: give the most tokens of the answer")
    get(get(raw, "metadata", "an object") or {}, "user_id", "a string")
    conversation = _read_conversation(raw)
    body = {**other_fields(raw, _OWN), "messages": conversation}
    if (stop := get(raw, "stop_sequences", "a list of strings")) is not None:
        body["stop"] = stop
    _read_thinking(raw, body)
    _read_output_config(raw, body)
    _read_tools(raw, body)
    if raw.get("stream") is True:
        body["stream_options"] = {"include_usage": True}
    return _continuing(body, conversation)


def _continuing(body: Fields, conversation: list[Fields]) -> Fields:
    """Make the model continue the last message if that is its own, as Anthropic does."""
    last = conversation[-1]
    if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    return body


# ---- the conversation


def _read_conversation(raw: Fields) -> list[Fields]:
    conversation = Conversation()
    if raw.get("system") is not None:
        conversation.system(read_texts(raw["system"], "system", _TEXT))
    for place, message in enumerate(read_list(raw, "messages")):
        _read_message(message, f"messages[{place}]", conversation)
    return conversation.messages


def _read_message(message: Any, place: str, conversation: Conversation) -> None:
    if not isinstance(message, dict):
        raise RequestError(f"{place} is {show(message)}: use an object with a role and a content")
    content = message.get("content")
    match role := message.get("role"):
        case "user":
            _read_user(content, place, conversation)
        case "assistant":
            _read_assistant(content, place, conversation)
        case "system":
            conversation.system(read_texts(content, place, _TEXT))
        case _:
            raise RequestError(f"{place} has the role {show(role)}: use user, assistant or system")


def _read_user(content: Any, place: str, conversation: Conversation) -> None:
    """Read texts and results: consecutive texts are one message, and each result is one of its own."""
    texts: list[str] = []
    for block, where in _blocks(content, place):
        if block["type"] != "tool_result":
            texts += read_texts([block], where, ("text", "tool_result"))
            continue
        if texts:
            conversation.user(texts)
            texts = []
        result = block.get("content")
        conversation.result(
            read_string(block, "tool_use_id", where), read_texts("" if result is None else result, where, _TEXT)
        )
    if texts or not content:
        conversation.user(texts)


def _read_assistant(content: Any, place: str, conversation: Conversation) -> None:
    texts: list[str] = []
    calls: list[tuple[str, str, Any]] = []
    for block, where in _blocks(content, place):
        match block["type"]:
            case "tool_use":
                given = block.get("input")
                if not isinstance(given, dict):
                    raise RequestError(f"{where} has the input {show(given)}: use an object")
                calls.append((read_string(block, "id", where), read_string(block, "name", where), given))
            case "thinking":
                conversation.think(read_string(block, "thinking", where))
            case "redacted_thinking":
                pass
            case _:
                texts += read_texts([block], where, ("text", "thinking", "tool_use"))
    conversation.answer(texts)
    for call in calls:
        conversation.call(*call)


def _blocks(content: Any, place: str) -> list[tuple[Fields, str]]:
    """Return the blocks of a message, each with its place for error messages."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, place)]
    if not isinstance(content, list):
        raise RequestError(f"{place} has the content {show(content)}: use a string, or a list of blocks")
    for number, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise RequestError(f"{place} block {number} is {show(block)}: use an object with a type, such as text")
    return [(block, f"{place} block {number}") for number, block in enumerate(content)]


# ---- the answer's form


def _read_thinking(raw: Fields, body: Fields) -> None:
    thinking = get(raw, "thinking", "an object")
    if thinking is None:
        return
    options = dict(get(raw, "chat_template_kwargs", "an object") or {})
    match kind := thinking.get("type"):
        case "enabled":
            if (budget := get(thinking, "budget_tokens", "a whole number")) is None:
                raise RequestError("thinking has no budget_tokens: give the most tokens of thinking")
            options.setdefault("enable_thinking", True)
            body["max_thinking_tokens"] = budget
        case "disabled":
            options.setdefault("enable_thinking", False)
        case "adaptive" | "between_tools":
            pass
        case _:
            raise RequestError(f"thinking has the type {show(kind)}: use enabled, adaptive or disabled")
    if thinking.get("display") == "omitted":
        body["include_reasoning"] = False
    if options:
        body["chat_template_kwargs"] = options


def _read_output_config(raw: Fields, body: Fields) -> None:
    config = get(raw, "output_config", "an object") or {}
    if (effort := get(config, "effort", "a string")) is not None:
        body["reasoning_effort"] = effort
    match config.get("format"):
        case None:
            return
        case {"type": "json_schema", "schema": dict() as schema}:
            body["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        case other:
            raise RequestError(
                f'output_config has the format {show(other)}: use {{"type": "json_schema", "schema": ...}}'
            )


def _read_tools(raw: Fields, body: Fields) -> None:
    if raw.get("tools") is not None:
        tools = raw["tools"]
        if not isinstance(tools, list):
            raise RequestError(f"tools is {show(tools)}: use a list of tools")
        body["tools"] = [_read_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools)]
    choice = get(raw, "tool_choice", "an object")
    match choice:
        case None:
            return
        case {"type": "auto" | "none" as kind}:
            body["tool_choice"] = kind
        case {"type": "any"}:
            body["tool_choice"] = "required"
        case {"type": "tool", "name": str() as name}:
            body["tool_choice"] = {"type": "function", "function": {"name": name}}
        case _:
            raise RequestError(f"tool_choice is {show(choice)}: use the type auto, any, none, or tool with a name")
    if get(choice, "disable_parallel_tool_use", "true or false"):
        body["parallel_tool_calls"] = False


def _read_tool(tool: Any, place: str) -> Fields:
    if not isinstance(tool, dict):
        raise RequestError(f"{place} is {show(tool)}: use an object with a name and an input_schema")
    if (kind := tool.get("type")) not in (None, "custom"):
        raise RequestError(f"{place} has the type {show(kind)}: this server runs no tools; use custom, or leave it out")
    if not isinstance(schema := tool.get("input_schema"), dict):
        raise RequestError(f"{place} has the input_schema {show(schema)}: use a JSON schema, which is an object")
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": schema}}
