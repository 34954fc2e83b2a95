"""Rows: what the device knows of each seat in the batch: its tokens so far and its block table."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from chairlift.core.step import Newcomer, Step
from chairlift.execution.sharing import Grouping, HostSharedPrefixes
from chairlift.ops.batch import Batch, HostBatch, SharedPrefixes, count_decodes, to_device
from chairlift.ops.look_up import look_up


class Flat(NamedTuple):
    """The slices of a step one behind the other, in host memory."""

    rows: np.ndarray  # [slices]
    starts: np.ndarray  # [slices + 1] their bounds
    contexts: np.ndarray  # [slices] tokens of the sequence up to the slice's end
    owner: np.ndarray  # [tokens] which slice a token belongs to
    positions: np.ndarray  # [tokens]
    decodes: int  # slices of a single token before the first longer one

    @staticmethod
    def of(step: Step) -> Flat:
        """Lay out the slices of a step."""
        rows, begins, counts = np.array(step.rows), np.array(step.starts), np.array(step.counts)
        starts = np.zeros(rows.size + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        owner = np.repeat(np.arange(rows.size), counts)
        positions = np.arange(step.tokens) + (begins - starts[:-1])[owner]
        return Flat(rows, starts, begins + counts, owner, positions, count_decodes(starts))


class Rows:
    """Persistent device state, one row a seat.

    Input tokens are read from here and sampled ones written here, so that a step can use the tokens of the step before
    it without the host having seen them.
    """

    def __init__(
        self, rows: int, max_length: int, block_size: int, device: torch.device, grouping: Grouping | None = None
    ) -> None:
        self.device = device
        self._grouping = grouping  # how decodes that read together are found, where they do
        self._shared: tuple[bytes, HostSharedPrefixes | None] = b"", None  # of which rows, and what they have in common
        self.block_size = block_size
        self.tokens = torch.zeros(rows + 1, max_length + 1, dtype=torch.int32, device=device)
        self._tables = np.zeros((rows, -(-max_length // block_size)), np.int32)
        # The same on the device, for recorded steps; with one row more, a scratch row whose blocks belong to nobody.
        self.device_tables = torch.empty(0)
        self.scratch_block = -1
        self._places: list[int] = []  # entries of the tables that the device does not know yet, as if all were one,
        self._changed: list[int] = []  # and the blocks there

    def keep_tables_on_device(self, scratch_block: int) -> None:
        """From now on, have every table on the device as well."""
        self.scratch_block = scratch_block
        shape = self._tables.shape[0] + 1, self._tables.shape[1]
        self.device_tables = torch.full(shape, scratch_block, dtype=torch.int32, device=self.device)

    @property
    def scratch_entry(self) -> int:
        """The last place of all tables on the device: it is the scratch row's."""
        return self.device_tables.numel() - 1

    @property
    def shares(self) -> bool:
        """Whether decodes that begin with the same blocks read them together."""
        return self._grouping is not None

    def update(self, step: Step) -> None:
        """Write the tokens and block tables of newcomers, and the table changes of other rows."""
        if self._places:
            self.flush_changes()  # left over by a step that failed
        if step.newcomers:
            self._shared = b"", None
            self._write_tokens(step.newcomers)
        if step.newcomers or step.table_rows:
            self._write_tables(step)

    def _write_tokens(self, newcomers: list[Newcomer]) -> None:
        """Write newcomers' tokens, in one transfer."""
        counts = np.array([len(each.tokens) for each in newcomers])
        begins = np.array([each.row for each in newcomers]) * self.tokens.shape[1] - (np.cumsum(counts) - counts)
        what = np.fromiter(chain.from_iterable(each.tokens for each in newcomers), np.int32, int(counts.sum()))
        places, tokens = to_device(self.device, np.repeat(begins, counts) + np.arange(what.size), what)
        self.tokens.view(-1)[places.long()] = tokens

    def _write_tables(self, step: Step) -> None:
        """Bring the tables in host memory up to date, and note the changes for the device."""
        tables, width, places = self._tables, self._tables.shape[1], self._places
        for row, place, block in zip(step.table_rows, step.table_places, step.table_blocks, strict=True):
            tables[row, place] = block
            places.append(row * width + place)
        self._changed += step.table_blocks
        for row, _, _, blocks, _ in step.newcomers:
            tables[row, : len(blocks)] = blocks
            places += range(row * width, row * width + len(blocks))
            self._changed += blocks

    def take_changes(self, room: int) -> dict[str, np.ndarray]:
        """What the device does not know of the tables, for a step that tells it; if it is too much, it is told now."""
        if len(self._places) > room:
            self.flush_changes()
        found = {"places": np.array(self._places, np.int32), "blocks": np.array(self._changed, np.int32)}
        self._places, self._changed = [], []
        return found

    def flush_changes(self) -> None:
        """Tell the device what it does not know of the tables, in one transfer."""
        if self.device_tables.numel() and self._places:
            places, blocks = to_device(self.device, np.array(self._places, np.int32), np.array(self._changed, np.int32))
            self.change_tables(places, blocks)
        self._places, self._changed = [], []

    def change_tables(self, places: torch.Tensor, blocks: torch.Tensor) -> None:
        """Write to the tables on the device."""
        self.device_tables.view(-1)[places.long()] = blocks

    def find_shared(self, rows: np.ndarray, contexts: np.ndarray) -> HostSharedPrefixes | None:
        """What decodes have in common; it is looked for again only when others decode."""
        if self._grouping is None or not rows.size:
            return None
        key = rows.tobytes()
        if self._shared[0] != key:
            tables = self._tables[rows, : -(-int(contexts.max()) // self.block_size)]
            self._shared = key, self._grouping.find(tables, contexts)
        return self._shared[1]

    def gather(self, flat: Flat) -> tuple[torch.Tensor, Batch]:
        """The flat batch on its device: input tokens, and where each belongs."""
        rows, _, contexts, owner, positions, decodes = flat
        tables = self._tables[rows, : -(-int(contexts.max()) // self.block_size)]
        blocks = tables[owner, positions // self.block_size].astype(np.int64)
        slots = blocks * self.block_size + positions % self.block_size
        host = HostBatch(positions, slots, flat.starts.astype(np.int32), contexts.astype(np.int32), tables)
        batch = Batch.on(self.device, host)
        shared = self.find_shared(rows[:decodes], contexts[:decodes])
        if shared is not None:
            items, members, prefixes, parts = to_device(self.device, *shared)
            batch.shared = SharedPrefixes(items, members, prefixes, parts, int(shared.parts.sum()))
        return self.tokens[self._to_device(rows[owner]).long(), batch.positions.long()], batch

    def tokens_and_slots(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What stands at some rows and positions, and where its keys and values go, all known by the device."""
        row, position = rows.long(), positions.long()
        blocks = self.device_tables[row, position // self.block_size].long()
        return self.tokens[row, position], blocks * self.block_size + position % self.block_size

    def gather_decodes(
        self, rows: torch.Tensor, positions: torch.Tensor, host: HostBatch, shared: SharedPrefixes | None
    ) -> tuple[torch.Tensor, Batch]:
        """The same for decodes of which the device itself knows who they are: nothing comes from the host."""
        tokens, slots, contexts, tables = look_up(rows, positions, self.tokens, self.device_tables, self.block_size)
        return tokens, Batch(positions, slots, contexts, tables, host, shared)

    def put(self, rows: np.ndarray, positions: np.ndarray, sampled: torch.Tensor) -> None:
        """Append sampled tokens to their rows."""
        where, at = to_device(self.device, rows, positions)
        self.put_at(where, at, sampled)

    def put_at(self, rows: torch.Tensor, positions: torch.Tensor, sampled: torch.Tensor) -> None:
        """The same for rows and positions on the device."""
        self.tokens[rows.long(), positions.long()] = sampled.to(torch.int32)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(self.device, array)[0]
