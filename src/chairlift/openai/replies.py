"""From finished requests to OpenAI's reply objects."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chairlift.text.outputs import Logprob, RequestOutput
    from chairlift.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no infinity; this is what OpenAI writes
Scores = dict[int, "Logprob"]


def new_id(prefix: str) -> str:
    """A name nobody else has."""
    return f"{prefix}-{uuid.uuid4().hex}"


def chat_completion(
    output: RequestOutput,
    model: str,
    top: int | None,
    tokenizer: Tokenizer | None,
    *,
    id: str | None = None,
    token_ids: bool = False,
) -> dict[str, Any]:
    """The reply to a chat completion; `top` is how many alternatives each token shows."""
    choices = [
        {
            "index": answer.index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": None
            if answer.logprobs is None
            else chat_logprobs(answer.token_ids, answer.logprobs, top or 0, tokenizer),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            **({"token_ids": answer.token_ids} if token_ids else {}),
        }
        for answer in output.outputs
    ]
    reply = _reply(id or new_id("chatcmpl"), "chat.completion", model, choices, usage([output]))
    if output.prompt_logprobs is not None:
        reply["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
    if token_ids:
        reply["prompt_token_ids"] = output.prompt_token_ids
    return reply


def text_completion(
    outputs: Sequence[RequestOutput],
    model: str,
    tokenizer: Tokenizer | None,
    *,
    id: str | None = None,
    token_ids: bool = False,
    echo: bool = False,
    no_output: bool = False,
) -> dict[str, Any]:
    """The reply to a plain completion of one or several prompts; with `echo`, each answer begins with its prompt."""
    choices: list[dict[str, Any]] = []
    for output in outputs:
        # An echo shows them in its own way. They are the same for all answers to a prompt, and may be many.
        scored = None if output.prompt_logprobs is None or echo else prompt_logprobs(output.prompt_logprobs)
        for answer in output.outputs:
            ids: list[int] = [] if no_output else answer.token_ids
            scores: list[Scores] | None = answer.logprobs and [] if no_output else answer.logprobs
            text = "" if no_output else answer.text
            all_ids: list[int] = ids
            all_scores: Sequence[Scores | None] | None = scores
            if echo:
                text = echoed(output, tokenizer) + text
                if scores is not None:
                    all_ids = [*output.prompt_token_ids, *ids]
                    all_scores = [*(output.prompt_logprobs or []), *scores]
            choice = {
                "index": len(choices),
                "text": text,
                "logprobs": None if all_scores is None else text_logprobs(all_ids, all_scores, tokenizer)[0],
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
            }
            if scored is not None:
                choice["prompt_logprobs"] = scored
            if token_ids:
                choice |= {"token_ids": ids, "prompt_token_ids": output.prompt_token_ids}
            choices.append(choice)
    used = usage(outputs)
    if no_output:
        used |= {"completion_tokens": 0, "total_tokens": used["prompt_tokens"]}
    return _reply(id or new_id("cmpl"), "text_completion", model, choices, used)


def echoed(output: RequestOutput, tokenizer: Tokenizer | None) -> str:
    """The prompt as text, whether it came so or in token ids."""
    if output.prompt is not None:
        return output.prompt
    return "" if tokenizer is None else tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens in and out, and of those that came in, what need not be computed; of best_of answers all are counted."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(output.metrics.output_tokens for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def error_object(
    message: str, kind: str = "invalid_request_error", code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """The body of a reply that is no answer."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _reply(id: str, kind: str, model: str, choices: list[dict[str, Any]], used: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": used,
        "system_fingerprint": None,
    }


def chat_logprobs(
    ids: Sequence[int], scores: Sequence[Scores], top: int, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """The log-probabilities of some tokens, as chat completions show them."""

    def entry(token: int, found: Logprob) -> dict[str, Any]:
        spelled = list(tokenizer.token_bytes(token)) if tokenizer is not None else None
        return {"token": found.decoded_token, "logprob": max(found.logprob, LEAST_LOGPROB), "bytes": spelled}

    content = [
        {
            **entry(token, found[token]),
            # The likeliest come first, in order; the chosen token follows if it is not one of them.
            "top_logprobs": [entry(*pair) for pair in islice(found.items(), top)],
        }
        for token, found in zip(ids, scores, strict=True)
    ]
    return {"content": content, "refusal": None}


def text_logprobs(
    ids: Sequence[int], scores: Sequence[Scores | None], tokenizer: Tokenizer | None, offset: int = 0
) -> tuple[dict[str, Any], int]:
    """The same as plain completions show them, and how many characters there are; `offset` is how many came before."""

    def spell(token: int) -> str:
        """The token's text, or its bytes where they are not whole characters: those of several must not look alike."""
        raw = tokenizer.token_bytes(token) if tokenizer is not None else b""
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, found in zip(ids, scores, strict=True):
        shown["tokens"].append(spell(token))
        shown["text_offset"].append(offset)
        if found is None:  # the first token of a prompt: nothing came before it
            shown["token_logprobs"].append(None)
            shown["top_logprobs"].append(None)
            offset += len(tokenizer.token_text(token)) if tokenizer is not None else 0
            continue
        chosen = found[token]
        shown["token_logprobs"].append(max(chosen.logprob, LEAST_LOGPROB))
        shown["top_logprobs"].append({spell(other): max(each.logprob, LEAST_LOGPROB) for other, each in found.items()})
        offset += len(chosen.decoded_token)
    return shown, offset


def prompt_logprobs(scores: Sequence[Scores | None]) -> list[dict[str, Any] | None]:
    """A prompt's log-probabilities, in the shape that users of vLLM know."""
    return [
        None
        if found is None
        else {
            str(token): {
                "logprob": max(each.logprob, LEAST_LOGPROB),
                "rank": each.rank,
                "decoded_token": each.decoded_token,
            }
            for token, each in found.items()
        }
        for found in scores
    ]
