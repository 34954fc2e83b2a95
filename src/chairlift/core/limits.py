"""Limits: the largest batch, step and sequence, and the rejection of requests that can never run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from chairlift.core.errors import ContextLengthError, RequestError, SettingsError
from chairlift.core.params import ALL, SamplingParams
from chairlift.core.request import Request

_MOST_SCORES = 1 << 24  # log-probabilities of one request with logprobs of the whole vocabulary: some 4 GB


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest batch, step and sequence."""

    max_sequences: int  # in the batch at once
    step_tokens: int  # in one forward pass
    max_length: int  # of a sequence, prompt included
    vocab_size: int
    step_drafts: int = 0  # draft tokens in one forward pass

    def __post_init__(self) -> None:
        for name in ("max_sequences", "step_tokens", "max_length", "vocab_size"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        if self.step_tokens < self.max_sequences:
            raise SettingsError(
                f"step_tokens is {self.step_tokens}, less than max_sequences {self.max_sequences}: "
                "each running sequence needs one token a step; raise step_tokens or lower max_sequences"
            )

    @property
    def max_samples(self) -> int:
        """The most tokens that one forward pass samples."""
        return self.max_sequences + self.step_drafts

    def max_tokens_of(self, request: Request) -> int:
        """Return the largest number of tokens, prompt included, that a sequence of the request may have."""
        max_tokens = request.params.max_tokens
        return self.max_length if max_tokens is None else min(self.max_length, len(request.prompt) + max_tokens)

    def truncate(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """Return the prompt's last truncate_prompt_tokens tokens; -1 keeps as many as leave room for max_tokens.

        >>> Limits(1, 8, 8, 100).truncate([1, 2, 3, 4, 5, 6, 7, 8, 9], SamplingParams(truncate_prompt_tokens=3))
        [7, 8, 9]
        """
        keep = self.kept_prompt_tokens(params)
        return prompt if keep is None or len(prompt) <= keep else prompt[-keep:]

    def kept_prompt_tokens(self, params: SamplingParams) -> int | None:
        """Return the number of last prompt tokens that truncate_prompt_tokens keeps; None keeps all."""
        if params.truncate_prompt_tokens != ALL:
            return params.truncate_prompt_tokens
        room = min(params.max_tokens or 1, self.max_length // 2)  # the prompt keeps at least half of the context
        return self.max_length - max(1, room)

    def check(self, request: Request) -> None:
        """Raise RequestError for a request that can never run."""
        self.check_prompt(request.prompt, request.params)
        params = request.params
        if params.width > self.max_sequences:
            name = "n" if params.best_of is None else "best_of"
            raise RequestError(
                f"{name} is {params.width} and the batch holds {self.max_sequences} sequences: lower {name}",
                setting_advice="or raise max_sequences",
            )
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", params.logit_bias)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("bad_words", [token for word in request.bad_words for token in word])
        self._check_choices(request)
        self._check_scores(request)

    def check_prompt(self, prompt: list[int], params: SamplingParams) -> None:
        """Raise RequestError for a prompt that can never run, whatever its sampling parameters."""
        if not prompt:
            raise RequestError("the prompt is empty: give at least one token")
        if len(prompt) >= self.max_length:
            raise ContextLengthError(len(prompt), params.max_tokens, self.max_length)
        self._check_ids("the prompt", prompt)

    def _check_ids(self, name: str, tokens: Collection[int]) -> None:
        for token in (min(tokens), max(tokens)) if tokens else ():
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"{name} holds token id {token}, but the model's ids go from 0 to {self.vocab_size - 1}: "
                    "use the model's tokenizer"
                )

    def _check_choices(self, request: Request) -> None:
        """Raise RequestError where the parameters alone leave too few tokens to sample from."""
        params, stops = request.params, request.stop_ids
        name = "n" if params.best_of is None else "best_of"
        if params.use_beam_search and params.width > self.vocab_size - len(stops):
            raise RequestError(
                f"{name} is {params.width} beams, and of the model's {self.vocab_size} tokens only "
                f"{self.vocab_size - len(stops)} do not end an answer: lower {name} or give fewer stop_token_ids"
            )
        banned = {word[0] for word in request.bad_words if len(word) == 1} | (stops if params.min_tokens else set())
        if params.allowed_token_ids and banned.issuperset(params.allowed_token_ids):
            raise RequestError(
                "allowed_token_ids are all forbidden by bad_words, or by min_tokens as stop tokens: allow more tokens"
            )

    def _check_scores(self, request: Request) -> None:
        """Raise RequestError for log-probabilities of the whole vocabulary at more positions than fit in memory."""
        params = request.params
        scored = params.width * (self.max_tokens_of(request) - len(request.prompt)) if params.logprobs == ALL else 0
        scored += len(request.prompt) if params.prompt_logprobs == ALL else 0
        if scored * self.vocab_size > _MOST_SCORES:
            raise RequestError(
                f"logprobs of all {self.vocab_size:,} tokens are asked for at {scored:,} positions, and at most "
                f"{_MOST_SCORES // self.vocab_size:,} fit in memory: lower max_tokens, or ask for up to 64 alternatives"
            )
