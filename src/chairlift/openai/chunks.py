"""The chunks of a streamed reply, in OpenAI's shapes."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from chairlift.openai.replies import Scores, chat_logprobs, echoed, new_id, prompt_logprobs, text_logprobs
from chairlift.text.message import PLAIN, MessageFormat
from chairlift.text.outputs import Chunk
from chairlift.text.parsers.events import CallStart, Content, Event, Reasoning

if TYPE_CHECKING:
    from chairlift.text.outputs import RequestOutput
    from chairlift.text.tokenizer import Tokenizer


class Chunks(ABC):
    """Writes the chunks of one reply; the index of a piece is that of its choice. Fields that all share are made once.

    `prompts` has the prompt of each choice, with its log-probabilities by the time of the choice's first piece.
    """

    kind = ""

    def __init__(
        self,
        id: str,
        model: str,
        tokenizer: Tokenizer | None,
        prompts: Sequence[RequestOutput],
        *,
        usage: bool,
        token_ids: bool,
    ) -> None:
        self.common = {"id": id, "object": self.kind, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._with_usage = usage
        self._with_ids = token_ids
        self._started: set[int] = set()

    @abstractmethod
    def of(self, piece: Chunk) -> Iterator[dict[str, Any]]:
        """The chunks that carry a piece."""

    def usage(self, used: dict[str, Any]) -> dict[str, Any]:
        """Return the last chunk, with usage and no choices."""
        return {**self.common, "choices": [], "usage": used}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self.common, "choices": [choice]}
        if self._with_usage:
            chunk["usage"] = None
        return chunk

    def _prompt(self, choice: int, *, scores: bool) -> dict[str, Any]:
        """Return the prompt's token ids and log-probabilities, as far as the request asked for them."""
        prompt = self._prompts[choice]
        fields: dict[str, Any] = {}
        if self._with_ids:
            fields["prompt_token_ids"] = prompt.prompt_token_ids
        if scores and prompt.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(prompt.prompt_logprobs)
        return fields


class Deltas:
    """The deltas of one choice: content, reasoning and tool calls, as a parser finds them in the text."""

    def __init__(self, form: MessageFormat) -> None:
        self._parser = form.parser()
        self._shows_reasoning = form.shows_reasoning
        self.calls = 0

    def of(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """Return the deltas of the next piece of text."""
        events = self._parser.feed(text)
        if is_last:
            events += self._parser.finish()
        return [self._delta(event) for event in events if self._shows_reasoning or not isinstance(event, Reasoning)]

    def _delta(self, event: Event) -> dict[str, Any]:
        match event:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text, "reasoning": text}
            case CallStart(index, name):
                self.calls += 1
                function = {"name": name, "arguments": ""}
                return {
                    "tool_calls": [{"index": index, "id": new_id("call"), "type": "function", "function": function}]
                }
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}


class ChatChunks(Chunks):
    """Chunks of a chat completion: the role first, then content, then the finish reason."""

    kind = "chat.completion.chunk"

    def __init__(self, *args: Any, top: int, form: MessageFormat = PLAIN, **options: Any) -> None:
        super().__init__(*args, **options)
        self._top = top
        self._deltas = None if form.is_plain else [Deltas(form) for _ in self._prompts]

    def of(self, piece: Chunk) -> Iterator[dict[str, Any]]:
        """The chunks that carry a piece."""
        if piece.index not in self._started:
            first = self._chunk(self._choice(piece.index, {"role": "assistant", "content": ""}))
            # All choices have one prompt, which is sent once.
            yield first if self._started else first | self._prompt(piece.index, scores=True)
            self._started.add(piece.index)
        scores = None
        if piece.logprobs:
            scores = chat_logprobs(piece.token_ids, piece.logprobs, self._top, self._tokenizer)
        deltas = [{"content": piece.text}] if piece.text else []
        reason = piece.finish_reason
        if self._deltas is not None:
            deltas = self._deltas[piece.index].of(piece.text, is_last=reason is not None)
            if reason == "stop" and self._deltas[piece.index].calls:
                reason = "tool_calls"
        if not deltas and (scores is not None or (self._with_ids and piece.token_ids)):
            deltas = [{"content": ""}]
        for number, delta in enumerate(deltas):
            choice = self._choice(piece.index, delta)
            if number == 0:
                choice["logprobs"] = scores
                if self._with_ids:
                    choice["token_ids"] = piece.token_ids
            yield self._chunk(choice)
        if reason is not None:
            choice = self._choice(piece.index, {})
            choice |= {"finish_reason": reason, "stop_reason": piece.stop_reason}
            yield self._chunk(choice)

    def _choice(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


class TextChunks(Chunks):
    """Chunks of a plain completion: with echo the prompt, then text; the last one has the finish reason."""

    kind = "text_completion"

    def __init__(self, *args: Any, echo: bool, no_output: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self._echo = echo
        self._no_output = no_output
        self._offsets = [0] * len(self._prompts)

    def of(self, piece: Chunk) -> Iterator[dict[str, Any]]:
        """The chunks that carry a piece."""
        if self._no_output:
            piece = Chunk("", [], piece.index, piece.finish_reason, piece.stop_reason)
        told = {}
        if piece.index not in self._started:
            self._started.add(piece.index)
            told = self._prompt(piece.index, scores=not self._echo)  # an echo shows them in its own way
            if self._echo:
                yield self._chunk(self._echoed(piece.index) | told)
                told = {}
        new_ids = self._with_ids and piece.token_ids
        if piece.text or piece.finish_reason is not None or piece.logprobs or new_ids or told:
            choice = self._choice(piece.index, piece.text, piece.token_ids, piece.logprobs)
            yield self._chunk(choice | {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason} | told)

    def _echoed(self, choice: int) -> dict[str, Any]:
        """Return the prompt as a choice, with its log-probabilities if the answer has them."""
        prompt = self._prompts[choice]
        has_scores = prompt.outputs[0].logprobs is not None
        found = self._choice(
            choice,
            echoed(prompt, self._tokenizer),
            prompt.prompt_token_ids,
            prompt.prompt_logprobs if has_scores else None,
        )
        return found | ({"token_ids": []} if self._with_ids else {})

    def _choice(
        self, index: int, text: str, ids: Sequence[int], scores: Sequence[Scores | None] | None
    ) -> dict[str, Any]:
        shown = None
        if scores:
            # Offsets count the tokens' texts: the sent text lags behind while it may be the start of a stop string.
            shown, self._offsets[index] = text_logprobs(ids, scores, self._tokenizer, self._offsets[index])
        choice = {"index": index, "text": text, "logprobs": shown, "finish_reason": None, "stop_reason": None}
        return choice | ({"token_ids": ids} if self._with_ids else {})
