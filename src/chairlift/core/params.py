"""SamplingParams: how tokens are sampled and when generation stops, checked once at construction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chairlift.core.errors import RequestError

MIN_TEMPERATURE = 1e-5  # lower ones are greedy: dividing by them puts unequal logits further apart than any noise
ALL = -1  # in logprobs: every token of the vocabulary; in truncate_prompt_tokens: as many tokens as fit


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one request; the defaults sample from the model's own distribution.

    >>> SamplingParams(temperature=0, max_tokens=32).is_greedy
    True
    """

    n: int = 1
    best_of: int | None = None  # answers to generate, of which the n likeliest are returned (default: n)
    use_beam_search: bool = False  # search for the likeliest answers with `best_of` beams, with no randomness
    length_penalty: float = 1.0  # of beam scores: above 0 favours long answers, below 0 short ones
    early_stopping: bool | str = (
        False  # of beam search: True ends at `best_of` answers, "never" when no beam can improve
    )
    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: str | Sequence[str] = ()
    seed: int | None = None  # None: the engine draws one for the request
    max_tokens: int | None = 256  # None: until the context is full
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True  # False leaves the answer's text empty
    logprobs: int | None = None  # alternatives per sampled token; 0: the sampled token alone; -1: the whole vocabulary
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None  # number of last prompt tokens to keep; -1: as many as fit
    # In process only: functions of (output ids, logits) or (prompt ids, output ids, logits) that return the logits.
    logits_processors: Sequence[Callable[..., Any]] | None = None

    def __post_init__(self) -> None:
        # Tuples everywhere, so that no reader has to ask "string or list?" again.
        for name in ("stop", "bad_words", "stop_token_ids"):
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        object.__setattr__(self, "logits_processors", _as_tuple("logits_processors", self.logits_processors))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _as_tuple("allowed_token_ids", self.allowed_token_ids))
        if not isinstance(self.logit_bias or {}, Mapping):
            raise RequestError(
                f"logit_bias is {self.logit_bias!r}, not a mapping: give token ids and the number to add to each logit"
            )
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        self._check()

    def _check(self) -> None:
        _whole("n", self.n, 1, "use 1 or more")
        if self.best_of is not None:
            _whole("best_of", self.best_of, self.n, "use n or more, or leave it out")
        self._check_beams()
        _number("temperature", self.temperature, 0.0, math.inf, "use 0 for greedy, or a positive number")
        _whole("top_k", self.top_k, -1, "use 0 for all tokens, or how many to keep")
        _number("top_p", self.top_p, 0.0, 1.0, "use a share above 0 and up to 1")
        if self.top_p == 0:
            raise RequestError("top_p is 0, which keeps no token: use a share above 0 and up to 1")
        _number("min_p", self.min_p, 0.0, 1.0, "use a share from 0 to 1")
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, "use a positive number; 1 is off")
        if self.repetition_penalty == 0:
            raise RequestError("repetition_penalty is 0, which divides by zero: use a positive number; 1 is off")
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0, "use -2 to 2; 0 is off")
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "use -2 to 2; 0 is off")
        for token, bias in self.logit_bias.items():
            _whole("a token id in logit_bias", token, 0, "use ids of the model's vocabulary")
            _number(f"logit_bias of token {token}", bias, -100.0, 100.0, "use -100 to 100")
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), "use a 64-bit whole number")
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, "use 1 or more, or None for as many as fit")
        _whole("min_tokens", self.min_tokens, 0, "use 0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}: lower one or raise the other"
            )
        for name, strings in (("stop", self.stop), ("bad_words", self.bad_words)):
            for text in strings:
                if not isinstance(text, str) or not text:
                    raise RequestError(f"{name} holds {text!r}: each entry must be a non-empty string")
        _token_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids is empty, which allows nothing: leave it out to allow all tokens")
            _token_ids("allowed_token_ids", self.allowed_token_ids)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _whole(name, value, ALL, "use 0 to 64 alternatives, -1 for all, or None for no log-probabilities", 64)
        self._check_reading()

    def _check_reading(self) -> None:
        """Check how the prompt is read and the answer is written."""
        names = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "use_beam_search", "detokenize")
        for name in names:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}, not True or False")
        if not self.detokenize and self.stop:
            raise RequestError(
                "detokenize is False, and stop strings are matched in the text: use stop_token_ids, or leave one out"
            )
        if self.truncate_prompt_tokens is not None:
            remedy = "use 1 or more, or -1 for as many tokens as fit"
            _whole("truncate_prompt_tokens", self.truncate_prompt_tokens, ALL, remedy)
            if self.truncate_prompt_tokens == 0:
                raise RequestError(f"truncate_prompt_tokens is 0, which leaves no prompt: {remedy}")
        for processor in self.logits_processors or ():
            if not callable(processor):
                raise RequestError(f"logits_processors holds {processor!r}, which cannot be called: give functions")

    def _check_beams(self) -> None:
        _number("length_penalty", self.length_penalty, -10.0, 10.0, "use a number around 1; 0 ignores the length")
        if self.early_stopping not in (True, False, "never"):
            raise RequestError(f"early_stopping is {self.early_stopping!r}: use True, False or 'never'")
        if not self.use_beam_search:
            return
        unsupported = {
            "stop": self.stop,
            "bad_words": self.bad_words,
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids,
            "min_tokens": self.min_tokens,
            "penalties": self.has_penalties,
            "logits_processors": self.logits_processors,
        }
        if refused := [name for name, value in unsupported.items() if value]:
            raise RequestError(
                f"use_beam_search ranks by the model's own probabilities and does not support {', '.join(refused)}: "
                "leave one of them out"
            )

    @property
    def width(self) -> int:
        """The number of sequences to generate."""
        return self.best_of or self.n

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, with no randomness."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    """Convert one string, a list or None to a tuple."""
    if isinstance(value, str):
        return (value,)
    try:
        return () if value is None else tuple(value)
    except TypeError:
        raise RequestError(f"{name} is {value!r}, not a list: put it in one") from None


def _token_ids(name: str, values: Sequence[Any]) -> None:
    if values and (
        set(map(type, values)) != {int} or min(values) < 0
    ):  # checking each id in Python takes ten times as long
        for token in values:
            _whole(f"a token id in {name}", token, 0, "use ids of the model's vocabulary")


def _whole(name: str, value: object, low: int, remedy: str, high: int = 2**63 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}, not a whole number: {remedy}")
    if not low <= value <= high:
        raise RequestError(f"{name} is {_shown(value)}, out of range: {remedy}")


def _number(name: str, value: object, low: float, high: float, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
        raise RequestError(f"{name} is {_shown(value)}, not a finite number: {remedy}")
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}, out of range: {remedy}")


def _shown(value: object) -> str:
    """Format a value for an error; Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a whole number of {value.bit_length()} bits"
    return repr(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False
