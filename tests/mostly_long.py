"""Which values of a test run in `make test`, and how often tests kill processes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest


def mostly_long(values: Iterable[Any], count: int = 1) -> list[Any]:
    """The first values as they are; the others are long: they run in `make test-all` alone."""
    found = list(values)
    rest = [value if isinstance(value, tuple) else (value,) for value in found[count:]]
    return [*found[:count], *(pytest.param(*value, marks=pytest.mark.long) for value in rest)]


# Tests that kill a process under load do so a few times, or as often as TIMES in the environment says.
TIMES = int(os.environ.get("TIMES", "3"))
