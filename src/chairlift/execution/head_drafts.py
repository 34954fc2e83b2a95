"""HeadDrafts: drafts of an EAGLE-3 head, which reads the model's hidden states in every step.

The head's keys and values are a layer of the model's KV cache, at the positions of the states, so they are shared,
cached, swapped and sent with the blocks. The key of a position depends on the token after it, which a sequence that
shares the block may not have. That is one key in each shared prefix; it can make drafts worse, but changes no answer.

A draft is computed from the state of the token before the last known one. For each row, the states at which tokens were
sampled or a slice ended are kept, as many as a check has. A sequence has no drafts in the step that places
it in a row: its KV may come from the host or from another process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from chairlift.core.drafting import MAX_DRAFTS
from chairlift.execution.drafts import DeviceDrafts, flat_of
from chairlift.execution.rows import Flat, Rows
from chairlift.execution.sampler import Sampler
from chairlift.models.eagle3 import STATES, Eagle3Head
from chairlift.ops.batch import Batch
from chairlift.ops.kv_cache import KvCache
from chairlift.ops.sampling import likeliest

_KEPT = MAX_DRAFTS + 1  # states of a row: those of one check


class HeadDrafts(DeviceDrafts):
    """Drafts with a head."""

    def __init__(
        self, head: Eagle3Head, cache: KvCache, rows: Rows, sampler: Sampler, max_sequences: int, max_tokens: int
    ) -> None:
        """`max_tokens` are the tokens of the largest step."""
        config, device = head.config, rows.device
        self._head, self._cache, self._rows, self._sampler = head, cache, rows, sampler
        hidden, dtype = config.layer.hidden_size, config.layer.dtype
        self.states: torch.Tensor = torch.empty(max_tokens, STATES * config.state_size, dtype=dtype, device=device)
        # The last states of each row, fused to one; that of position p is at p modulo _KEPT.
        self._kept = torch.zeros(max_sequences, _KEPT, hidden, dtype=dtype, device=device)

    def read(self, flat: Flat, rows: np.ndarray, at: np.ndarray) -> None:
        """Store the head's keys and values of a step; its sampled tokens are in the rows by now. Keep states."""
        states = self._head.fuse(self.states[: flat.positions.size])
        following, batch = self._gather(flat)
        self._head.store(states, following, batch, self._cache)
        # Also those at the ends of slices without a sample: a prompt's last token alone may be drafted behind.
        rows, at = np.concatenate((rows, flat.rows)), np.concatenate((at, flat.starts[1:] - 1))
        places = self._to_device(rows), self._to_device(flat.positions[at] % _KEPT)
        self._kept[places] = states[self._to_device(at)]

    def draft(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """Write `counts` drafts of each row behind its token at position `starts`, the last one known."""
        before = starts - 1
        states = self._kept[self._to_device(rows), self._to_device(before % _KEPT)]
        for depth in range(int(counts.max())):
            goes_on = counts > depth
            if not goes_on.all():
                rows, before, counts = rows[goes_on], before[goes_on], counts[goes_on]
                states = states[self._to_device(np.flatnonzero(goes_on))]
            states = self._pass(states, rows, before + depth)

    def times(self, sizes: Sequence[int]) -> list[tuple[int, float]]:
        """Time a pass over so many rows; it writes to rows and blocks that have no sequence yet."""
        return [(size, min(self._seconds(size) for _ in range(4))) for size in sizes]

    @torch.inference_mode()
    def _seconds(self, size: int) -> float:
        rows, positions = np.arange(size), np.zeros(size, np.int64)
        self._synchronize()
        start = time.monotonic()
        self._pass(self._kept[self._to_device(rows), 0], rows, positions)
        self._synchronize()
        return time.monotonic() - start

    def _pass(self, states: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Draft from states at these positions (their next tokens are known); return the states behind them."""
        following, batch = self._gather(flat_of(rows, positions, np.ones(rows.size, np.int64)))
        output = self._head(states, following, batch, self._cache)
        logits = self._head.logits(output)
        if self._sampler.is_greedy(rows):
            found, ids = likeliest(logits), self._head.ids
            self._rows.put(rows, positions + 2, found if ids is None else ids[found.long()])
        else:  # as the row's own sampler will, with the same randomness
            self._sampler.sample(self._head.widen(logits), rows, positions + 2)
        return output

    def _gather(self, flat: Flat) -> tuple[torch.Tensor, Batch]:
        """Return the tokens behind those of a flat batch, and the batch."""
        self._rows.flush_changes()
        following, batch = self._rows.gather(flat, ahead=1)
        batch.shared = None  # shared reads are laid out for the model's KV heads
        return following.clamp(min=0), batch  # NO_TOKEN is behind a sequence that ends

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._rows.device, non_blocking=True)

    def _synchronize(self) -> None:
        if self._rows.device.type == "cuda":
            torch.cuda.synchronize(self._rows.device)
