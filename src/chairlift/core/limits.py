"""Limits: what a step and a sequence may take at most, and the refusal of what could never run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from chairlift.core.errors import ContextLengthError, RequestError, SettingsError
from chairlift.core.params import ALL, SamplingParams
from chairlift.core.request import Request

_MOST_SCORES = 1 << 24  # log-probabilities of one request that asks for the whole vocabulary's: some 4 GB


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step and a sequence may take at most."""

    max_sequences: int  # in the batch at once
    step_tokens: int  # in one forward pass
    max_length: int  # of a sequence, prompt included
    vocab_size: int

    def __post_init__(self) -> None:
        for name in ("max_sequences", "step_tokens", "max_length", "vocab_size"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        if self.step_tokens < self.max_sequences:
            raise SettingsError(
                f"step_tokens is {self.step_tokens}, less than max_sequences {self.max_sequences}: "
                "each running sequence needs one token a step; raise the first or lower the second"
            )

    def longest(self, request: Request) -> int:
        """The most tokens that a sequence of it may have."""
        wanted = request.params.max_tokens
        return self.max_length if wanted is None else min(self.max_length, len(request.prompt) + wanted)

    def truncate(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """The prompt's last tokens, if a request wants no more of it; -1 leaves room for max_tokens.

        >>> Limits(1, 8, 8, 100).truncate([1, 2, 3, 4, 5, 6, 7, 8, 9], SamplingParams(truncate_prompt_tokens=3))
        [7, 8, 9]
        """
        keep = self.kept(params)
        return prompt if keep is None or len(prompt) <= keep else prompt[-keep:]

    def kept(self, params: SamplingParams) -> int | None:
        """How many of a prompt's last tokens a request wants at most; None: all of them."""
        if params.truncate_prompt_tokens != ALL:
            return params.truncate_prompt_tokens
        room = min(params.max_tokens or 1, self.max_length // 2)  # an answer that fills the context leaves half
        return self.max_length - max(1, room)

    def check(self, request: Request) -> None:
        """Refuse what could never run, with a RequestError."""
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
        """Refuse a prompt that could never run, whatever else its request asks for."""
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
                    "use its own tokenizer"
                )

    def _check_choices(self, request: Request) -> None:
        """Refuse what leaves too few tokens to choose from, as far as that is known before the first is chosen."""
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
        """Refuse log-probabilities of the whole vocabulary for more tokens than memory has room for."""
        params = request.params
        scored = params.width * (self.longest(request) - len(request.prompt)) if params.logprobs == ALL else 0
        scored += len(request.prompt) if params.prompt_logprobs == ALL else 0
        if scored * self.vocab_size > _MOST_SCORES:
            raise RequestError(
                f"logprobs of all {self.vocab_size:,} tokens are asked for at {scored:,} places, and at most "
                f"{_MOST_SCORES // self.vocab_size:,} fit in memory: lower max_tokens, or ask for up to 64 alternatives"
            )
