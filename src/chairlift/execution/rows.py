"""Rows: what the device knows of each seat in the batch: its tokens so far and its block table."""

from __future__ import annotations

import numpy as np
import torch

from chairlift.core.plan import StepPlan
from chairlift.core.request import Sequence
from chairlift.ops.batch import Batch, HostBatch


class Rows:
    """Persistent device state, one row a seat.

    Input tokens are read from here and sampled ones written here, so that a step can use the tokens of the step before
    it without the host having seen them.
    """

    def __init__(self, seats: int, max_length: int, block_size: int, device: torch.device) -> None:
        self.device = device
        self.block_size = block_size
        self.tokens = torch.zeros(seats + 1, max_length + 1, dtype=torch.int32, device=device)
        self._tables = np.zeros((seats, -(-max_length // block_size)), np.int32)
        # The same on the device, for recorded steps; with one row more, a scratch row whose blocks belong to nobody.
        self.device_tables = torch.empty(0)
        self._written = np.zeros(seats, np.int64)  # blocks of each row that the device knows

    def keep_tables_on_device(self, scratch_block: int) -> None:
        """From now on, have every table on the device as well."""
        shape = self._tables.shape[0] + 1, self._tables.shape[1]
        self.device_tables = torch.full(shape, scratch_block, dtype=torch.int32, device=self.device)

    def update(self, plan: StepPlan) -> None:
        """Take in who sat down and whose table grew."""
        for sequence in plan.placed:
            known = torch.tensor(sequence.tokens, dtype=torch.int32)
            self.tokens[sequence.row, : len(known)] = known.to(self.device, non_blocking=True)
            self._write_table(sequence)
        for sequence in plan.grown:
            self._write_table(sequence)
        if self.device_tables.numel() and (plan.placed or plan.grown):
            self._send_tables(plan)

    def _write_table(self, sequence: Sequence) -> None:
        blocks = sequence.table.blocks
        self._tables[sequence.row, : len(blocks)] = blocks

    def _send_tables(self, plan: StepPlan) -> None:
        """Bring the device's tables up to date, all changes in one transfer."""
        changes: list[tuple[int, int, int]] = []
        for sequence in plan.placed:
            self._written[sequence.row] = 0
        for sequence in (*plan.placed, *plan.grown):
            row, blocks = sequence.row, sequence.table.blocks
            # The last one it knows may have been replaced by a copy.
            first = max(0, int(self._written[row]) - 1)
            changes += ((row, i, blocks[i]) for i in range(first, len(blocks)))
            self._written[row] = len(blocks)
        rows, columns, blocks_now = self._send(np.array(changes, np.int64).T.copy())
        self.device_tables[rows, columns] = blocks_now.int()

    def gather(self, plan: StepPlan) -> tuple[torch.Tensor, Batch]:
        """The flat batch of a plan: input tokens, and where each belongs."""
        slices = plan.slices
        rows = np.array([piece.sequence.row for piece in slices])
        starts = np.array([piece.start for piece in slices])
        counts = np.array([piece.count for piece in slices])
        contexts = starts + counts
        bounds = np.zeros(len(slices) + 1, np.int64)
        np.cumsum(counts, out=bounds[1:])
        owner = np.repeat(np.arange(len(slices)), counts)
        positions = np.arange(plan.tokens) - bounds[owner] + starts[owner]
        tables = self._tables[rows, : -(-int(contexts.max()) // self.block_size)]
        blocks = tables[owner, positions // self.block_size].astype(np.int64)
        slots = blocks * self.block_size + positions % self.block_size
        host = HostBatch(positions, slots, bounds.astype(np.int32), contexts.astype(np.int32), tables)
        batch = Batch.on(self.device, host)
        return self.tokens[self._send(rows[owner]), batch.positions], batch

    def put(self, rows: np.ndarray, positions: np.ndarray, sampled: torch.Tensor) -> None:
        """Append sampled tokens to their rows."""
        self.tokens[self._send(rows), self._send(positions)] = sampled.to(torch.int32)

    def _send(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
