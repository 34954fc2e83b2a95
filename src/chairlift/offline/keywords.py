"""Keywords of LLM's methods: vLLM's names are accepted as aliases, unknown ones are errors with advice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from chairlift.core.errors import RequestError
from chairlift.core.params import SamplingParams

_SAMPLING = frozenset(field.name for field in fields(SamplingParams))
_KNOWN = ("params", "sampling_params", "structured", "progress", "use_tqdm", "on_error")
_CHAT = (
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    *("tools", "tool_choice", "parallel_tool_calls", "max_thinking_tokens"),
)
# vLLM's keywords without a counterpart, and what to do instead.
_ABSENT = {
    "chat_template_content_format": "the template itself shows whether it reads strings or parts: leave it out",
    "guided_options_request": "use structured={'json': schema}",
    "lora_request": "LoRA adapters are not supported: leave it out",
    "on_error": "a stream has one prompt, and its error is raised: leave it out",
    "mm_processor_kwargs": "models read text only: leave it out",
    "priority": "requests of one call are equal: leave it out",
    "progress": "a stream has no bar: leave it out",
    "prompt_adapter_request": "prompt adapters are not supported: leave it out",
    "prompt_token_ids": "give token ids as the prompts themselves",
    "tokenization_kwargs": "use SamplingParams(truncate_prompt_tokens=...) to shorten prompts",
}


def either(name: str, value: Any, alias: str, other: Any) -> Any:
    """Return the value of a keyword that has two names."""
    if value is not None and other is not None:
        raise RequestError(f"{name} and {alias} are two names of one keyword: give one of them")
    return other if value is None else value


def check_params(params: Any) -> None:
    """Raise RequestError for params that are not SamplingParams, such as a dictionary."""
    for each in params if isinstance(params, Sequence) else [params]:
        if each is not None and not isinstance(each, SamplingParams):
            raise RequestError(
                f"params is {each!r}: use SamplingParams(...), one for all prompts or a list with one for each"
            )


def refuse_unknown(unknown: Mapping[str, Any], *, is_chat: bool) -> None:
    """Raise RequestError, with advice, for keywords that a method does not have; a chat also has those of templates."""
    for name, value in unknown.items():
        if is_chat and name in _CHAT:
            continue
        raise RequestError(_advice(name, value, (*_KNOWN, *_CHAT) if is_chat else _KNOWN, is_chat))


def _advice(name: str, value: Any, known: Iterable[str], is_chat: bool) -> str:
    if name in _SAMPLING:
        return f"{name} is a sampling parameter: use SamplingParams({name}={value!r})"
    if name in _ABSENT:
        return f"there is no keyword {name} here: {_ABSENT[name]}"
    if name in _CHAT:
        return f"{name} belongs to a conversation: use chat() or stream_chat()"
    close = get_close_matches(name, known, n=1)
    if close:
        return f"there is no keyword {name}: did you mean {close[0]}?"
    if is_chat:
        return (
            f"there is no keyword {name}: a variable of the chat template is given as "
            f"chat_template_kwargs={{{name!r}: {value!r}}}"
        )
    return f"there is no keyword {name}: there are {', '.join(known)}"
