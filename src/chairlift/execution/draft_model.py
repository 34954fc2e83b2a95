"""DraftModel: a small model that drafts tokens for the rows of a batch, on the device, before the model checks them.

Its KV is in a cache of its own with the same block numbers: a sequence has one block table for both models, so what is
allocated, shared and freed for one is so for the other. Which tokens of a row it has computed is counted here. What it
lacks, after an admission, a swap or steps without drafts, it computes when it next drafts for the row. Wrong KV could
only make worse drafts: the model checks every one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from chairlift.core.drafting import MAX_DRAFTS
from chairlift.core.step import Newcomer, Step
from chairlift.costs.calibrate import time_checks
from chairlift.execution.drafts import DeviceDrafts, flat_of
from chairlift.execution.graphs import Capturer, DecodeGraphs
from chairlift.execution.rows import Flat, Rows
from chairlift.execution.sampler import Sampler
from chairlift.models.decoder import Decoder
from chairlift.ops.kv_cache import KvCache

_AT_ONCE = 4096  # tokens of prompts in one pass
_SHORT = 64  # tokens of a short prompt


class DraftModel(DeviceDrafts):
    """Drafts with a small model."""

    def __init__(self, decoder: Decoder, cache: KvCache, rows: Rows, sampler: Sampler, max_sequences: int) -> None:
        self._decoder = decoder
        self._cache = cache
        self._rows = rows
        self._sampler = sampler
        self._max_sequences = max_sequences
        self._computed = np.zeros(max_sequences, np.int64)  # tokens of each row with keys and values in the cache
        self.graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def use_graphs(self) -> None:
        """Capture passes over a batch as CUDA graphs, and compile what reads prompts.

        A captured pass has up to twice as many tokens as rows, for drafts that were all taken.
        """
        capturer = Capturer(self._decoder, self._cache, self._rows, self._max_sequences, self._max_sequences)
        self.graphs = DecodeGraphs(capturer, passes=MAX_DRAFTS)
        self.graphs.capture()
        longest = self._rows.tokens.shape[1] - 1  # the last column takes the token sampled behind the longest sequence
        for length in {min(_SHORT, longest), min(_AT_ONCE, longest)}:  # of a row that has no sequence yet
            self._forward(flat_of(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([length])), None)

    def place(self, newcomer: Newcomer) -> None:
        """Note that a row has another sequence."""
        self._computed[newcomer.row] = 0

    def copy(self, step: Step) -> None:
        """Copy the blocks that the step copies."""
        if step.copies:
            self._cache.copy(step.copies)

    def draft(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """Write `counts` drafts of each row behind its token at position `starts`, the last one known."""
        known = np.minimum(self._computed[rows], starts)
        self._read_prompts(rows, known, starts)
        for depth in range(int(counts.max())):
            going = counts > depth
            own, at = rows[going], starts[going] + depth
            if depth == 0:
                self._first(own, known[going], at)
            else:
                self._pass(own, at)
        self._computed[rows] = starts + counts

    def times(self, sizes: Sequence[int]) -> list[tuple[int, float]]:
        """Time a pass over so many rows."""
        if self.graphs is None:
            return time_checks(self._decoder, self._cache, sizes)
        return [(size, self.graphs.seconds(size)) for size in sizes]

    def _read_prompts(self, rows: np.ndarray, known: np.ndarray, starts: np.ndarray) -> None:
        """Compute what is missing of long rows, up to their last two tokens."""
        while (left := np.maximum(starts - 1 - known, 0)).any():
            before = np.cumsum(left) - left
            counts = np.clip(_AT_ONCE - before, 0, left)
            some = np.flatnonzero(counts)
            self._forward(flat_of(rows[some], known[some], counts[some]), None)
            known += counts

    def _first(self, rows: np.ndarray, known: np.ndarray, starts: np.ndarray) -> None:
        """Compute the one or two tokens that are missing of each row, and draft behind the last."""
        counts = starts + 1 - known
        if (counts == 1).all():
            self._pass(rows, starts)
            return
        flat = flat_of(rows, known, counts)
        last = flat.starts[1:] - 1
        if self.graphs is None:
            logits = self._decoder.logits(self._forward(flat, last))
        else:
            found, _ = self.graphs.run(flat.rows[flat.owner], flat.positions, None, is_greedy=False)
            logits = found[torch.from_numpy(last).to(found.device, non_blocking=True)]
        self._choose(logits, rows, starts)

    def _pass(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """Draft behind one token of each row."""
        if self.graphs is None:
            ones = np.ones(rows.size, np.int64)
            hidden = self._forward(flat_of(rows, positions, ones), np.arange(rows.size))
            self._choose(self._decoder.logits(hidden), rows, positions)
            return
        is_greedy = self._sampler.is_greedy(rows)
        logits, tokens = self.graphs.run(rows, positions, None, is_greedy)
        if tokens is None:
            self._choose(logits, rows, positions)

    def _choose(self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> None:
        """Choose as the row's own sampler will, with the same randomness: so that equal models agree."""
        self._sampler.sample(logits, rows, positions + 1)

    def _forward(self, flat: Flat, wanted: np.ndarray | None) -> torch.Tensor:
        self._rows.flush_changes()
        inputs, batch = self._rows.gather(flat)
        batch.others, batch.shared = [], None  # those are of the model's layers and heads
        asked = None if wanted is None else self._decoder.select(batch, wanted)
        return self._decoder.forward(inputs, batch, self._cache, asked)
