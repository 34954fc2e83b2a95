"""Reads the body of OpenAI's Responses API as that of a chat completion. Nothing is stored: stateful use is refused."""

from __future__ import annotations

from typing import Any

import msgspec

from chairlift.apis.conversation import Conversation, other_fields, read_list, read_string, read_texts
from chairlift.core.errors import RequestError
from chairlift.core.values import show
from chairlift.openai.params import get

Fields = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"
_REPEATED = 64 << 10  # bytes of a request's fields that its reply repeats: a stream repeats them three times
_TEXTS = ("input_text", "output_text", "text")
_STATELESS = "this server stores no responses"

# What `include` may ask for. All but the log-probabilities belong to tools and inputs that are refused anyway, or, as
# the encrypted reasoning, serve clients that are not shown the reasoning itself.
_INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_REFUSED = {
    "previous_response_id": f"{_STATELESS}: send the whole conversation as input",
    "conversation": f"{_STATELESS}: send the whole conversation as input",
    "prompt": f"{_STATELESS}, nor prompts: send instructions and input",
    "context_management": "not supported: shorten the conversation before sending it",
}
# Without effect on the answer, or read apart.
_OWN = frozenset(
    {
        *("input", "instructions", "max_output_tokens", "text", "reasoning", "include", "top_logprobs"),
        *("tools", "tool_choice", "truncation", "store", "background", "stream_options"),
        *("max_tool_calls", "image", "access_programs", *_REFUSED),
    }
)
FIELDS = _OWN | {"metadata", "user"}
_STRINGS = ("user", "prompt_cache_key", "safety_identifier")


def read_response(raw: Fields) -> Fields:
    """Return the body of the chat completion.

    >>> read_response({"input": "Hi", "max_output_tokens": 5})
    {'messages': [{'role': 'user', 'content': 'Hi'}], 'max_tokens': 5}
    """
    _refuse_state(raw)
    get(raw, "metadata", "an object")
    for name in _STRINGS:
        get(raw, name, "a string")
    get(raw, "stream_options", "an object")
    body = other_fields(raw, _OWN)
    body["messages"] = _read_conversation(raw)
    _put(body, "max_tokens", get(raw, "max_output_tokens", "a whole number"))
    _read_text(raw, body)
    _put(body, "reasoning_effort", get(get(raw, "reasoning", "an object") or {}, "effort", "a string"))
    _read_logprobs(raw, body)
    if raw.get("tools") is not None:
        body["tools"] = read_tools(raw["tools"])
    _put(body, "tool_choice", _read_choice(raw.get("tool_choice")))
    if (truncation := raw.get("truncation")) not in (None, "disabled", "auto"):
        raise RequestError(f'truncation is {show(truncation)}: use "auto" or "disabled"')
    if truncation == "auto":
        body.setdefault("truncate_prompt_tokens", -1)
    if raw.get("stream") is True:
        body["stream_options"] = {"include_usage": True}
    return body


def repeated_fields(raw: Fields) -> Fields:
    """Return the fields that the reply repeats; long ones are left out."""
    text, reasoning = raw.get("text") or {}, raw.get("reasoning") or {}
    short = {
        "background": False,
        "max_output_tokens": raw.get("max_output_tokens"),
        "parallel_tool_calls": raw.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": raw.get("temperature"),
        "top_logprobs": raw.get("top_logprobs") or 0,
        "top_p": raw.get("top_p"),
        "truncation": raw.get("truncation") or "disabled",
    }
    long = {
        "instructions": raw.get("instructions"),
        "metadata": raw.get("metadata") or {},
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": raw.get("tool_choice") or "auto",
        "tools": raw.get("tools") or [],
        **{name: raw.get(name) for name in _STRINGS},
    }
    if len(msgspec.json.encode(long)) > _REPEATED:
        long = {"instructions": None, "metadata": {}, "tool_choice": "auto", "tools": []}
    return short | long


def _put(body: Fields, name: str, value: Any) -> None:
    if value is not None:
        body[name] = value


def _refuse_state(raw: Fields) -> None:
    for name, reason in _REFUSED.items():
        if raw.get(name) is not None:
            raise RequestError(f"{name} is set, and {reason}" if "stores" in reason else f"{name} is {reason}")
    if get(raw, "store", "true or false"):
        raise RequestError(f"store is true, and {_STATELESS}: set store to false, or leave it out")
    if get(raw, "background", "true or false"):
        raise RequestError(f"background is true, and {_STATELESS}: leave it out, and stream the response")


# ---- the conversation


def _read_conversation(raw: Fields) -> list[Fields]:
    conversation = Conversation()
    if (instructions := get(raw, "instructions", "a string")) is not None:
        conversation.system([instructions])
    if isinstance(given := raw.get("input"), str):
        conversation.user([given])
        return conversation.messages
    if not isinstance(given, list):
        raise RequestError(f"input is {show(given)}: use a string, or a list of items")
    for place, item in enumerate(read_list(raw, "input")):
        _read_item(item, f"input[{place}]", conversation)
    return conversation.messages


def _read_item(item: Any, place: str, conversation: Conversation) -> None:
    if not isinstance(item, dict):
        raise RequestError(f"{place} is {show(item)}: use an object with a type, such as message")
    match kind := item.get("type", "message"):
        case "message":
            _read_message(item, place, conversation)
        case "function_call":
            name, arguments = read_string(item, "name", place), read_string(item, "arguments", place)
            conversation.call(read_string(item, "call_id", place), name, arguments)
        case "function_call_output":
            call_id = read_string(item, "call_id", place)
            conversation.result(call_id, read_texts(item.get("output"), place, _TEXTS))
        case "reasoning":
            for text in read_texts(item.get("content") or [], place, ("reasoning_text",)):
                conversation.think(text)
        case "item_reference":
            raise RequestError(f"{place} refers to a stored item, and {_STATELESS}: send the item itself")
        case _:
            raise RequestError(
                f"{place} has the type {show(kind)}, which is not supported: use message, function_call, "
                "function_call_output or reasoning"
            )


def _read_message(item: Fields, place: str, conversation: Conversation) -> None:
    match role := item.get("role"):
        case "user":
            add = conversation.user
        case "assistant":
            add = conversation.answer
        case "system" | "developer":
            add = conversation.system
        case _:
            raise RequestError(f"{place} has the role {show(role)}: use user, assistant, system or developer")
    add(read_texts(item.get("content"), place, _TEXTS))


# ---- the answer's form


def _read_text(raw: Fields, body: Fields) -> None:
    text = get(raw, "text", "an object") or {}
    _put(body, "verbosity", text.get("verbosity"))
    match text.get("format"):
        case None:
            return
        case {"type": "json_schema", "schema": dict() as schema, **more}:
            body["response_format"] = {"type": "json_schema", "json_schema": {**more, "schema": schema}}
        case {"type": "text" | "json_object" as kind}:
            body["response_format"] = {"type": kind}
        case other:
            raise RequestError(
                f"text has the format {show(other)}: use an object of type text, json_object or json_schema (with a "
                "name and a schema)"
            )


def _read_logprobs(raw: Fields, body: Fields) -> None:
    include = get(raw, "include", "a list of strings") or []
    if unknown := [each for each in include if each not in _INCLUDABLE]:
        raise RequestError(f"include has {show(unknown[0])}: use {LOGPROBS}, or leave it out")
    top = get(raw, "top_logprobs", "a whole number")
    if LOGPROBS in include:
        body["logprobs"] = True
    if body.get("logprobs"):  # also under the name of chat completions
        _put(body, "top_logprobs", top)
    elif top:
        raise RequestError(f'top_logprobs needs include to have "{LOGPROBS}": add it, or leave top_logprobs out')


def read_tools(given: Any) -> Any:
    """Return tools in the shape of chat completions, which reads and checks the rest."""
    if not isinstance(given, list):
        raise RequestError(f"tools is {show(given)}: use a list of functions")
    return [_read_tool(tool, f"tools[{place}]") for place, tool in enumerate(given)]


def _read_tool(tool: Any, place: str) -> Fields:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        raise RequestError(f"{place} is {show(tool)}: use an object with the type function, a name and parameters")
    if kind != "function":
        raise RequestError(f"{place} has the type {show(kind)}: this server runs no tools; use the type function")
    known = ("name", "description", "parameters", "strict")
    return {"type": kind, "function": {name: tool[name] for name in known if tool.get(name) is not None}}


def _read_choice(choice: Any) -> Any:
    match choice:
        case None | str():
            return choice
        case {"type": "function", "name": str() as name}:
            return {"type": "function", "function": {"name": name}}
    raise RequestError(
        f'tool_choice is {show(choice)}: use "none", "auto", "required", or {{"type": "function", "name": "..."}}'
    )
