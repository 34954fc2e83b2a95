"""Beam search with vLLM's parameters and results, on our own beam search."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.core.errors import RequestError
from chairlift.core.params import SamplingParams
from chairlift.text.outputs import CompletionOutput, Logprob, RequestOutput
from chairlift.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """The parameters of `LLM.beam_search`."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0  # above 0 favours long answers, below 0 short ones; by the answer's length
    include_stop_str_in_output: bool = False

    def sampling(self) -> SamplingParams:
        """Return these parameters as SamplingParams, which checks their ranges."""
        if self.temperature:
            raise RequestError(
                f"temperature is {self.temperature}: beam search uses the model's own probabilities; leave it out"
            )
        return SamplingParams(
            n=self.beam_width,
            use_beam_search=True,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=0,
        )


@dataclass(slots=True)
class BeamSearchSequence:
    """One of the likeliest answers; tokens and text include the prompt."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]  # of the answer's tokens
    cum_logprob: float
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The likeliest answers to one prompt, the best first."""

    sequences: list[BeamSearchSequence]


def as_beams(output: RequestOutput, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """Return a request's answers as beams."""

    def beam(answer: CompletionOutput) -> BeamSearchSequence:
        tokens = [*output.prompt_token_ids, *answer.token_ids]
        return BeamSearchSequence(
            tokens,
            answer.logprobs or [],
            answer.cumulative_logprob or 0.0,
            "" if tokenizer is None else tokenizer.decode(tokens),
            answer.finish_reason,
            answer.stop_reason,
        )

    return BeamSearchOutput([beam(answer) for answer in output.outputs])
