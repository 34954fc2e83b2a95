"""Checks: which tokens of a step are sampled, where it checks drafts, and which of them are results.

Every token of a check is sampled as in a decode, with the randomness of its position. A draft is accepted if it is the
token that was sampled in its place: then the tokens behind it were computed from the right context. So an answer has
the distribution that it has without drafts, and even the same tokens for the same seed. For a draft that is one token,
not a distribution, this is rejection sampling: it is accepted with its probability under the model, and a rejected one
is replaced by a token of the others' distribution.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chairlift.core.step import Step
from chairlift.ops.filters import NO_TOKEN

_NONE = -1  # no draft must follow: the token behind the last draft


class Samples(NamedTuple):
    """The tokens to sample, one or more for each sample of a step."""

    rows: np.ndarray
    at: np.ndarray  # places in the flat batch of the logits to choose from
    number: np.ndarray  # of the sample


class Checks(NamedTuple):
    """The drafts of a step."""

    ends: list[int]  # behind each sample's last token
    wanted: np.ndarray  # for each token to sample, the draft that it must equal for the next one to be a result
    rows: np.ndarray  # of each draft
    places: np.ndarray  # of each draft, among the tokens to sample: where it must be sampled

    def accepted(
        self, tokens: list[int], coin: np.random.Generator | None, chance: float
    ) -> tuple[list[int], list[int]]:
        """Return the numbers of the tokens that are results, and how many belong to each sample.

        Behind accepted drafts, NO_TOKEN is no result: an accepted draft may end the answer, else the next step finds no
        token either. With a `coin`, drafts are accepted with this chance, whatever was sampled.
        """
        same = np.array(tokens) == self.wanted
        if coin is not None:
            same = (coin.random(same.size) < chance) & (self.wanted != _NONE)
        is_same, begin = same.tolist(), 0
        kept: list[int] = []
        counts: list[int] = []
        for end in self.ends:
            last = begin
            while is_same[last]:
                last += 1
            end_kept = last if last > begin and tokens[last] == NO_TOKEN else last + 1
            kept += range(begin, end_kept)
            counts.append(end_kept - begin)
            begin = end
        return kept, counts


def samples_of(step: Step) -> Samples:
    """Return a step's samples, if it checks no drafts."""
    rows, at = np.array(step.sample_rows, np.int64), np.array(step.sampled_at, np.int64)
    return Samples(rows, at, np.arange(rows.size))


def checks_of(step: Step) -> tuple[Samples, Checks]:
    """Return the tokens to sample of a step that checks drafts."""
    samples = len(step.sample_rows)
    drafts = np.zeros(samples, np.int64)
    for own, tokens in step.drafts:
        drafts[own] = len(tokens)
    ends = np.cumsum(drafts + 1)
    number = np.repeat(np.arange(samples), drafts + 1)
    back = ends[number] - 1 - np.arange(number.size)  # how far before its sample's last token
    rows = np.array(step.sample_rows, np.int64)[number]
    at = np.array(step.sampled_at, np.int64)[number] - back
    wanted = np.full(number.size, _NONE, np.int64)
    for own, tokens in step.drafts:
        first = int(ends[own]) - 1 - len(tokens)
        wanted[first : first + len(tokens)] = tokens
    places = np.flatnonzero(back)
    return Samples(rows, at, number), Checks(ends.tolist(), wanted, rows[places], places)
