"""Fields of OpenAI's and vLLM's requests that we do not read: those that change nothing, and those that are refused.

A field that would change the answer is refused unless its value asks for nothing: an answer that silently ignored it
would be a wrong one. openai/params.py and openai/options.py have the fields that we read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chairlift.core.errors import RequestError

# They change nothing in the answer, or only how it is sent, which its sender reads elsewhere.
IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        "prediction",  # makes OpenAI's answer faster, not another one
        *("stream", "stream_options"),
        # vLLM's
        *("stream_interval", "session_id"),
        "spaces_between_special_tokens",  # nothing to the tokenizers we use
        *("return_token_offsets", "return_assistant_tokens_mask"),  # for routes that only render a prompt
        "routed_experts_prompt_start",
        *("guided_decoding_backend", "guided_whitespace_pattern"),  # nothing without a guided_ field, which is refused
    }
)


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that we cannot do: values that ask for nothing, and what to do about the others."""

    neutral: tuple[Any, ...]  # null is always one
    reason: str


_STRUCTURED = "not supported yet: the server cannot hold an answer to a format; leave it out and ask in the prompt"
_TOOLS = 'not supported yet: the server does not read tool calls; leave it out, or send tool_choice "none" with it'
_TEXT_ONLY = "not supported: the model reads and writes text alone; leave it out"
_NO = "not supported: leave it out"

# In chats and in plain completions alike, since clients send the same extra fields to both.
REFUSED: dict[str, Refused] = {
    "response_format": Refused(({"type": "text"},), _STRUCTURED),
    "structured_outputs": Refused(({},), _STRUCTURED),
    "guided_json": Refused((), _STRUCTURED),
    "guided_json_object": Refused((False,), _STRUCTURED),
    "guided_regex": Refused((), _STRUCTURED),
    "guided_choice": Refused((), _STRUCTURED),
    "guided_grammar": Refused((), _STRUCTURED),
    "structural_tag": Refused((), _STRUCTURED),
    **{name: Refused((), _STRUCTURED) for name in ("grammar", "json_schema", "regex", "ebnf")},  # other servers' names
    "tools": Refused(([],), _TOOLS),
    "functions": Refused(([],), _TOOLS),
    "tool_choice": Refused(("none", "auto"), 'not supported yet: use "none" or "auto", or leave it out'),
    "function_call": Refused(("none", "auto"), 'not supported yet: use "none" or "auto", or leave it out'),
    "parallel_tool_calls": Refused((True, False), "no boolean: use true or false, or leave it out"),
    "modalities": Refused((["text"],), _TEXT_ONLY),
    "audio": Refused((), _TEXT_ONLY),
    "media_io_kwargs": Refused(({},), _TEXT_ONLY),
    "mm_processor_kwargs": Refused(({},), _TEXT_ONLY),
    "suffix": Refused(("",), _NO),
    "verbosity": Refused(("medium",), 'not supported: use "medium", or leave it out and ask in the prompt'),
    "moderation": Refused((), _NO),
    "web_search_options": Refused((), _NO),
    "chat_template": Refused((), "not supported: the server uses the model's own template; leave it out"),
    "documents": Refused(([],), "not supported: leave it out and put the documents into a message"),
    "include_reasoning": Refused((True,), "not supported yet: the server does not tell reasoning from the answer"),
    "thinking_token_budget": Refused((), _NO),
    "prompt_embeds": Refused(([],), "not supported: send prompt as text or as token ids"),
    "truncation_side": Refused(("left",), 'not supported: use "left", or leave it out'),
    "logits_processors": Refused(([],), "not supported: a server runs no code of its clients; leave it out"),
    "logprob_token_ids": Refused(([],), _NO),
    "return_tokens_as_token_ids": Refused((False,), "not supported: use return_token_ids, which adds the ids"),
    "return_prompt_text": Refused((False,), "not supported: use return_token_ids, and /detokenize for the text"),
    "kv_transfer_params": Refused(({},), _NO),
    "ec_transfer_params": Refused(({},), _NO),
    "vllm_xargs": Refused(({},), _NO),
    "repetition_detection": Refused((), "not supported: leave it out; repetition_penalty makes repetition rarer"),
    **{
        name: Refused((0,), "not supported: leave it out; repetition_penalty makes repetition rarer")
        for name in ("max_repetition_pattern_size", "min_repetition_pattern_size", "repetition_min_count")
    },
}
REFUSED_IN_CHAT = {
    "echo": Refused((False,), "not supported in chats: leave it out, or use /v1/completions"),
    "add_special_tokens": Refused((False,), "not supported in chats: the chat template writes special tokens"),
}
REFUSED_IN_COMPLETION = {
    "add_special_tokens": Refused((True,), "not supported: send token ids from /tokenize to choose them yourself"),
}
# Declining to call tools leaves nothing to do with them, and the chat template is not told of them.
_DECLINED_BY = {"tools": "tool_choice", "functions": "function_call"}


def refused_fields(*, chat: bool) -> dict[str, Refused]:
    """The fields that one of the two routes cannot do."""
    return REFUSED | (REFUSED_IN_CHAT if chat else REFUSED_IN_COMPLETION)


def refuse_unsupported(body: Mapping[str, Any], *, chat: bool) -> None:
    """Raise a RequestError for the first field that would change the answer and cannot be done."""
    for name, refused in refused_fields(chat=chat).items():
        value = body.get(name)
        if value is None or value in refused.neutral or body.get(_DECLINED_BY.get(name, "")) == "none":
            continue
        raise RequestError(f"{name} is {refused.reason}")
