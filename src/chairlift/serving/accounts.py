"""Accounts: what each tenant has in use, in memory that all HTTP processes share.

Each process counts the requests of a tenant in a column of its own; a tenant's number is the sum. So a process that
dies leaves one column to clear, and no process needs a lock: one that adds its requests before it looks at the sum
never lets a tenant exceed its limit, though two that do so at once may both be refused.
"""

from __future__ import annotations

import math
import mmap
from array import array
from collections.abc import Sequence

from chairlift.serving.shared import nameless_file

MINUTE = 60.0


class Accounts:
    """A row for each tenant: when its tokens are paid for, then its requests in each process.

    One process alone needs no shared memory, and adds rows as it sees tenants.
    """

    def __init__(self) -> None:
        self.descriptor: int | None = None
        self._rows: dict[str, int] = {}
        self._width, self._process = 2, 0
        self._numbers: array[float] | memoryview[float] = array("d")

    @staticmethod
    def shared(tenants: Sequence[str], processes: int, process: int = 0, descriptor: int | None = None) -> Accounts:
        """Return the accounts that a process has in common with others, which know the same tenants."""
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
            assert isinstance(self._numbers, array), "all processes know the same tenants"
            self._rows[tenant] = len(self._numbers)
            self._numbers.extend((-math.inf, 0.0))
        return self._rows[tenant]

    def live(self, tenant: str) -> int:
        """Return how many requests the tenant has in all processes."""
        row = self._row(tenant)
        return int(sum(self._numbers[row + 1 : row + self._width]))

    def add(self, tenant: str, requests: int) -> None:
        """Count requests that this process has admitted; a negative number when they end."""
        self._numbers[self._row(tenant) + 1 + self._process] += requests

    def charge(self, tenant: str, tokens: int, per_minute: int, now: float) -> None:
        """Take tokens out of the tenant's bucket.

        The bucket holds a minute's worth and is one number: the time at which its debt is paid. A minute before `now`
        or earlier, it is full; after `now`, there is debt. Two processes that charge within the same microsecond may
        lose one of the two charges.
        """
        row = self._row(tenant)
        self._numbers[row] = max(self._numbers[row], now - MINUTE) + tokens * MINUTE / per_minute

    def debt(self, tenant: str, now: float) -> float:
        """Return the seconds until the tenant's debt is paid."""
        return max(0.0, self._numbers[self._row(tenant)] - now)

    def clear(self, process: int) -> None:
        """A process has died, and its requests with it."""
        for row in self._rows.values():
            self._numbers[row + 1 + process] = 0.0
