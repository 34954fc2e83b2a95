"""Accounts: live requests and used tokens of each tenant, in memory that all HTTP processes share.

The queue's length and the loads of the engines are counted there too, under names that no tenant can have.

Each process counts a tenant's requests in its own column; the tenant's total is the sum of the columns. When a process
dies, only its column is cleared. No lock is needed: a process adds its requests before it reads the sum, so a tenant
never exceeds its limit, though two processes that add at the same moment may both reject.
"""

from __future__ import annotations

import math
import mmap
from array import array
from collections.abc import Sequence

from chairlift.routing.loads import Loads
from chairlift.serving.shared import nameless_file

MINUTE = 60.0


class Accounts:
    """One row per tenant: the time at which its token debt is paid, then its live requests in each process.

    A single process uses no shared memory and adds a row when it first sees a tenant.
    """

    def __init__(self) -> None:
        self.descriptor: int | None = None
        self._rows: dict[str, int] = {}
        self._width, self._process = 2, 0
        self._numbers: array[float] | memoryview[float] = array("d")

    @staticmethod
    def shared(tenants: Sequence[str], processes: int, process: int = 0, descriptor: int | None = None) -> Accounts:
        """Return accounts in shared memory; all processes must pass the same tenants in the same order."""
        accounts = Accounts()
        accounts._width, accounts._process = 1 + processes, process
        accounts._rows = {name: place * accounts._width for place, name in enumerate(tenants)}
        if descriptor is None:
            descriptor = nameless_file(array("d", [-math.inf, *[0.0] * processes] * len(tenants)).tobytes())
        accounts.descriptor = descriptor
        if tenants:
            accounts._numbers = memoryview(mmap.mmap(descriptor, 8 * accounts._width * len(tenants))).cast("d")
        return accounts

    def _row(self, tenant: str) -> int:
        if tenant not in self._rows:
            assert isinstance(self._numbers, array), "shared accounts have a fixed list of tenants"
            self._rows[tenant] = len(self._numbers)
            self._numbers.extend((-math.inf, 0.0))
        return self._rows[tenant]

    def live(self, tenant: str) -> int:
        """Return the tenant's live requests in all processes."""
        row = self._row(tenant)
        return int(sum(self._numbers[row + 1 : row + self._width]))

    def add(self, tenant: str, requests: int) -> None:
        """Add to the tenant's live requests in this process; `requests` is negative when they end."""
        self._numbers[self._row(tenant) + 1 + self._process] += requests

    def put(self, name: str, number: int) -> None:
        """Set this process's count."""
        self._numbers[self._row(name) + 1 + self._process] = number

    def charge(self, tenant: str, tokens: int, per_minute: int, now: float) -> None:
        """Take tokens out of the tenant's bucket.

        The bucket holds the tokens of one minute and is stored as one number, the time at which its debt is paid: at
        most `now` - 60 s means full, later than `now` means debt. Of two processes that charge within the same
        microsecond, one charge may be lost.
        """
        row = self._row(tenant)
        self._numbers[row] = max(self._numbers[row], now - MINUTE) + tokens * MINUTE / per_minute

    def debt(self, tenant: str, now: float) -> float:
        """Return the seconds until the tenant's debt is paid."""
        return max(0.0, self._numbers[self._row(tenant)] - now)

    def clear(self, process: int) -> None:
        """Set the column of a process that died to 0: its requests ended with it."""
        for row in self._rows.values():
            self._numbers[row + 1 + process] = 0.0


class SharedLoads(Loads):
    """The loads of a model's engines, of the requests of all HTTP processes."""

    def __init__(self, accounts: Accounts) -> None:
        super().__init__()
        self._accounts = accounts

    @staticmethod
    def names(engine: str) -> list[str]:
        """Return the names under which an engine's load is counted."""
        return [f"{engine}/live", f"{engine}/pending", f"{engine}/busy"]

    def add(self, name: str, live: int, pending: int) -> None:
        """Add live requests and pending prompt tokens of this process to an engine."""
        self._accounts.add(f"{name}/live", live)
        self._accounts.add(f"{name}/pending", pending)

    def live(self, name: str) -> int:
        """Return the engine's live requests."""
        return self._accounts.live(f"{name}/live")

    def pending(self, name: str) -> int:
        """Return the engine's uncached prompt tokens of requests without a first token."""
        return self._accounts.live(f"{name}/pending")

    def is_busy(self, name: str) -> bool:
        """Whether requests wait for room in the engine's batch."""
        return self._accounts.live(f"{name}/busy") > 0

    def set_busy(self, name: str, busy: bool) -> None:
        """Record whether requests wait for room; only the process that gets the engine's statistics knows."""
        self._accounts.put(f"{name}/busy", busy)
