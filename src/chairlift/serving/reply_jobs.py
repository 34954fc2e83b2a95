"""Reply: a job that writes the JSON of a reply that is not streamed.

The HTTP process keeps log-probabilities as the engine encoded them, a twentieth of their size as objects, and never
decodes them: writing 64 alternatives for each of 1,000 tokens takes a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from chairlift.apis.fronts import CHAT, FRONTS
from chairlift.core.constraint import Thinking
from chairlift.core.step import TokenLogprobs
from chairlift.openai.replies import chat_completion, text_completion
from chairlift.text.answer import describe
from chairlift.text.message import PLAIN, MessageFormat
from chairlift.text.outputs import Answer, Logprob, RequestMetrics, RequestOutput
from chairlift.text.tokenizer import Tokenizer

_decode_entry = msgspec.msgpack.Decoder(TokenLogprobs).decode
decode_entries = msgspec.msgpack.Decoder(list[TokenLogprobs]).decode


class AnswerPart(msgspec.Struct, frozen=True, array_like=True):
    """One answer."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    scores: list[bytes] | None  # one entry for each token


class OutputPart(msgspec.Struct, frozen=True, array_like=True):
    """One prompt and its answers."""

    prompt: str | None
    prompt_token_ids: list[int]
    answers: list[AnswerPart]
    output_tokens: int
    cached_tokens: int
    scores: list[tuple[int, bytes]] | None  # of the prompt, per step: the position of the first entry, and the entries
    drafts: tuple[int, int] = (0, 0)  # draft tokens checked and accepted


class Reply(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The reply to a chat or to a plain completion."""

    id: str
    model: str
    is_chat: bool
    top: int | None  # alternatives per token in a chat reply
    outputs: list[OutputPart]
    token_ids: bool = False
    echo: bool = False
    no_output: bool = False
    form: MessageFormat = PLAIN
    thinking: Thinking | None = None
    front: str = CHAT.name
    repeated: dict[str, Any] = {}  # fields of the request that the front's reply repeats

    @property
    def weight(self) -> int:
        """Time to write the reply, as the number of characters that tokenize in that time."""
        copies = 1 if self.is_chat else len(self.outputs[0].answers)
        scores = texts = 0  # bytes
        for output in self.outputs:
            shown = (len(output.prompt or "") if self.echo else 0) + (
                8 * len(output.prompt_token_ids) if self.token_ids else 0
            )
            texts += copies * shown + sum(len(answer.text) for answer in output.answers)
            scores += copies * sum(len(packed) for _, packed in output.scores or ())
            scores += sum(len(packed) for answer in output.answers for packed in answer.scores or ())
        return scores // 5 + texts // 100

    def write(self, tokenizer: Tokenizer | None) -> bytes:
        """Return the reply's JSON."""
        outputs = [_output(part, tokenizer) for part in self.outputs]
        if self.is_chat:
            outputs[0].thinking = self.thinking
            reply = chat_completion(
                outputs[0], self.model, self.top, tokenizer, id=self.id, token_ids=self.token_ids, form=self.form
            )
            reply = FRONTS[self.front].reply(reply, self.repeated)
        else:
            reply = text_completion(
                outputs,
                self.model,
                tokenizer,
                id=self.id,
                token_ids=self.token_ids,
                echo=self.echo,
                no_output=self.no_output,
            )
        return msgspec.json.encode(reply)


def read_scores(
    count: int, parts: Sequence[tuple[int, bytes]], tokenizer: Tokenizer | None
) -> list[dict[int, Logprob] | None]:
    """Decode the log-probabilities of a prompt of `count` tokens; the first token has none."""
    found: list[dict[int, Logprob] | None] = [None] * count
    for start, packed in parts:
        entries = [describe(entry, tokenizer) for entry in decode_entries(packed)]
        found[start : start + len(entries)] = entries
    return found


def _output(part: OutputPart, tokenizer: Tokenizer | None) -> RequestOutput:
    return RequestOutput(
        request_id="",
        prompt=part.prompt,
        prompt_token_ids=part.prompt_token_ids,
        outputs=[_answer(answer, tokenizer) for answer in part.answers],
        metrics=RequestMetrics(0.0, output_tokens=part.output_tokens),
        prompt_logprobs=None
        if part.scores is None
        else read_scores(len(part.prompt_token_ids), part.scores, tokenizer),
        num_cached_tokens=part.cached_tokens,
        num_drafted_tokens=part.drafts[0],
        num_accepted_tokens=part.drafts[1],
    )


def _answer(part: AnswerPart, tokenizer: Tokenizer | None) -> Answer:
    return Answer(
        part.index,
        part.text,
        part.token_ids,
        None if part.scores is None else [describe(_decode_entry(entry), tokenizer) for entry in part.scores],
        finish_reason=part.finish_reason,
        stop_reason=part.stop_reason,
    )
