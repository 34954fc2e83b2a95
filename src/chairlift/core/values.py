"""Values: the keys of a model's file, each read with the type and the range that it must have."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Any, TypeGuard

from chairlift.core.errors import ModelError

MOST_COUNT = 1 << 24
MOST_NUMBER, LEAST_NUMBER = 1e30, 1e-30  # arithmetic within this range stays finite

_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character: valid in JSON, not in UTF-8

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = _shown.maxlong = 60


class Values:
    """The values of one file by key; null counts as absent.

    Each method raises a ModelError that names the file, the key and the value where the value cannot be used, or where
    it is absent and there is no default.

    >>> values = Values("config.json", {"num_hidden_layers": "x", "rope_scaling": {"factor": 8}})
    >>> values.part("rope_scaling").number("factor")
    8.0
    >>> values.count("num_hidden_layers", most=100)
    Traceback (most recent call last):
    chairlift.core.errors.ModelError: config.json: num_hidden_layers is 'x': use a whole number from 1 to 100
    """

    def __init__(self, file: object, values: Mapping[str, Any], prefix: str = "") -> None:
        self.file = str(file)
        self._values = values
        self._prefix = prefix

    def has(self, key: str) -> bool:
        """Whether the key has a value that is not null."""
        return self._values.get(key) is not None

    def has_key(self, key: str) -> bool:
        """Whether the key is present, with a value or null."""
        return key in self._values

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = MOST_COUNT) -> int:
        """Read a whole number from `least` to `most`."""
        value = self._values.get(key)
        value = default if value is None else value
        if not _is_whole(value) or not least <= value <= most:
            raise self.wrong(key, f"use a whole number from {least:,} to {most:,}")
        return int(value)

    def number(self, key: str, default: float | None = None, *, above: float = 0.0, most: float = MOST_NUMBER) -> float:
        """Read a finite number above `above` and up to `most`."""
        value = self._values.get(key)
        value = default if value is None else value
        # An integer may be larger than any float: compare before converting.
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= most:
            raise self.wrong(key, f"use a number above {above:g} and up to {most:g}")
        if 0 < abs(value) < LEAST_NUMBER:
            raise self.wrong(key, f"use a number above {LEAST_NUMBER:g}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Read true or false."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "use true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Read a string."""
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, str) or _SURROGATE.search(value):
            raise self.wrong(key, "use a string of whole characters")
        return value

    def texts(self, key: str) -> list[str]:
        """Read a list of strings; empty if absent."""
        return self._list(key, (str,), "a list of strings")

    def numbers(self, key: str) -> list[float]:
        """Read a list of finite numbers; empty if absent."""
        found = self._list(key, (int, float), "a list of finite numbers")
        if not all(-MOST_NUMBER <= value <= MOST_NUMBER for value in found):
            raise self.wrong(key, "use a list of finite numbers")
        return found

    def ids(self, key: str, below: int) -> list[int]:
        """Read one token id or a list of ids, dropping ids outside 0 to `below`.

        Files write -1 for "none", and name special tokens that the weights have no row for.
        """
        value = self._values.get(key)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if set(map(type, found)) - {int}:
            raise self.wrong(key, "use a token id or a list of them")
        return [id for id in found if 0 <= id < below]

    def part(self, key: str) -> Values:
        """Read a nested object; without values if absent."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "use an object")
        return Values(self.file, value or {}, f"{self._prefix}{key}.")

    def items(self) -> Mapping[str, Any]:
        """Return all values, unchecked."""
        return self._values

    def wrong(self, key: str, remedy: str) -> ModelError:
        """Return the error for an unusable value, with what to use instead."""
        value = self._values.get(key)
        problem = "is missing" if value is None else f"is {show(value)}"
        return ModelError(f"{self.file}: {self._prefix}{key} {problem}: {remedy}")

    def _list(self, key: str, types: tuple[type, ...], kind: str) -> list[Any]:
        value = self._values.get(key)
        if value is None:
            return []
        # One check of the set of types: a vocabulary has hundreds of thousands of entries.
        if not isinstance(value, list) or set(map(type, value)) - {*types}:
            raise self.wrong(key, f"use {kind}")
        return value


def show(value: object) -> str:
    """Format a value for a message, shortened to one line."""
    return _shown.repr(value)


def is_name(value: object) -> bool:
    """Whether a value is a usable tensor or file name that can be printed as it is."""
    return isinstance(value, str) and value.isprintable() and len(value) <= 255


def one_line(error: BaseException) -> str:
    """Format a library's error as part of a message: one line of at most 200 characters."""
    message = " ".join(str(error).split()) or type(error).__name__
    return message if len(message) <= 200 else f"{message[:200]} ..."


def _is_whole(value: object) -> TypeGuard[int | float]:
    """Whether a value is a whole number, also where it is written as 4096.0."""
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)
