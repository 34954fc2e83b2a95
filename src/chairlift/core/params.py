"""SamplingParams: how the next token is chosen and when to stop, checked once when it is made.

A field is written here and nowhere else: its type, default, range and description become what JSON may hold for it over
HTTP (openai/params.py), its entry in the API's description (serving/openapi.py) and its form on the engine's socket.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from chairlift.core.errors import RequestError
from chairlift.core.structured import Structured

MIN_TEMPERATURE = (
    1e-5  # temperatures below it are greedy: logits that differ at all would be further apart than any noise
)
ALL = -1  # of logprobs: every token of the vocabulary; of truncate_prompt_tokens: as many tokens as fit
_WORDS = 1 << 12  # entries of `stop`, `bad_words` and `stop_token_ids`: every step looks at all of them
_BIASES = 1 << 16  # entries of logit_bias
_HIGHEST = 2**63 - 1  # a whole number must fit 64 bits
_ALLOWED = 1 << 20  # entries of allowed_token_ids: more than any vocabulary has


@dataclass(frozen=True, slots=True)
class About:
    """A field's range and description."""

    text: str  # what it does
    low: float | None = None
    high: float | None = None
    advice: str = ""  # what to use instead of a value out of range
    most: int | None = None  # entries that a list may have
    for_engine: bool = True  # False: only the code that reads prompts and writes text needs it


def about(text: str, default: Any, *range_and_advice: Any, **more: Any) -> Any:
    """Return a dataclass field with its description, its default and, for a number, its range and advice."""
    found = {"about": About(text, *range_and_advice, **more)}
    return field(default_factory=dict, metadata=found) if default == {} else field(default=default, metadata=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one request; the defaults sample from the model's own distribution.

    >>> SamplingParams(temperature=0, max_tokens=32).is_greedy
    True
    """

    n: int = about("Answers to return.", 1, 1, None, "use 1 or more")
    best_of: int | None = about("Answers to generate, of which the n likeliest are returned (default: n).", None, 1)
    use_beam_search: bool = about("Search for the likeliest answers with `best_of` beams, without randomness.", False)
    length_penalty: float = about(
        "Of beams: above 0 favours long answers, below 0 short ones.",
        *(1.0, -10.0, 10.0, "use a number around 1; 0 ignores the length"),
    )
    early_stopping: bool | Literal["never"] = about(
        'Of beams: true ends with `best_of` answers, "never" when none can be better.', False
    )
    temperature: float = about(
        "Spread of the sampling; 0 takes the likeliest token.",
        *(1.0, 0.0, None, "use 0 for greedy, or a positive number"),
    )
    top_k: int = about(
        "Sample from so many of the likeliest tokens; 0 or -1: all.",
        *(0, -1, None, "use 0 for all tokens, or how many to keep"),
    )
    top_p: float = about(
        "Sample from the likeliest tokens that make up this share, above 0.",
        *(1.0, 0.0, 1.0, "use a share above 0 and up to 1"),
    )
    min_p: float = about(
        "Drop tokens less likely than this share of the likeliest one.", 0.0, 0.0, 1.0, "use a share from 0 to 1"
    )
    repetition_penalty: float = about(
        "Divides the logits of tokens in prompt and answer, above 0; 1 is off.",
        *(1.0, 0.0, None, "use a positive number; 1 is off"),
    )
    presence_penalty: float = about(
        "Subtracted from the logits of tokens in the answer.", 0.0, -2.0, 2.0, "use -2 to 2; 0 is off"
    )
    frequency_penalty: float = about(
        "Subtracted for each time that a token is in the answer.", 0.0, -2.0, 2.0, "use -2 to 2; 0 is off"
    )
    logit_bias: Mapping[int, float] = about("Added to the logits of these token ids.", {}, most=_BIASES)
    allowed_token_ids: Sequence[int] | None = about("The only tokens that may be chosen.", None, most=_ALLOWED)
    bad_words: str | Sequence[str] = about("Words that must not be in the answer.", (), most=_WORDS, for_engine=False)
    seed: int | None = about(
        "Makes sampling repeatable (default: drawn for each request).",
        *(None, -(2**63), 2**63 - 1, "use a 64-bit whole number"),
    )
    max_tokens: int | None = about(
        "Tokens of an answer at most; None: until the context is full.",
        *(256, 1, None, "use 1 or more, or None for as many as fit"),
    )
    min_tokens: int = about("Tokens before an answer may end.", 0, 0, None, "use 0 or more")
    stop: str | Sequence[str] = about("Strings that end an answer.", (), most=_WORDS, for_engine=False)
    stop_token_ids: Sequence[int] = about("Token ids that end an answer.", (), most=_WORDS)
    ignore_eos: bool = about("Go on after the model's own end.", False)
    include_stop_str_in_output: bool = about("Keep what ended an answer in its text.", False, for_engine=False)
    skip_special_tokens: bool = about("Leave special tokens out of the text.", True, for_engine=False)
    detokenize: bool = about("False leaves an answer's text empty.", True, for_engine=False)
    logprobs: int | None = about(
        "Log-probabilities of each token and so many alternatives; -1, in process only: of all tokens.",
        *(None, ALL, 64, "use 0 to 64 alternatives, -1 for all, or None for no log-probabilities"),
    )
    prompt_logprobs: int | None = about(
        "Log-probabilities of each prompt token and so many alternatives; -1, in process only: of all tokens.",
        *(None, ALL, 64, "use 0 to 64 alternatives, -1 for all, or None for no log-probabilities"),
    )
    truncate_prompt_tokens: int | None = about(
        "Keep only so many of the prompt's last tokens; -1: as many as fit.",
        *(None, ALL, None, "use 1 or more, or -1 for as many tokens as fit"),
        for_engine=False,
    )
    # A Structured, or what `Structured.of` reads. Any: the engine's socket cannot tell dataclasses from mappings.
    structured: Any = about(  # noqa: RUF009
        "What the answer must match: one of json, json_object, regex, choice, grammar and structural_tag.",
        None,
        for_engine=False,
    )
    logits_processors: Sequence[Callable[..., Any]] | None = about(
        "Functions of (output ids, logits) or (prompt ids, output ids, logits) that return the logits.",
        None,
        for_engine=False,
    )

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
        if self.structured is not None:
            object.__setattr__(self, "structured", Structured.of(self.structured))
        self._check()

    def _check(self) -> None:
        for name, check, is_optional, low, high, advice in _RANGES:
            value = getattr(self, name)
            if value is not None or not is_optional:
                check(name, value, low, high, advice)
        for name, most in _MOST:
            if len(getattr(self, name) or ()) > most:
                raise RequestError(f"{name} has {len(getattr(self, name)):,} entries: use at most {most:,}")
        if self.best_of is not None:
            _whole("best_of", self.best_of, self.n, _HIGHEST, "use n or more, or leave it out")
        self._check_beams()
        if self.top_p == 0:
            raise RequestError("top_p is 0, which keeps no token: use a share above 0 and up to 1")
        if self.repetition_penalty == 0:
            raise RequestError("repetition_penalty is 0, which divides by zero: use a positive number; 1 is off")
        for token, bias in self.logit_bias.items():
            _whole("a token id in logit_bias", token, 0, _HIGHEST, "use ids of the model's vocabulary")
            _number(f"logit_bias of token {token}", bias, -100.0, 100.0, "use -100 to 100")
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
        self._check_reading()

    def _check_reading(self) -> None:
        """Check how the prompt is read and the answer is written."""
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}, not True or False")
        if not self.detokenize and self.stop:
            raise RequestError(
                "detokenize is False, and stop strings are matched in the text: use stop_token_ids, or leave one out"
            )
        if self.truncate_prompt_tokens == 0:
            advice = "use 1 or more, or -1 for as many tokens as fit"
            raise RequestError(f"truncate_prompt_tokens is 0, which leaves no prompt: {advice}")
        for processor in self.logits_processors or ():
            if not callable(processor):
                raise RequestError(f"logits_processors holds {processor!r}, which cannot be called: give functions")

    def _check_beams(self) -> None:
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
            "structured": self.structured,
        }
        if refused := [name for name, value in unsupported.items() if value]:
            raise RequestError(
                f"use_beam_search ranks by the model's own probabilities and does not support {', '.join(refused)}: "
                "leave one of them out"
            )

    def for_engine(self) -> SamplingParams:
        """Return the same parameters without those of the text, which never leave the process that reads the prompt.

        >>> SamplingParams(stop="end", top_k=5).for_engine() == SamplingParams(top_k=5)
        True
        """
        dropped = {name: default for name, default in _TEXT_FIELDS if getattr(self, name) not in (default, ())}
        return replace(self, **dropped) if dropped else self

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
            _whole(f"a token id in {name}", token, 0, _HIGHEST, "use ids of the model's vocabulary")


def _whole(name: str, value: object, low: float, high: float, advice: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}, not a whole number: {advice}")
    if not low <= value <= high:
        raise RequestError(f"{name} is {_shown(value)}, out of range: {advice}")


def _number(name: str, value: object, low: float, high: float, advice: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
        raise RequestError(f"{name} is {_shown(value)}, not a finite number: {advice}")
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}, out of range: {advice}")


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


ABOUT: dict[str, About] = {each.name: each.metadata["about"] for each in fields(SamplingParams)}
_TYPES: dict[str, str] = {each.name: str(each.type) for each in fields(SamplingParams)}


def _range_of(name: str) -> tuple[str, Callable[..., None], bool, float, float, str]:
    """Return how a field's value is checked: the function, whether None passes, the range and the advice."""
    told, is_whole = ABOUT[name], _TYPES[name].startswith("int")
    low, high = -math.inf if told.low is None else told.low, told.high
    if high is None:
        high = _HIGHEST if is_whole else math.inf
    return name, _whole if is_whole else _number, "None" in _TYPES[name], low, high, told.advice


# best_of is left out: its lower bound is n.
_RANGES = [_range_of(name) for name, told in ABOUT.items() if told.low is not None and name != "best_of"]
_MOST = [(name, told.most) for name, told in ABOUT.items() if told.most is not None]
_SWITCHES = [name for name, kind in _TYPES.items() if kind == "bool"]
_TEXT_FIELDS: list[tuple[str, Any]] = [
    (each.name, each.default) for each in fields(SamplingParams) if not ABOUT[each.name].for_engine
]
