"""Step and StepResult: one forward pass in numbers, and its results.

A step is all that an executor is told. It holds no object of the scheduler, so it can be sent to another process,
recorded to a file and replayed. A row is a sequence's place on the device: its tokens, block tables and sampling
parameters are kept there from the step that places it until another sequence is placed in the same row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from chairlift.core.params import SamplingParams

Processor = Callable[[list[int], list[int], Any], Any]  # (prompt ids, output ids, logits) -> logits
Bits = bytes | memoryview  # a mask of tokens: a bit for each id, the lowest bit of the first byte for id 0
Moves = list[tuple[int, int]]  # blocks to copy, as (source, target)


@dataclass(frozen=True, slots=True, eq=False)
class Sampling:
    """How the tokens of one request are chosen and scored; its sequences share one object."""

    params: SamplingParams
    prompt_length: int
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # params.bad_words in token ids
    alternatives: int | None = None  # log-probabilities to return beside the chosen token's; None: none at all
    prompt_alternatives: int | None = None  # the same for each token of the prompt
    processors: tuple[Processor, ...] = ()  # params.logits_processors; these cannot leave the process


_ANY = SamplingParams()


class Newcomer(NamedTuple):
    """A sequence that is placed in a row by this step, with all that the executor must know of it."""

    row: int
    index: int  # type: ignore[assignment]  # of the request's answers: siblings draw different tokens
    tokens: list[int]  # prompt and answer so far
    tables: list[list[int]]  # blocks in each group of layers
    sampling: Sampling


@dataclass(slots=True, eq=False)
class Step:
    """One forward pass. Slices, samples and block table changes are columns: a record for each would cost more."""

    # Slices: `counts[i]` tokens of the sequence in `rows[i]`, from position `starts[i]`. A decode is a slice of 1.
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: int = 0  # of all slices
    # Samples: which row gets a token, and the token of the flat batch with the logits to choose from. A prompt that
    # forks is sampled once for each sibling. The token's position is one behind that of the flat batch's token.
    sample_rows: list[int] = field(default_factory=list)
    sampled_at: list[int] = field(default_factory=list)
    # Numbers of the samples that the executor may choose a token for only when it gets their masks.
    masked: list[int] = field(default_factory=list)
    # Draft tokens to check, as (number of the sample, tokens). The sample's slice ends with these tokens, which stand
    # behind the sequence's last known token; its result is the drafts that were accepted and one token more.
    drafts: list[tuple[int, list[int]]] = field(default_factory=list)
    newcomers: list[Newcomer] = field(default_factory=list)
    # Block table changes of other rows: `table_blocks[i]` is now block number `table_places[i]` of row `table_rows[i]`.
    table_rows: list[int] = field(default_factory=list)
    table_places: list[int] = field(default_factory=list)
    table_blocks: list[int] = field(default_factory=list)
    table_groups: list[int] = field(default_factory=list)  # which table of the row; empty if each row has one
    # Blocks to move before the pass. All sources are read before any target is written. `copies` stay on the device,
    # `saved` go to host memory and `restored` come from there, `spilled` go from host memory to disk, and `loaded` come
    # from disk to the device. `sent` go to slots outside the pool and `received` come from such slots (exchange.py).
    copies: Moves = field(default_factory=list)
    saved: Moves = field(default_factory=list)
    restored: Moves = field(default_factory=list)
    spilled: Moves = field(default_factory=list)
    loaded: Moves = field(default_factory=list)
    sent: Moves = field(default_factory=list)
    received: Moves = field(default_factory=list)

    def plain(self, *, chooses: bool = True) -> dict[str, Any]:
        """Return the step as numbers, strings, lists and dicts alone, for JSON or a socket.

        Without `chooses`, it is for an executor that chooses and scores no token, and has no sampling parameters.
        """
        found = {each.name: getattr(self, each.name) for each in fields(Step)}
        shared = list({id(each.sampling): each.sampling for each in self.newcomers}.values())  # by siblings
        found["newcomers"] = [[*each[:4], shared.index(each.sampling)] for each in self.newcomers]
        found["samplings"] = [_plain_sampling(each if chooses else _unchosen(each)) for each in shared]
        return {name: value for name, value in found.items() if value}

    @staticmethod
    def of_plain(found: dict[str, Any]) -> Step:
        """Return the step that `plain` described."""
        samplings = [_read_sampling(each) for each in found.get("samplings", ())]
        step = Step(**{name: value for name, value in found.items() if name != "samplings"})
        step.newcomers = [
            Newcomer(row, index, tokens, tables, samplings[number])
            for row, index, tokens, tables, number in found.get("newcomers", ())
        ]
        for name in ("drafts", "copies", "saved", "restored", "spilled", "loaded", "sent", "received"):
            setattr(step, name, list(map(tuple, getattr(step, name))))
        return step


def _unchosen(sampling: Sampling) -> Sampling:
    """Return what an executor that chooses no token must know: for which tokens of the prompt it computes logits."""
    scored = sampling.prompt_alternatives
    return Sampling(_ANY, sampling.prompt_length, prompt_alternatives=scored)


def _plain_sampling(sampling: Sampling) -> list[Any]:
    if sampling.processors:
        raise ValueError("a step with logits processors cannot leave its process: they are functions")
    kept = asdict(sampling.params)
    params = {name: value for name, value in kept.items() if name not in ("logits_processors", "structured")}
    params["logit_bias"] = list(params["logit_bias"].items())  # JSON has no whole numbers as keys
    return [params, *(getattr(sampling, each.name) for each in fields(Sampling)[1:-1])]


def _read_sampling(found: list[Any]) -> Sampling:
    params, prompt_length, seed, stop_ids, bad_words, *scored = found
    known = SamplingParams(**{**params, "logit_bias": dict(params["logit_bias"])})
    return Sampling(known, prompt_length, seed, tuple(stop_ids), tuple(map(tuple, bad_words)), *scored)


class TokenLogprobs(NamedTuple):
    """The log-probability of one token under the model, its rank, and the likeliest alternatives."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class Candidates(NamedTuple):
    """The tokens that a beam may continue with, the likeliest first.

    They are as many as the search has beams, not counting stop tokens, and every stop token before the last of these.
    """

    tokens: list[int]
    logprobs: list[float]
    top: list[tuple[int, float]]  # the likeliest alternatives, as many as the client asked for


class PromptLogprobs(NamedTuple):
    """Log-probabilities of the prompt's tokens from position `start` on."""

    start: int
    entries: list[TokenLogprobs]


@dataclass(slots=True, eq=False)
class StepResult:
    """The results of a forward pass."""

    tokens: list[int]  # of the step's samples, one after the other
    logprobs: list[TokenLogprobs | Candidates | None] | None = None  # of each token; candidates for beams
    prompt_logprobs: list[tuple[int, PromptLogprobs]] | None = None  # with the number of the slice
    # Samples without a token, since no logit was above -inf; their entry in `tokens` means nothing.
    failed: list[int] = field(default_factory=list)
    counts: list[int] | None = None  # how many of the tokens belong to each sample; None: one each
