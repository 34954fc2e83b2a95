"""Fields of OpenAI's and vLLM's requests that are not supported: ignored ones and refused ones.

A field that would change the answer is refused unless its value has no effect: an answer that silently ignored it
would be wrong. openai/params.py and openai/options.py have the supported fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chairlift.core.errors import RequestError

# Fields without effect on the answer's content; the server reads stream and stream_options in openai/options.py.
IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("stream", "stream_options"),
        # vLLM's
        *("stream_interval", "session_id"),
        "spaces_between_special_tokens",  # has no effect with fast tokenizers
        *("return_token_offsets", "return_assistant_tokens_mask"),  # for routes that only render a prompt
        "routed_experts_prompt_start",
        *(
            "guided_decoding_backend",
            "guided_whitespace_pattern",
        ),  # there is one backend, and its whitespace is bounded
    }
)


@dataclass(frozen=True, slots=True)
class RefusedField:
    """An unsupported field: its values without effect, and the error for any other value."""

    neutral: tuple[Any, ...]  # null always has no effect
    reason: str


_STRUCTURED = "not supported under this name: use structured_outputs or response_format"
_TOOLS = "not supported, being OpenAI's old name: use tools and tool_choice"
_TEXT_ONLY = "not supported: the model reads and writes text alone; leave it out"
_NO = "not supported: leave it out"

# Refused in chats and in plain completions, since clients send the same extra fields to both.
REFUSED: dict[str, RefusedField] = {
    **{
        name: RefusedField((), _STRUCTURED) for name in ("grammar", "json_schema", "regex", "ebnf")
    },  # other servers' names
    "functions": RefusedField(([],), _TOOLS),
    "function_call": RefusedField(("none", "auto"), _TOOLS),
    "modalities": RefusedField((["text"],), _TEXT_ONLY),
    "audio": RefusedField((), _TEXT_ONLY),
    "media_io_kwargs": RefusedField(({},), _TEXT_ONLY),
    "mm_processor_kwargs": RefusedField(({},), _TEXT_ONLY),
    "verbosity": RefusedField(("medium",), 'not supported: use "medium", or leave it out and ask in the prompt'),
    "moderation": RefusedField((), _NO),
    "web_search_options": RefusedField((), _NO),
    "chat_template": RefusedField((), "not supported: the server uses the model's own template; leave it out"),
    "documents": RefusedField(([],), "not supported: leave it out and put the documents into a message"),
    "prompt_embeds": RefusedField(([],), "not supported: send prompt as text or as token ids"),
    "truncation_side": RefusedField(("left",), 'not supported: use "left", or leave it out'),
    "logits_processors": RefusedField(([],), "not supported: a server runs no code of its clients; leave it out"),
    "logprob_token_ids": RefusedField(([],), _NO),
    "return_tokens_as_token_ids": RefusedField((False,), "not supported: use return_token_ids, which adds the ids"),
    "return_prompt_text": RefusedField((False,), "not supported: use return_token_ids, and /detokenize for the text"),
    "kv_transfer_params": RefusedField(({},), _NO),
    "ec_transfer_params": RefusedField(({},), _NO),
    "vllm_xargs": RefusedField(({},), _NO),
    "repetition_detection": RefusedField((), "not supported: leave it out; repetition_penalty reduces repetition"),
    **{
        name: RefusedField((0,), "not supported: leave it out; repetition_penalty reduces repetition")
        for name in ("max_repetition_pattern_size", "min_repetition_pattern_size", "repetition_min_count")
    },
}
REFUSED_IN_CHAT = {
    "suffix": RefusedField(("",), "not supported in chats: leave it out, or use /v1/completions"),
    "echo": RefusedField((False,), "not supported in chats: leave it out, or use /v1/completions"),
    "add_special_tokens": RefusedField((False,), "not supported in chats: the chat template writes special tokens"),
}
REFUSED_IN_COMPLETION = {
    **{
        name: RefusedField(neutral, "not supported here: use /v1/chat/completions")
        for name, neutral in (("tools", ([],)), ("tool_choice", ("none", "auto")), ("thinking_token_budget", ()))
    },
    "add_special_tokens": RefusedField((True,), "not supported: send token ids from /tokenize to choose them yourself"),
}
# With function_call "none", functions have no effect.
_DECLINED_BY = {"functions": "function_call"}


def refused_fields(*, chat: bool) -> dict[str, RefusedField]:
    """Return the refused fields of chats or of plain completions."""
    return REFUSED | (REFUSED_IN_CHAT if chat else REFUSED_IN_COMPLETION)


def refuse_unsupported(body: Mapping[str, Any], *, chat: bool) -> None:
    """Raise a RequestError for the first unsupported field that would change the answer."""
    for name, refused in refused_fields(chat=chat).items():
        value = body.get(name)
        if value is None or value in refused.neutral or body.get(_DECLINED_BY.get(name, "")) == "none":
            continue
        raise RequestError(f"{name} is {refused.reason}")
