"""Scores: log-probabilities for requests that ask for them, and candidates for beam searches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from chairlift.core.step import Candidates, Newcomer, TokenLogprobs
from chairlift.ops.batch import to_device
from chairlift.ops.sampling import candidates, score


@dataclass(slots=True, eq=False)
class Scores:
    """Log-probabilities of some tokens, in host memory once the step's event has completed."""

    counts: list[int]  # alternatives requested, of each token
    tokens: torch.Tensor
    chosen: torch.Tensor
    ranks: torch.Tensor
    top_values: torch.Tensor
    top_ids: torch.Tensor

    def entries(self) -> list[TokenLogprobs]:
        """Return one record per token, with its requested number of alternatives."""
        columns = (each.tolist() for each in (self.tokens, self.chosen, self.ranks))
        return [
            TokenLogprobs(token, logprob, rank, _pairs(ids[:count], values[:count]))
            for token, logprob, rank, ids, values, count in zip(
                *columns, self.top_ids.numpy(), self.top_values.numpy(), self.counts, strict=True
            )
        ]


class Search(NamedTuple):
    """The parameters of one row's beam search."""

    width: int
    alternatives: int  # requested by the client
    stops: np.ndarray


@dataclass(slots=True, eq=False)
class BeamCandidates:
    """The likeliest next tokens of some beams, in host memory once the step's event has completed."""

    searches: list[Search]
    values: torch.Tensor
    ids: torch.Tensor

    def entries(self) -> list[Candidates]:
        """Return one record per beam, with as many tokens as its search can use."""
        found = []
        for search, ids, values in zip(self.searches, self.ids.numpy(), self.values.numpy(), strict=True):
            used, asked = search.width + search.stops.size, search.alternatives
            found.append(Candidates(ids[:used].tolist(), values[:used].tolist(), _pairs(ids[:asked], values[:asked])))
        return found


class Scoring:
    """The log-probabilities that each row asks for."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._device = device
        self._alternatives = np.full(rows, -1)  # -1: no log-probabilities
        self._prompt_alternatives = np.full(rows, -1)  # of prompt tokens; -1: none
        self._prompt_lengths = np.zeros(rows, np.int64)
        self._searches: dict[int, Search] = {}

    def place(self, newcomer: Newcomer) -> None:
        """Store which log-probabilities a row's new sequence asks for; only a request's first one scores the prompt."""
        row, sampling = newcomer.row, newcomer.sampling
        self._alternatives[row] = -1 if sampling.alternatives is None else sampling.alternatives
        is_asked = sampling.prompt_alternatives is not None and newcomer.index == 0
        self._prompt_alternatives[row] = sampling.prompt_alternatives if is_asked else -1
        self._prompt_lengths[row] = sampling.prompt_length
        self._searches.pop(row, None)
        if sampling.params.use_beam_search:
            stops = np.array(sampling.stop_ids, np.int64)
            self._searches[row] = Search(sampling.params.width, sampling.alternatives or 0, stops)

    def find(self, rows: np.ndarray) -> np.ndarray:
        """Return the numbers of the rows that ask for log-probabilities."""
        return np.flatnonzero(self._alternatives[rows] >= 0)

    def reads_prompts(self, rows: np.ndarray) -> bool:
        """Whether any of these rows asks for prompt log-probabilities."""
        return bool((self._prompt_alternatives[rows] >= 0).any())

    def prompt_of(self, row: int) -> tuple[int, int]:
        """Return the alternatives requested per prompt token (-1: no log-probabilities) and the prompt's length."""
        return int(self._prompt_alternatives[row]), int(self._prompt_lengths[row])

    def score(
        self, logits: torch.Tensor, tokens: torch.Tensor, rows: np.ndarray, places: np.ndarray
    ) -> list[tuple[list[int], Scores | BeamCandidates]]:
        """Score the tokens of rows, or find the candidates of rows that are beams, with their places in the step."""
        is_beam = np.array([row in self._searches for row in rows.tolist()])
        found: list[tuple[list[int], Scores | BeamCandidates]] = []
        for kind in (False, True):
            chosen = np.flatnonzero(is_beam == kind)
            if not chosen.size:
                continue
            part, own = logits, tokens
            if chosen.size < rows.size:
                which = to_device(self._device, chosen)[0].long()
                part, own = logits[which], tokens[which]
            scores = self._find_candidates(part, rows[chosen]) if kind else self._score_rows(part, own, rows[chosen])
            found.append((places[chosen].tolist(), scores))
        return found

    def _score_rows(self, logits: torch.Tensor, tokens: torch.Tensor, rows: np.ndarray) -> Scores:
        return score_tokens(logits, tokens, self._alternatives[rows].tolist())

    def _find_candidates(self, logits: torch.Tensor, rows: np.ndarray) -> BeamCandidates:
        searches = [self._searches[row] for row in rows.tolist()]
        most = max(search.stops.size for search in searches)
        stops, is_stop = np.zeros((rows.size, most), np.int64), np.zeros((rows.size, most), np.int64)
        for at, search in enumerate(searches):
            stops[at, : search.stops.size] = search.stops
            is_stop[at, : search.stops.size] = 1
        count = max(max(search.width, search.alternatives) for search in searches)
        ids, real = to_device(self._device, stops, is_stop)
        found = candidates(logits.float(), ids.long(), real.bool(), min(count, logits.shape[-1]))
        return BeamCandidates(searches, *(each.to("cpu", non_blocking=True) for each in found))


def score_tokens(logits: torch.Tensor, tokens: torch.Tensor, counts: list[int]) -> Scores:
    """Score tokens, and copy the scores to pinned host memory: reading them must not wait for the next step."""
    found = score(logits.float(), tokens, min(max(counts), logits.shape[-1]))
    return Scores(counts, *(each.to("cpu", non_blocking=True) for each in (tokens, *found)))


def _pairs(ids: np.ndarray, values: np.ndarray) -> list[tuple[int, float]]:
    return list(zip(ids.tolist(), values.tolist(), strict=True))
