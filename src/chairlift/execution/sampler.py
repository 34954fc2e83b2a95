"""The sampler: each row's own parameters, applied to the step's logits on the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from chairlift.core.request import Processor, Sequence
from chairlift.ops import sampling
from chairlift.ops.filters import Filters

_WIDE = (1 << 64) - 1
_LARGEST = 1e38  # that a single-precision number can hold, about; what is beyond it makes no difference


@dataclass(frozen=True, slots=True, eq=False)
class RowRules:
    """What of a request cannot be told in one number: token ids to shift, allow or ban."""

    bias: tuple[torch.Tensor, torch.Tensor] | None
    allowed: torch.Tensor | None
    stop_ids: torch.Tensor | None
    min_length: int  # until the sequence is this long, its stop tokens are banned
    bad_words: tuple[tuple[torch.Tensor, int], ...]  # how each begins, and the token that would complete it
    prompt: list[int]
    processors: tuple[Processor, ...]


class Sampler:
    """Keeps each row's parameters in arrays, so that a step reads them all at once."""

    def __init__(self, seats: int, tokens: torch.Tensor) -> None:
        self._tokens = tokens  # [seats, length] everything each row holds, owned by Rows
        self._device = tokens.device
        self._temperature = np.zeros(seats, np.float32)
        self._top_k = np.zeros(seats, np.int64)
        self._top_p = np.ones(seats, np.float32)
        self._min_p = np.zeros(seats, np.float32)
        self._penalties = np.zeros((3, seats), np.float32)
        self._has_penalties = np.zeros(seats, bool)
        self._prompt_length = np.zeros(seats, np.int64)
        self._seed = np.zeros(seats, np.uint64)
        self._rules: dict[int, RowRules] = {}

    def place(self, sequence: Sequence) -> None:
        """Write a newcomer's parameters to its row."""
        row, params = sequence.row, sequence.request.params
        self._temperature[row] = min(params.temperature, _LARGEST)
        self._top_k[row] = max(params.top_k, 0)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self._penalties[:, row] = np.clip(penalties, -_LARGEST, _LARGEST)
        self._has_penalties[row] = params.has_penalties
        self._prompt_length[row] = sequence.prompt_length
        # Siblings differ by their index alone.
        self._seed[row] = _mix(sequence.request.seed + sequence.index * 0xD1B54A32D192ED03)
        self._rules.pop(row, None)
        rules = self._read_rules(sequence)
        if rules is not None:
            self._rules[row] = rules

    def is_greedy(self, rows: np.ndarray) -> bool:
        """Whether all that these rows want is the likeliest token."""
        is_ruled = bool(self._rules) and not self._rules.keys().isdisjoint(rows.tolist())
        return not (is_ruled or self._has_penalties[rows].any() or self._temperature[rows].any())

    def sample(self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """One token for each row of logits, which may be changed; it will stand at `positions`."""
        ruled = [i for i, row in enumerate(rows.tolist()) if row in self._rules] if self._rules else []
        penalized = np.flatnonzero(self._has_penalties[rows])
        if ruled or penalized.size or not sampling.is_fused(logits):
            logits = logits.float()
        for i in ruled:
            self._apply_rules(logits[i], self._rules[int(rows[i])], int(rows[i]), int(positions[i]))
        if penalized.size:
            self._apply_penalties(logits, penalized, rows[penalized], positions[penalized])
        random = np.flatnonzero(self._temperature[rows] > 0)
        if not random.size:
            return sampling.likeliest(logits)
        if random.size == rows.size or sampling.is_fused(logits):
            return self._draw(logits, rows, positions)
        tokens = sampling.likeliest(logits)
        index = self._send(random)
        tokens[index] = self._draw(logits[index], rows[random], positions[random])
        return tokens

    def _draw(self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        shares = np.stack([self._temperature[rows], self._top_p[rows], self._min_p[rows]])
        top_k = self._top_k[rows]
        temperature, top_p, min_p = self._send(shares)
        is_filtered = (top_k > 0).any() or (shares[1] < 1).any() or (shares[2] > 0).any()
        filters = Filters(self._send(top_k), top_p, min_p) if is_filtered else None
        return sampling.draw(logits, temperature, self._send(self._keys(rows, positions)), filters)

    def _keys(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Two 32-bit keys from (seed, position): all the randomness there is."""
        with np.errstate(over="ignore"):
            mixed = _mix_array(self._seed[rows] + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        return np.stack([mixed >> np.uint64(32), mixed & np.uint64(0xFFFFFFFF)], axis=1).astype(np.int64)

    def _apply_penalties(self, logits: torch.Tensor, which: np.ndarray, rows: np.ndarray, lengths: np.ndarray) -> None:
        index = self._send(which)
        part = logits[index]
        sampling.penalize_(
            part,
            self._tokens[self._send(rows), : int(lengths.max())],
            self._send(self._prompt_length[rows]),
            self._send(lengths),
            *(self._send(values) for values in self._penalties[:, rows]),
        )
        logits[index] = part

    def _apply_rules(self, logits: torch.Tensor, rule: RowRules, row: int, position: int) -> None:
        if rule.processors:
            # Read from the device, which waits for the steps in flight: their tokens may not have come back yet.
            output = self._tokens[row, len(rule.prompt) : position].tolist()
            for process in rule.processors:
                logits.copy_(process(rule.prompt, output, logits))
        if rule.bias is not None:
            ids, values = rule.bias
            logits[ids] += values
        if rule.allowed is not None:
            allowed = logits[rule.allowed]
            logits.fill_(-torch.inf)
            logits[rule.allowed] = allowed
        if rule.stop_ids is not None and position < rule.min_length:
            logits[rule.stop_ids] = -torch.inf
        for begun, last in rule.bad_words:
            if len(begun) > position:
                continue
            matches = (self._tokens[row, position - len(begun) : position] == begun).all()
            logits[last] = torch.where(matches, -torch.inf, logits[last])

    def _read_rules(self, sequence: Sequence) -> RowRules | None:
        params, request = sequence.request.params, sequence.request
        must_go_on = params.min_tokens > 0 and bool(sequence.stop_ids)
        is_banned = bool(request.bad_words) or must_go_on
        if not (params.logit_bias or params.allowed_token_ids or is_banned or request.processors):
            return None
        bias = None
        if params.logit_bias:
            values = np.array(list(params.logit_bias.values()), np.float32)
            bias = self._ids(params.logit_bias), self._send(values)
        return RowRules(
            bias=bias,
            allowed=self._ids(params.allowed_token_ids) if params.allowed_token_ids else None,
            stop_ids=self._ids(sequence.stop_ids) if must_go_on else None,
            min_length=sequence.prompt_length + params.min_tokens,
            bad_words=tuple((self._ids(word[:-1]), word[-1]) for word in request.bad_words),
            prompt=request.prompt,
            processors=request.processors,
        )

    def _ids(self, ids: Iterable[int]) -> torch.Tensor:
        return self._send(np.array(list(ids), np.int64))

    def _send(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


def _mix(seed: int) -> int:
    """Spread a seed over 64 bits, so that neighbouring seeds have nothing in common."""
    return int(_mix_array(np.array([seed & _WIDE], np.uint64))[0])


def _mix_array(x: np.ndarray) -> np.ndarray:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = np.multiply(x ^ (x >> np.uint64(shift)), np.uint64(factor))  # modulo 2**64, as arrays do
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
