"""OpenAI's reply objects for finished requests."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from chairlift.text.message import PLAIN, MessageFormat, read_message, reasoning_tokens

if TYPE_CHECKING:
    from chairlift.text.outputs import Answer, Logprob, RequestOutput
    from chairlift.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # as OpenAI writes minus infinity, which JSON does not have
Scores = dict[int, "Logprob"]


def new_id(prefix: str) -> str:
    """Return a unique id."""
    return f"{prefix}-{uuid.uuid4().hex}"


def chat_completion(
    output: RequestOutput,
    model: str,
    top: int | None,
    tokenizer: Tokenizer | None,
    *,
    id: str | None = None,
    token_ids: bool = False,
    form: MessageFormat = PLAIN,
) -> dict[str, Any]:
    """Return the reply to a chat completion; `top` is the number of alternatives per token."""
    choices = []
    for answer in output.outputs:
        message, reason = chat_message(answer, form)
        choice = {
            "index": answer.index,
            "message": message,
            "logprobs": None
            if answer.logprobs is None
            else chat_logprobs(answer.token_ids, answer.logprobs, top or 0, tokenizer),
            "finish_reason": reason,
            "stop_reason": answer.stop_reason,
            **({"token_ids": answer.token_ids} if token_ids else {}),
        }
        choices.append(choice)
    reply = _reply(id or new_id("chatcmpl"), "chat.completion", model, choices, usage([output]))
    if output.prompt_logprobs is not None:
        reply["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
    if token_ids:
        reply["prompt_token_ids"] = output.prompt_token_ids
    return reply


def chat_message(answer: Answer, form: MessageFormat) -> tuple[dict[str, Any], str | None]:
    """Return an answer as a message, and its finish reason."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if form.is_plain:
        return message, answer.finish_reason
    read = read_message(form, answer.text)
    message["content"] = read.content
    if read.reasoning:
        message |= {"reasoning_content": read.reasoning, "reasoning": read.reasoning}
    if not read.calls:
        return message, answer.finish_reason
    message["content"] = read.content or None
    message["tool_calls"] = [
        {"id": new_id("call"), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in read.calls
    ]
    return message, "tool_calls" if answer.finish_reason == "stop" else answer.finish_reason


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
    """Return the reply to a plain completion of one or several prompts; `echo` prepends each answer's prompt."""
    choices: list[dict[str, Any]] = []
    for output in outputs:
        # Computed once for all answers to a prompt, since there may be many. With echo, "logprobs" has them.
        of_prompt = None if output.prompt_logprobs is None or echo else prompt_logprobs(output.prompt_logprobs)
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
            if of_prompt is not None:
                choice["prompt_logprobs"] = of_prompt
            if token_ids:
                choice |= {"token_ids": ids, "prompt_token_ids": output.prompt_token_ids}
            choices.append(choice)
    used = usage(outputs)
    if no_output:
        used |= {"completion_tokens": 0, "total_tokens": used["prompt_tokens"]}
    return _reply(id or new_id("cmpl"), "text_completion", model, choices, used)


def echoed(output: RequestOutput, tokenizer: Tokenizer | None) -> str:
    """Return the prompt as text, decoding it if it was sent as token ids."""
    if output.prompt is not None:
        return output.prompt
    return "" if tokenizer is None else tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Count prompt tokens, those found in the prefix cache, output tokens of all best_of answers, and drafts."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(output.metrics.output_tokens for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    found = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    details = {}
    if any(output.thinking is not None for output in outputs):
        details["reasoning_tokens"] = sum(map(_reasoning_tokens, outputs))
    if drafted := sum(output.num_drafted_tokens for output in outputs):
        accepted = sum(output.num_accepted_tokens for output in outputs)
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = drafted - accepted
    if details:
        found["completion_tokens_details"] = details
    return found


def _reasoning_tokens(output: RequestOutput) -> int:
    if (thinking := output.thinking) is None:
        return 0
    answers = (answer.token_ids for answer in output.outputs)
    return sum(reasoning_tokens(ids, thinking.start, thinking.end, thinking.is_open) for ids in answers)


def error_object(
    message: str, kind: str = "invalid_request_error", code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """Return the body of an error reply."""
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
    """Return tokens' log-probabilities in the shape of chat completions."""

    def entry(token: int, found: Logprob) -> dict[str, Any]:
        spelled = list(tokenizer.token_bytes(token)) if tokenizer is not None else None
        return {"token": found.decoded_token, "logprob": max(found.logprob, LEAST_LOGPROB), "bytes": spelled}

    content = [
        {
            **entry(token, found[token]),
            # The likeliest tokens are first, in order; the sampled token follows if it is not among them.
            "top_logprobs": [entry(*pair) for pair in islice(found.items(), top)],
        }
        for token, found in zip(ids, scores, strict=True)
    ]
    return {"content": content, "refusal": None}


def text_logprobs(
    ids: Sequence[int], scores: Sequence[Scores | None], tokenizer: Tokenizer | None, offset: int = 0
) -> tuple[dict[str, Any], int]:
    """Return tokens' log-probabilities in the shape of plain completions, and the offset after the last token."""

    def spell(token: int) -> str:
        """Return the token's text, or its bytes if they are not UTF-8, so that different tokens have different keys."""
        raw = tokenizer.token_bytes(token) if tokenizer is not None else b""
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, found in zip(ids, scores, strict=True):
        shown["tokens"].append(spell(token))
        shown["text_offset"].append(offset)
        if found is None:  # the first token of a prompt has no log-probability
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
    """Return a prompt's log-probabilities in vLLM's shape."""
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
