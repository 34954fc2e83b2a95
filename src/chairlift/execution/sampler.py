"""The sampler: applies each row's sampling parameters to the step's logits, on the device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from chairlift.core.step import Newcomer
from chairlift.execution.rules import Rules
from chairlift.ops import sampling
from chairlift.ops.batch import to_device
from chairlift.ops.filters import Filters
from chairlift.ops.masks import forbid_

_WIDE = (1 << 64) - 1
# Larger values have no visible effect. Within these, any model's logits stay finite in single precision: penalized by
# a factor and divided by the lowest temperature, a logit is some 1e29 at most.
_FACTOR = 1e20
_HOTTEST = 1e30
_MOST = 1 << 30  # largest top_k: above any vocabulary size, and a 32-bit number


class Sent(NamedTuple):
    """The parameters of some rows on the device. Steps of the same decodes pass the same array of rows."""

    rows: np.ndarray
    on_device: torch.Tensor
    temperature: torch.Tensor
    filters: Filters | None


class Sampler:
    """Each row's parameters, in arrays, so that a step reads them all at once."""

    def __init__(self, rows: int, tokens: torch.Tensor, vocabulary: int) -> None:
        self._tokens = tokens  # [rows, length] prompt and output of each row, owned by Rows
        self._device = tokens.device
        self._temperature = np.zeros(rows, np.float32)
        self._top_k = np.zeros(rows, np.int64)
        self._top_p = np.ones(rows, np.float32)
        self._min_p = np.zeros(rows, np.float32)
        self._penalties = np.zeros((3, rows), np.float32)
        self._has_penalties = np.zeros(rows, bool)
        self._prompt_length = np.zeros(rows, np.int64)
        self._seed = np.zeros(rows, np.uint64)
        self._rules = Rules(tokens, vocabulary)
        self._sent: Sent | None = None

    def place(self, newcomer: Newcomer) -> None:
        """Write a new sequence's parameters to its row."""
        row, sampling = newcomer.row, newcomer.sampling
        self._sent = None
        params = sampling.params
        is_random = not (params.is_greedy or params.use_beam_search)
        self._temperature[row] = min(params.temperature, _HOTTEST) if is_random else 0.0
        self._top_k[row] = min(max(params.top_k, 0), _MOST)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        repetition = min(max(params.repetition_penalty, 1 / _FACTOR), _FACTOR)
        self._penalties[:, row] = repetition, params.presence_penalty, params.frequency_penalty
        self._has_penalties[row] = params.has_penalties
        self._prompt_length[row] = sampling.prompt_length
        # Sequences of one request differ by their index alone.
        self._seed[row] = _mix(sampling.seed + newcomer.index * 0xD1B54A32D192ED03)
        self._rules.place(newcomer)

    def is_greedy(self, rows: np.ndarray) -> bool:
        """Whether all of these rows choose the likeliest token, without penalties or rules."""
        return not (self._rules.have_any(rows) or self._has_penalties[rows].any() or self._temperature[rows].any())

    def sample(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray, masks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return one token for each row of logits, which may be changed, and write it to the row at its position.

        It is sampling.NO_TOKEN where a row's mask, rules or logits leave no token to choose.
        """
        is_ruled = self._rules.have_any(rows)
        penalized = np.flatnonzero(self._has_penalties[rows])
        is_fused = sampling.is_fused(logits)
        if is_fused and not is_ruled and not penalized.size:
            return self._sample_fused(logits, rows, positions, masks)
        if masks is not None:
            forbid_(logits, masks)
        logits = logits.float().contiguous()
        if is_ruled:
            self._rules.apply_(logits, rows, positions)
        if penalized.size:
            self._apply_penalties(logits, penalized, rows[penalized], positions[penalized])
        if is_fused:
            return self._sample_fused(logits, rows, positions, None)
        tokens = self._choose(logits, rows, positions)
        self._tokens[self._to_device(rows), self._to_device(positions)] = tokens.to(torch.int32)
        return tokens

    def _sample_fused(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray, masks: torch.Tensor | None
    ) -> torch.Tensor:
        """Sample with kernels that write the tokens to their rows; what depends on the rows alone is sent once."""
        keys = self._keys(rows, positions).astype(np.uint32).view(np.int32)
        if self._sent is None or self._sent.rows is not rows:
            shares, top_k, is_filtered = self._filters(rows)
            where, numbers, k = to_device(self._device, rows, shares.view(np.int32), top_k)
            temperature, top_p, min_p = numbers.view(torch.float32)
            self._sent = Sent(rows, where, temperature, Filters(k, top_p, min_p) if is_filtered else None)
        _, where, temperature, filters = self._sent
        at, on_device = to_device(self._device, positions, keys)
        if masks is not None and filters is not None:
            forbid_(logits, masks)
            masks = None
        return sampling.draw_to_rows(logits, temperature, on_device, filters, masks, (self._tokens, where, at))

    def _choose(self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        random = np.flatnonzero(self._temperature[rows] > 0)
        if not random.size:
            return sampling.likeliest(logits)
        if random.size == rows.size:
            return self._draw(logits, rows, positions)
        tokens = sampling.likeliest(logits)
        index = self._to_device(random)
        tokens[index] = self._draw(logits[index], rows[random], positions[random])
        return tokens

    def _draw(self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        shares, top_k, is_filtered = self._filters(rows)
        temperature, top_p, min_p = self._to_device(shares)
        filters = Filters(self._to_device(top_k), top_p, min_p) if is_filtered else None
        return sampling.draw(logits, temperature, self._to_device(self._keys(rows, positions)), filters)

    def _filters(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
        """Return temperature, top_p and min_p, then top_k, and whether any row has a filter."""
        shares = np.stack([self._temperature[rows], self._top_p[rows], self._min_p[rows]])
        top_k = self._top_k[rows]
        return shares, top_k, bool((top_k > 0).any() or (shares[1] < 1).any() or (shares[2] > 0).any())

    def _keys(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return two 32-bit keys from (seed, position), the only source of randomness."""
        with np.errstate(over="ignore"):
            mixed = _mix_array(self._seed[rows] + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        return np.stack([mixed >> np.uint64(32), mixed & np.uint64(0xFFFFFFFF)], axis=1).astype(np.int64)

    def _apply_penalties(self, logits: torch.Tensor, which: np.ndarray, rows: np.ndarray, lengths: np.ndarray) -> None:
        sampling.penalize_(
            logits,
            self._to_device(which),
            self._tokens[self._to_device(rows), : int(lengths.max())],
            self._to_device(self._prompt_length[rows]),
            self._to_device(lengths),
            *(self._to_device(values) for values in self._penalties[:, rows]),
        )

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


def _mix(seed: int) -> int:
    """Hash a seed to 64 bits, so that neighbouring seeds are uncorrelated."""
    return int(_mix_array(np.array([seed & _WIDE], np.uint64))[0])


def _mix_array(x: np.ndarray) -> np.ndarray:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = np.multiply(x ^ (x >> np.uint64(shift)), np.uint64(factor))  # modulo 2**64
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
