"""Bounds on log-probabilities: in one reply, and in all replies in flight.

A small request can make a large reply: n answers, each with 65 numbers for every prompt token. A request's most
log-probabilities are counted on arrival, and held against one budget until its reply is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from chairlift.core.errors import RequestError
from chairlift.openai.options import Options
from chairlift.serving.failures import Failure
from chairlift.serving.generation import EncodedPrompt

MOST = 1 << 19  # in one reply: some 40 MB of JSON, or 25,000 tokens with 20 alternatives each
STREAMED = 1 << 12  # for the prompts of a stream: the event loop writes its chunks
_IN_FLIGHT = 1 << 21  # in all replies of an HTTP process: some 30 MB as the engine sends them


@dataclass(slots=True)
class ScoreBudget:
    """Counts the log-probabilities of replies that have not been sent."""

    held: int = 0

    def hold(self, count: int) -> None:
        """Add a request's log-probabilities, or raise a Failure if the budget is exceeded."""
        if self.held and self.held + count > _IN_FLIGHT:
            raise Failure(
                f"replies with {self.held:,} log-probabilities are in flight, and {count:,} more are too many: "
                "try again in a moment",
                429,
                "rate_limit_error",
                "too_many_logprobs",
                retry_after=2.0,
            )
        self.held += count

    def release(self, count: int) -> None:
        """Subtract a request's log-probabilities."""
        self.held -= count


def count_scores(encoded: Sequence[EncodedPrompt], options: Options, max_length: int, *, chat: bool) -> int:
    """Return the most log-probabilities that the reply can have, or raise a RequestError if they are too many.

    A prompt's ids or text, repeated for each answer, count as one per token.
    """
    params = encoded[0].params
    copies = 1 if chat else params.n  # a chat reply has its prompt only once
    prompts = copies * sum(len(each.prompt) for each in encoded)
    scored = 0 if params.prompt_logprobs is None else params.prompt_logprobs + 1
    most, where = (STREAMED, "stream") if options.stream else (MOST, "reply")
    if prompts * scored > most:
        raise RequestError(
            f"prompt_logprobs is {params.prompt_logprobs}: {copies} answers x {prompts // copies:,} prompt tokens x "
            f"{scored} make {prompts * scored:,} log-probabilities in one {where}, and the most is {most:,}: lower n "
            f"or prompt_logprobs, or {'leave out stream' if options.stream else 'send fewer prompts'}"
        )
    shown = prompts * (scored + (options.echo or options.return_token_ids))
    if shown > MOST:
        raise RequestError(
            f"n is {copies}: {copies} answers that each repeat {prompts // copies:,} prompt tokens make {shown:,}, and "
            f"the most in one reply is {MOST:,}: lower n, or leave out echo and return_token_ids"
        )
    if params.logprobs is None:
        return shown
    each = params.width * (params.logprobs + 1)
    tokens = sum(_most_tokens(one, max_length) for one in encoded)
    if options.stream:  # chunks are sent as they are generated, and Backlog bounds the unread ones
        return min(MOST, shown + each * tokens)
    if shown + each * tokens > MOST:
        raise RequestError(
            f"logprobs is {params.logprobs}: {params.width} answers x {tokens:,} tokens x {params.logprobs + 1} may "
            f"make {each * tokens:,} log-probabilities in one reply, and the most is {MOST:,}: lower max_tokens, "
            "logprobs or n"
        )
    return shown + each * tokens


def with_room(encoded: EncodedPrompt, max_length: int) -> EncodedPrompt:
    """Set max_tokens, if it is not given and the log-probabilities could otherwise be too many for a reply."""
    params = encoded.params
    if params.max_tokens is not None or params.logprobs is None:
        return encoded
    scored = 0 if params.prompt_logprobs is None else params.prompt_logprobs + 2
    room = (MOST - scored * len(encoded.prompt)) // (params.width * (params.logprobs + 1))
    if room >= max_length - len(encoded.prompt):
        return encoded
    return replace(encoded, params=replace(params, max_tokens=max(1, params.min_tokens, room)))


def _most_tokens(encoded: EncodedPrompt, max_length: int) -> int:
    room = max_length - len(encoded.prompt)
    return room if encoded.params.max_tokens is None else min(room, encoded.params.max_tokens)
