"""Convert a request's body to SamplingParams: OpenAI's fields, and vLLM's extra ones.

An unsupported field is refused (openai/fields.py). An unknown field is refused in a batch file, where it is most
likely a typing error; a server ignores it and names it in a reply header, since clients send many extra fields.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Union, get_args, get_type_hints

from chairlift.core.errors import RequestError
from chairlift.core.params import ALL, SamplingParams
from chairlift.openai import structured
from chairlift.openai.fields import IGNORED, refuse_unsupported, refused_fields

Body = Mapping[str, Any]
_TOKEN_ID = re.compile(r"[0-9]{1,18}")
_NO_DEFAULTS: Mapping[str, Any] = {}
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for completions

# What JSON may hold for each type of a SamplingParams field; SamplingParams checks the ranges.
_KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    bool | Literal["never"]: "true, false or 'never'",
    Sequence[int]: "a list of whole numbers",
    str | Sequence[str]: "a string or a list of strings",
}
# Fields that OpenAI gives another form or default, which `_read` knows.
READ_APART = frozenset({"max_tokens", "logprobs", "logit_bias", "structured"})
NOT_OVER_HTTP = {
    "detokenize": "a reply is text; return_token_ids adds the ids",
    "logits_processors": "a server runs no code of its clients",
}


def _kind(hint: Any) -> str:
    """Return what JSON may hold for a field of this type; null is always allowed, as absent."""
    parts = [part for part in get_args(hint) if part is not type(None)]
    return _KINDS[Union[tuple(parts)] if type(None) in get_args(hint) else hint]  # noqa: UP007  # of a variable


# The fields of SamplingParams that a body may have under their own names.
FIELDS: dict[str, str] = {
    name: _kind(hint)
    for name, hint in get_type_hints(SamplingParams).items()
    if name not in READ_APART and name not in NOT_OVER_HTTP
}
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "a whole number": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "a number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "true or false": lambda value: isinstance(value, bool),
    "true, false or 'never'": lambda value: isinstance(value, bool) or value == "never",
    "a string": lambda value: isinstance(value, str),
    "an object": lambda value: isinstance(value, dict),
    "a list of strings": lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
    "a list of whole numbers": lambda value: isinstance(value, list) and set(map(type, value)) <= {int},
    "a string or a list of strings": lambda value: (
        isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))
    ),
}
_READ = frozenset({*FIELDS, *READ_APART, *structured.FIELDS, "model", "max_completion_tokens"})
_CHAT = frozenset(
    {
        *("messages", "top_logprobs", "reasoning_effort", "include_reasoning", "prediction"),
        *("max_thinking_tokens", "thinking_token_budget"),
        *("tools", "tool_choice", "parallel_tool_calls"),
        *("chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    }
)
_COMPLETION = frozenset({"prompt", "echo", "suffix"})
# Fields that openai/options.py reads.
_SERVED = frozenset({"timeout", "priority", "ttft", "cache_salt", "request_id", "return_token_ids"})


def set_aside_unknown(body: Body, *, chat: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the body without its unknown fields, and the names of those fields."""
    known = _READ | _SERVED | IGNORED | refused_fields(chat=chat).keys() | (_CHAT if chat else _COMPLETION)
    return {name: value for name, value in body.items() if name in known}, sorted(body.keys() - known)


def read_chat_params(body: Body, defaults: Mapping[str, Any] = _NO_DEFAULTS) -> SamplingParams:
    """Read the sampling parameters of a chat completion; without max_tokens it may fill the context.

    `defaults` are the model's own values for fields that the body does not set.

    >>> read_chat_params({"messages": [], "max_completion_tokens": 8, "top_k": 40}).max_tokens
    8
    """
    _refuse_unknown(body, _READ | _CHAT | _SERVED, chat=True)
    wanted = get(body, "logprobs", "true or false")
    top = get(body, "top_logprobs", "a whole number")
    if top is not None and not wanted:
        raise RequestError("top_logprobs needs logprobs to be true: set it, or leave top_logprobs out")
    return _read(body, (top or 0) if wanted else None, defaults.get("max_tokens"), defaults)


def read_completion_params(body: Body, defaults: Mapping[str, Any] = _NO_DEFAULTS) -> SamplingParams:
    """Read the sampling parameters of a plain completion."""
    _refuse_unknown(body, _READ | _COMPLETION | _SERVED, chat=False)
    echo, count = get(body, "echo", "true or false"), get(body, "max_tokens", "a whole number")
    if echo and count == 0:
        body = {**body, "max_tokens": 1}  # a pass needs one output token, which is not returned
    params = _read(body, get(body, "logprobs", "a whole number"), COMPLETION_TOKENS, defaults)
    if echo and params.logprobs is not None and params.prompt_logprobs is None:
        params = replace(params, prompt_logprobs=params.logprobs)
    return params


def read_template_options(body: Body) -> dict[str, Any]:
    """Read the chat template's variables from a chat completion."""
    named = ("add_generation_prompt", "continue_final_message")
    found = {name: value for name in named if (value := get(body, name, "true or false")) is not None}
    if (effort := get(body, "reasoning_effort", "a string")) is not None:
        found["reasoning_effort"] = effort
    return {**(get(body, "chat_template_kwargs", "an object") or {}), **found}


def read_thinking(body: Body) -> int | None:
    """Read the most tokens of reasoning: our field, or vLLM's name for it."""
    found = [get(body, name, "a whole number") for name in ("max_thinking_tokens", "thinking_token_budget")]
    budget = next((each for each in found if each is not None), None)
    if budget is not None and not 0 <= budget < 1 << 31:
        raise RequestError(f"max_thinking_tokens is {budget}: use 0 or more")
    return budget


def read_prompts(body: Body) -> list[str | list[int]]:
    """Read the prompts of a plain completion: a text, token ids, or a list of either."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _CHECKS["a list of whole numbers"](prompt):
            return [prompt]
        if all(isinstance(each, str) or _CHECKS["a list of whole numbers"](each) for each in prompt):
            return prompt
    raise RequestError("prompt must be a string, a list of token ids, or a list of such strings or lists")


def read_suffix(body: Body, prompts: list[str | list[int]]) -> str:
    """Read the text that follows the answer, or ""."""
    suffix: str = get(body, "suffix", "a string") or ""
    if suffix and not all(isinstance(prompt, str) for prompt in prompts):
        raise RequestError("suffix needs a prompt that is text: send the prompt as a string, or leave suffix out")
    return suffix


def read_prediction(body: Body) -> str:
    """Read the text that the client expects much of the answer to be, or "".

    >>> read_prediction({"prediction": {"type": "content", "content": "def f():"}})
    'def f():'
    """
    prediction = get(body, "prediction", "an object")
    if prediction is None:
        return ""
    content = prediction.get("content")
    parts = [{"text": content}] if isinstance(content, str) else content
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else [None]
    if prediction.get("type") != "content" or not all(isinstance(text, str) for text in texts):
        raise RequestError(
            f'prediction is {reprlib.repr(prediction)}: use {{"type": "content", "content": ...}} with a string or '
            "text parts"
        )
    return "".join(map(str, texts))


def _read(body: Body, logprobs: int | None, max_tokens: int | None, defaults: Mapping[str, Any]) -> SamplingParams:
    for name in ("max_tokens", "max_completion_tokens"):  # the second is the newer name and takes precedence
        asked = get(body, name, "a whole number")
        max_tokens = max_tokens if asked is None else asked
    own = {name: value for name, kind in FIELDS.items() if (value := get(body, name, kind)) is not None}
    if not own.get("use_beam_search"):  # which has no randomness and goes by the model's own probabilities
        own = {**{name: value for name, value in defaults.items() if name in FIELDS}, **own}
    for name, value in (("logprobs", logprobs), ("prompt_logprobs", own.get("prompt_logprobs"))):
        if value == ALL:
            raise RequestError(
                f"{name} is -1: log-probabilities of the whole vocabulary are available in process only; use 0 to 64"
            )
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        logit_bias=_logit_bias(body),
        structured=structured.read_structured(body),
        **own,
    )


def _logit_bias(body: Body) -> dict[int, float]:
    """Convert the keys, strings in JSON, to token ids."""
    found = {}
    for key, bias in (get(body, "logit_bias", "an object") or {}).items():
        if not _TOKEN_ID.fullmatch(key):
            raise RequestError(f"logit_bias has the key {reprlib.repr(key)}: use token ids")
        found[int(key)] = bias
    return found


def get(body: Body, name: str, kind: str) -> Any:
    """Return a field of the body, checked; null counts as absent."""
    value = body.get(name)
    if value is not None and not _CHECKS[kind](value):
        raise RequestError(f"{name} is {reprlib.repr(value)}: use {kind}")
    return value


def _refuse_unknown(body: Body, known: frozenset[str], *, chat: bool) -> None:
    refuse_unsupported(body, chat=chat)
    for name in body.keys() - known - IGNORED - refused_fields(chat=chat).keys():
        close = difflib.get_close_matches(name, known, n=1)
        raise RequestError(
            f"unknown field {reprlib.repr(name)}" + (f": did you mean {close[0]}?" if close else ": leave it out")
        )


def is_field(name: str) -> bool:
    """Whether a request's body may have a field of this name."""
    refused = refused_fields(chat=True) | refused_fields(chat=False)
    return name in _READ | _CHAT | _COMPLETION | _SERVED | IGNORED or name in refused
