"""From finished requests to OpenAI's reply objects."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chairlift.outputs import RequestOutput
    from chairlift.text.answer import Answer, Logprob
    from chairlift.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no infinity; this is what OpenAI writes


def new_id(prefix: str) -> str:
    """A name nobody else has."""
    return f"{prefix}-{uuid.uuid4().hex}"


def chat_completion(output: RequestOutput, model: str, top: int | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The reply to a chat completion; `top` is how many alternatives each token shows."""
    choices = [
        {
            "index": answer.index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": _chat_logprobs(answer, top or 0, tokenizer),
            "finish_reason": answer.finish_reason,
        }
        for answer in output.outputs
    ]
    return _reply("chatcmpl", "chat.completion", model, choices, usage([output]))


def text_completion(outputs: Sequence[RequestOutput], model: str, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The reply to a plain completion of one or several prompts."""
    answers = [answer for output in outputs for answer in output.outputs]
    choices = [
        {
            "index": index,
            "text": answer.text,
            "logprobs": _text_logprobs(answer, tokenizer),
            "finish_reason": answer.finish_reason,
        }
        for index, answer in enumerate(answers)
    ]
    return _reply("cmpl", "text_completion", model, choices, usage(outputs))


def usage(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    """Tokens in and out."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def error_object(message: str, kind: str = "invalid_request_error", code: str | None = None) -> dict[str, Any]:
    """The body of a reply that is no answer."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _reply(prefix: str, kind: str, model: str, choices: list[dict[str, Any]], used: dict[str, int]) -> dict[str, Any]:
    return {
        "id": new_id(prefix),
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": used,
        "system_fingerprint": None,
    }


def _chat_logprobs(answer: Answer, top: int, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    if answer.logprobs is None:
        return None

    def entry(token: int, found: Logprob) -> dict[str, Any]:
        spelled = list(tokenizer.token_bytes(token)) if tokenizer is not None else None
        return {"token": found.decoded_token, "logprob": max(found.logprob, LEAST_LOGPROB), "bytes": spelled}

    content = [
        {
            **entry(token, found[token]),
            # The likeliest come first, in order; the chosen token follows if it is not one of them.
            "top_logprobs": [entry(*pair) for pair in islice(found.items(), top)],
        }
        for token, found in zip(answer.token_ids, answer.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(answer: Answer, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    if answer.logprobs is None:
        return None

    def spell(token: int) -> str:
        """The token's text, or its bytes where they are not whole characters: those of several must not look alike."""
        raw = tokenizer.token_bytes(token) if tokenizer is not None else b""
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    offset = 0
    for token, found in zip(answer.token_ids, answer.logprobs, strict=True):
        chosen = found[token]
        shown["tokens"].append(spell(token))
        shown["token_logprobs"].append(max(chosen.logprob, LEAST_LOGPROB))
        shown["top_logprobs"].append({spell(other): max(each.logprob, LEAST_LOGPROB) for other, each in found.items()})
        shown["text_offset"].append(offset)
        offset += len(chosen.decoded_token)
    return shown
