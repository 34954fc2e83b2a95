"""Rules: token ids that requests bias, allow or ban, applied to a step's logits in a few operations for all rows.

Rules are prepared once per request, for all of its answers, and once per set of rows: while the same rows decode, a
step allocates no array and loops over no row's ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch

from chairlift.core.step import Newcomer, Processor, Sampling
from chairlift.ops.batch import to_device


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """A request's bad words of one length: their first tokens, and the token that completes each."""

    begun: torch.Tensor  # [words, length - 1]
    last: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class RequestRules:
    """The token ids that one request biases, allows or bans."""

    bias: tuple[np.ndarray, np.ndarray] | None
    forbidden: torch.Tensor | None  # [vocabulary] True for tokens outside allowed_token_ids
    stop_ids: np.ndarray
    min_length: int  # until a sequence is this long, its stop tokens are banned
    bad_words: tuple[Words, ...]
    prompt: list[int]
    processors: tuple[Processor, ...]


@dataclass(slots=True, eq=False)
class Prepared:
    """The rules of the rows of one step, by place: row of the logits * vocabulary + token id."""

    key: tuple[bytes, bytes]
    processed: list[tuple[int, RequestRules]] = field(default_factory=list)
    forbidden: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    bias: tuple[torch.Tensor, torch.Tensor] | None = None
    banned: torch.Tensor | None = None
    # Bad words: the rows that have some, the most tokens before a word's last one, each request's range of these rows
    # with its words, and the places of the last tokens of all words of all rows.
    worded: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    reach: int = 0
    words: list[tuple[slice, tuple[Words, ...]]] = field(default_factory=list)
    completing: torch.Tensor | None = None


class Rules:
    """The rules of every row that has some."""

    def __init__(self, tokens: torch.Tensor, vocabulary: int) -> None:
        self._tokens = tokens  # [rows, length] prompt and output of each row
        self._vocabulary = vocabulary
        self._device = tokens.device
        self._of_row: dict[int, RequestRules] = {}
        self._last: tuple[Sampling | None, RequestRules | None] = None, None  # a request's rows are placed together
        self._prepared = Prepared((b"", b""))

    def place(self, newcomer: Newcomer) -> None:
        """Read the rules of a row's new sequence."""
        row, sampling = newcomer.row, newcomer.sampling
        if self._last[0] is not sampling:
            self._last = sampling, self._read(sampling, newcomer.tokens[: sampling.prompt_length])
        rules = self._last[1]
        if rules is not None or row in self._of_row:
            self._prepared = Prepared((b"", b""))
            self._of_row.pop(row, None)
        if rules is not None:
            self._of_row[row] = rules

    def have_any(self, rows: np.ndarray) -> bool:
        """Whether any of these rows has rules."""
        return bool(self._of_row) and not self._of_row.keys().isdisjoint(rows.tolist())

    def apply_(self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> None:
        """Apply the rules to contiguous logits [rows, vocabulary] of the tokens at these positions."""
        ruled = [(at, rules) for at, row in enumerate(rows.tolist()) if (rules := self._of_row.get(row)) is not None]
        must_go_on = np.array([positions[at] < rules.min_length for at, rules in ruled])
        key = rows.tobytes(), must_go_on.tobytes()
        if self._prepared.key != key:
            self._prepared = self._prepare(key, ruled, must_go_on)
        prepared, flat = self._prepared, logits.view(-1)
        for at, rules in prepared.processed:
            # Read from the device, which waits for the steps in flight: the host may not have their tokens yet.
            output = self._tokens[int(rows[at]), len(rules.prompt) : int(positions[at])].tolist()
            for process in rules.processors:
                logits[at].copy_(process(rules.prompt, output, logits[at]))
        if prepared.bias is not None:
            flat.index_add_(0, *prepared.bias)
        for at, forbidden in prepared.forbidden:
            logits[at].masked_fill_(forbidden, -torch.inf)
        if prepared.banned is not None:
            flat.index_fill_(0, prepared.banned, -torch.inf)
        if prepared.completing is not None:
            self._ban_words(flat, prepared, prepared.completing, rows, positions)

    def _ban_words(
        self, flat: torch.Tensor, prepared: Prepared, completing: torch.Tensor, rows: np.ndarray, positions: np.ndarray
    ) -> None:
        """Ban the last token of each bad word if the row ends with the word's other tokens."""
        reach, worded = prepared.reach, prepared.worded
        row, position = (each.long() for each in to_device(self._device, rows[worded], positions[worded]))
        places = position[:, None] + torch.arange(-reach, 0, device=self._device)
        seen = self._tokens[row[:, None], places.clamp(min=0)].masked_fill(places < 0, -1)
        matches = []
        for own, lengths in prepared.words:
            for words in lengths:
                before = seen[own, None, reach - words.begun.shape[1] :]
                matches.append((before == words.begun).all(-1).flatten())
        # The minimum of the logit and -inf or inf: several words may have the same last token.
        limit = torch.where(torch.cat(matches), -torch.inf, torch.inf).to(flat.dtype)
        flat.scatter_reduce_(0, completing, limit, "amin")

    def _prepare(
        self, key: tuple[bytes, bytes], ruled: list[tuple[int, RequestRules]], must_go_on: np.ndarray
    ) -> Prepared:
        found, vocabulary = Prepared(key), self._vocabulary
        found.processed = [(at, rules) for at, rules in ruled if rules.processors]
        found.forbidden = [(at, rules.forbidden) for at, rules in ruled if rules.forbidden is not None]
        biased = [(at, rules.bias) for at, rules in ruled if rules.bias is not None]
        if biased:
            values = np.concatenate([bias[1] for _, bias in biased])
            found.bias = self._places(at * vocabulary + bias[0] for at, bias in biased), self._floats(values)
        short = [pair for pair, goes_on in zip(ruled, must_go_on.tolist(), strict=True) if goes_on]
        if any(rules.stop_ids.size for _, rules in short):
            found.banned = self._places(at * vocabulary + rules.stop_ids for at, rules in short)
        self._prepare_words(found, [pair for pair in ruled if pair[1].bad_words])
        return found

    def _prepare_words(self, found: Prepared, ruled: list[tuple[int, RequestRules]]) -> None:
        if not ruled:
            return
        ruled = sorted(ruled, key=lambda pair: id(pair[1]))  # groups the rows by request
        found.worded = np.array([at for at, _ in ruled])
        found.reach = max(words.begun.shape[1] for _, rules in ruled for words in rules.bad_words)
        places, first = [], 0
        for _, group in groupby(ruled, key=lambda pair: id(pair[1])):
            own = list(group)
            rules = own[0][1]
            found.words.append((slice(first, first + len(own)), rules.bad_words))
            starts = self._vocabulary * np.array([at for at, _ in own])
            places += [np.add.outer(starts, words.last).ravel() for words in rules.bad_words]
            first += len(own)
        found.completing = self._places(places)

    def _read(self, sampling: Sampling, prompt: list[int]) -> RequestRules | None:
        params = sampling.params
        must_go_on = params.min_tokens > 0 and bool(sampling.stop_ids)
        is_banned = bool(sampling.bad_words) or must_go_on
        if not (params.logit_bias or params.allowed_token_ids or is_banned or sampling.processors):
            return None
        bias = forbidden = None
        if params.logit_bias:
            bias = _ids(params.logit_bias), np.array(list(params.logit_bias.values()), np.float32)
        if params.allowed_token_ids:
            forbidden = torch.ones(self._vocabulary, dtype=torch.bool, device=self._device)
            forbidden.index_fill_(0, self._places([_ids(params.allowed_token_ids)]), False)
        return RequestRules(
            bias=bias,
            forbidden=forbidden,
            stop_ids=_ids(sampling.stop_ids if must_go_on else ()),
            min_length=sampling.prompt_length + params.min_tokens if must_go_on else 0,
            bad_words=self._read_words(sampling.bad_words),
            prompt=prompt,
            processors=sampling.processors,
        )

    def _read_words(self, words: Sequence[tuple[int, ...]]) -> tuple[Words, ...]:
        """Return bad words grouped by length, without words longer than any sequence."""
        fitting = sorted((word for word in words if len(word) <= self._tokens.shape[1]), key=len)
        found = []
        for _, group in groupby(fitting, key=len):
            ids = np.array(list(group), np.int32)
            found.append(Words(to_device(self._device, np.ascontiguousarray(ids[:, :-1]))[0], ids[:, -1]))
        return tuple(found)

    def _places(self, parts: Iterable[np.ndarray]) -> torch.Tensor:
        return to_device(self._device, np.concatenate(list(parts)))[0].long()

    def _floats(self, values: np.ndarray) -> torch.Tensor:
        return to_device(self._device, values.view(np.int32))[0].view(torch.float32)


def _ids(ids: Iterable[int]) -> np.ndarray:
    return np.array(list(ids), np.int64)
