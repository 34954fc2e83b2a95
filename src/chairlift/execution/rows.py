"""Rows: the tokens and the block table of each sequence in the batch, on the device."""

from __future__ import annotations

from itertools import chain, repeat
from typing import NamedTuple

import numpy as np
import torch

from chairlift.core.step import Newcomer, Step
from chairlift.execution.sharing import Grouping, HostSharedPrefixes
from chairlift.ops.batch import Batch, HostBatch, SharedPrefixes, count_decodes, to_device
from chairlift.ops.look_up import look_up


class Flat(NamedTuple):
    """The slices of a step, concatenated, in host memory."""

    rows: np.ndarray  # [slices]
    starts: np.ndarray  # [slices + 1] bounds of the slices
    contexts: np.ndarray  # [slices] tokens of the sequence up to the slice's end
    owner: np.ndarray  # [tokens] number of the token's slice
    positions: np.ndarray  # [tokens]
    decodes: int  # slices of a single token before the first longer one

    @property
    def is_decodes(self) -> bool:
        """Whether all slices are of a single token."""
        return self.decodes == self.rows.size

    @staticmethod
    def of(step: Step, *, checks_as_decodes: bool = False) -> Flat:
        """Lay out the slices of a step; with `checks_as_decodes`, each token of a check of drafts as a slice.

        A GPU's decode kernels divide long contexts among programs, and steps of decodes alone are captured.
        """
        rows, begins, counts = np.array(step.rows), np.array(step.starts), np.array(step.counts)
        if checks_as_decodes and step.drafts:
            # Decodes are before checks in a plan, and checks before prompts.
            cut = int(np.searchsorted(np.cumsum(counts), step.sampled_at[step.drafts[-1][0]])) + 1
            whole = counts.copy()
            whole[:cut] = 1
            parts = np.where(np.arange(counts.size) < cut, counts, 1)
            owner = np.repeat(np.arange(rows.size), parts)
            offset = np.arange(owner.size) - np.repeat(np.cumsum(parts) - parts, parts)
            rows, begins, counts = rows[owner], begins[owner] + offset, whole[owner]
        starts = np.zeros(rows.size + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        owner = np.repeat(np.arange(rows.size), counts)
        positions = np.arange(step.tokens) + (begins - starts[:-1])[owner]
        return Flat(rows, starts, begins + counts, owner, positions, count_decodes(starts))


class Rows:
    """Persistent device state, one row per sequence in the batch.

    Input tokens are read from here and sampled tokens written here, so that a step can read the tokens of the previous
    step before the host does.
    """

    def __init__(
        self,
        rows: int,
        max_length: int,
        block_size: int,
        device: torch.device,
        grouping: Grouping | None = None,
        groups: int = 1,
    ) -> None:
        self.device = device
        self._grouping = grouping  # None: no shared reads
        self._shared: tuple[bytes, HostSharedPrefixes | None] = b"", None  # rows, and their shared prefixes
        self.block_size = block_size
        self.tokens = torch.zeros(rows + 1, max_length + 1, dtype=torch.int32, device=device)
        self.groups = groups  # of layers: each has its own table of a sequence
        self._tables = np.zeros((groups, rows, -(-max_length // block_size)), np.int32)
        # A copy of the tables for captured steps, with one more row, the scratch row, which no sequence has.
        self.device_tables = torch.empty(0)
        self.scratch_block = -1
        self._places: list[int] = []  # flat indices of table entries that the device tables do not have yet,
        self._changed: list[int] = []  # and their blocks

    def keep_tables_on_device(self, scratch_block: int) -> None:
        """Keep a copy of all tables on the device from now on."""
        self.scratch_block = scratch_block
        groups, rows, width = self._tables.shape
        shape = groups, rows + 1, width
        self.device_tables = torch.full(shape, scratch_block, dtype=torch.int32, device=self.device)

    @property
    def scratch_entry(self) -> int:
        """The flat index of the last entry of the device tables, in the scratch row."""
        return self.device_tables.numel() - 1

    @property
    def shares(self) -> bool:
        """Whether attention reads blocks that decodes share once for all of them."""
        return self._grouping is not None

    def update(self, step: Step) -> None:
        """Write the tokens and block tables of new sequences, and the table changes of other rows."""
        if self._places:
            self.flush_changes()  # of a step that failed
        if step.newcomers:
            self._shared = b"", None
            self._write_tokens(step.newcomers)
        if step.newcomers or step.table_rows:
            self._write_tables(step)

    def _write_tokens(self, newcomers: list[Newcomer]) -> None:
        """Write the tokens of new sequences, in one transfer."""
        counts = np.array([len(each.tokens) for each in newcomers])
        begins = np.array([each.row for each in newcomers]) * self.tokens.shape[1] - (np.cumsum(counts) - counts)
        what = np.fromiter(chain.from_iterable(each.tokens for each in newcomers), np.int32, int(counts.sum()))
        places, tokens = to_device(self.device, np.repeat(begins, counts) + np.arange(what.size), what)
        self.tokens.view(-1)[places.long()] = tokens

    def _write_tables(self, step: Step) -> None:
        """Update the tables in host memory, and list the changes for the device."""
        tables, places, (_, rows, width) = self._tables, self._places, self._tables.shape
        groups = step.table_groups or repeat(0, len(step.table_rows))
        for group, row, place, block in zip(groups, step.table_rows, step.table_places, step.table_blocks, strict=True):
            tables[group, row, place] = block
            places.append((group * (rows + 1) + row) * width + place)
        self._changed += step.table_blocks
        for newcomer in step.newcomers:
            for group, blocks in enumerate(newcomer.tables):
                tables[group, newcomer.row, : len(blocks)] = blocks
                begin = (group * (rows + 1) + newcomer.row) * width
                places += range(begin, begin + len(blocks))
                self._changed += blocks

    def take_changes(self, room: int) -> dict[str, np.ndarray]:
        """Return the pending table changes, as inputs of a captured step; more than `room` are written at once."""
        if len(self._places) > room:
            self.flush_changes()
        found = {"places": np.array(self._places, np.int32), "blocks": np.array(self._changed, np.int32)}
        self._places, self._changed = [], []
        return found

    def flush_changes(self) -> None:
        """Write the pending table changes to the device, in one transfer."""
        if self.device_tables.numel() and self._places:
            places, blocks = to_device(self.device, np.array(self._places, np.int32), np.array(self._changed, np.int32))
            self.change_tables(places, blocks)
        self._places, self._changed = [], []

    def change_tables(self, places: torch.Tensor, blocks: torch.Tensor) -> None:
        """Write blocks to places of the device tables."""
        self.device_tables.view(-1)[places.long()] = blocks

    def find_shared(self, rows: np.ndarray, contexts: np.ndarray) -> HostSharedPrefixes | None:
        """Return the prefixes that decodes share; computed again only when the rows change."""
        if self._grouping is None or not rows.size:
            return None
        key = rows.tobytes()
        if self._shared[0] != key:
            tables = self._tables[0, rows, : -(-int(contexts.max()) // self.block_size)]
            self._shared = key, self._grouping.find(tables, contexts)
        return self._shared[1]

    def gather(self, flat: Flat, ahead: int = 0) -> tuple[torch.Tensor, Batch]:
        """Return the input tokens, or those `ahead` of them, and the flat batch, on the device."""
        rows, _, contexts, owner, positions, decodes = flat
        slots, tables = self._slots_and_tables(0, flat)
        host = HostBatch(positions, slots, flat.starts.astype(np.int32), contexts.astype(np.int32), tables)
        batch = Batch.on(self.device, host)
        for group in range(1, self.groups):
            slots, tables = self._slots_and_tables(group, flat)
            on_device = to_device(self.device, slots, tables)
            batch.others.append(batch.beside(*on_device, host=host._replace(slots=slots, tables=tables)))
        shared = self.find_shared(rows[:decodes], contexts[:decodes])
        if shared is not None:
            items, members, prefixes, parts = to_device(self.device, *shared)
            batch.shared = SharedPrefixes(items, members, prefixes, parts, int(shared.parts.sum()))
        return self.tokens[self._to_device(rows[owner]).long(), batch.positions.long() + ahead], batch

    def _slots_and_tables(self, group: int, flat: Flat) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots of all tokens and the block tables of all slices in one group of layers."""
        tables = self._tables[group, flat.rows, : -(-int(flat.contexts.max()) // self.block_size)]
        blocks = tables[flat.owner, flat.positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + flat.positions % self.block_size, tables

    def tokens_and_slots(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens at rows and positions and, for each group of layers, the slots of their keys and values.

        All is read from device memory alone.
        """
        row, position = rows.long(), positions.long()
        blocks = self.device_tables[:, row, position // self.block_size].long()
        return self.tokens[row, position], blocks * self.block_size + position % self.block_size

    def gather_decodes(
        self, rows: torch.Tensor, positions: torch.Tensor, host: HostBatch, shared: SharedPrefixes | None
    ) -> tuple[torch.Tensor, Batch]:
        """Return the input tokens and the batch of decodes, from device memory alone."""
        found = [look_up(rows, positions, self.tokens, tables, self.block_size) for tables in self.device_tables]
        tokens, slots, contexts, tables = found[0]
        batch = Batch(positions, slots, contexts, tables, host, shared)
        batch.others = [batch.beside(slots, tables) for _, slots, _, tables in found[1:]]
        return tokens, batch

    def put(self, rows: np.ndarray, positions: np.ndarray, sampled: torch.Tensor) -> None:
        """Append sampled tokens to their rows."""
        where, at = to_device(self.device, rows, positions)
        self.put_at(where, at, sampled)

    def put_at(self, rows: torch.Tensor, positions: torch.Tensor, sampled: torch.Tensor) -> None:
        """Append sampled tokens to rows, given rows and positions on the device."""
        self.tokens[rows.long(), positions.long()] = sampled.to(torch.int32)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(self.device, array)[0]
