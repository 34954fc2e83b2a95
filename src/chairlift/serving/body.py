"""Strict JSON parsing of request bodies: a body that two parsers could read differently is rejected.

msgspec parses. It accepts integers of any size, \\u0000, any depth and duplicate keys: these are checked afterwards.
numpy counts bytes, because `bytes.count` takes six times as long.
"""

from __future__ import annotations

import json
import re
from array import array
from typing import Any

import msgspec
import numpy as np

from chairlift.core.errors import ChairliftError

MAX_DEPTH = 32  # levels of nested lists and objects, including the body itself
MAX_ITEMS = 1_000_000
_LOWEST, _HIGHEST = -(2**63), 2**63 - 1
_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_ESCAPED_COLON = re.compile(rb"\\u003[aA]")
_AT_BYTE = re.compile(r"\(byte (\d+)\)$")
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89aAbB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")

_decode = msgspec.json.Decoder().decode


class BodyError(ChairliftError):
    """The body is not a JSON object, or is ambiguous."""


def read_object(raw: bytes, *, max_items: int = MAX_ITEMS) -> dict[str, Any]:
    """Parse a request's body, or raise a BodyError.

    >>> read_object(b'{"prompt": [1, 2]}')
    {'prompt': [1, 2]}
    """
    if not raw:
        raise BodyError("the body is empty: send a JSON object")
    if raw.startswith(_BYTE_ORDER_MARKS):
        raise BodyError("the body begins with a byte order mark: send plain UTF-8 without one")
    _check_items(raw, max_items)
    try:
        body = _decode(raw)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError as error:
        raise BodyError(f"a string in the body is not valid UTF-8 ({error.reason}): send UTF-8") from None
    except msgspec.ValidationError:
        raise BodyError("the body has a number that is too large: use finite ones, whole ones in 64 bits") from None
    except msgspec.MsgspecError as error:
        raise BodyError(_why(raw, str(error))) from None
    if not isinstance(body, dict):
        raise BodyError("the body is not a JSON object: send its fields between { and }")
    pairs, texts = _check_values(body)
    _check_keys(raw, pairs, texts)
    return body


def _check_items(raw: bytes, max_items: int) -> None:
    """Reject too many items before parsing: 8 MiB of empty lists would become 200 MiB of objects."""
    if len(raw) <= 2 * max_items:  # an item has at least two bytes: a value, and a comma or a bracket
        return
    # An upper bound first: it also counts characters inside strings.
    if _count(raw, ",") + _count(raw, "[") + _count(raw, "{") > max_items:
        items = _items_of(raw)
        if items > max_items:
            raise BodyError(f"the body's lists and objects have {items} items in all: use {max_items} or fewer")


def _items_of(raw: bytes) -> int:
    """Return the number of items in all lists and objects of a valid body: commas plus non-empty containers."""
    # A backslash occurs only in strings and escapes the next character: escaped backslashes are removed first.
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in raw else raw
    outside = b'"'.join(plain.split(b'"')[::2]).translate(None, b" \t\r\n")
    opened = outside.count(b"[") + outside.count(b"{") - outside.count(b"[]") - outside.count(b"{}")
    return opened + outside.count(b",")


def _check_values(body: dict[str, Any]) -> tuple[int, list[str]]:
    """Check depth, integers and strings; return the number of key-value pairs, and all strings including keys."""
    pairs = 0
    texts: list[str] = []
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for container in level:
            if type(container) is dict:
                pairs += len(container)
                texts.extend(container)
                _sort_values(container, container.values(), texts, deeper)
            elif not _is_all_whole(container):
                _sort_values(container, container, texts, deeper)
        level = deeper
        if not level:
            break
    else:
        raise _too_deep()
    for text in texts:
        if "\0" in text:
            raise BodyError(f"the body has a NUL character in {_shown(text)}: leave it out")
    return pairs, texts


def _sort_values(container: Any, values: Any, texts: list[str], deeper: list[Any]) -> None:
    for value in values:
        kind = type(value)
        if kind is str:
            texts.append(value)
        elif kind is dict or kind is list:
            deeper.append(value)
        elif kind is int and not _LOWEST <= value <= _HIGHEST:
            raise BodyError(f"{_place(container, value)} is a whole number beyond 64 bits: use a smaller one")


def _is_all_whole(values: list[Any]) -> bool:
    """Whether a list has only 64-bit integers: a fast path for token ids."""
    if not values or type(values[0]) is not int:
        return False
    try:
        array("q", values)
    except (TypeError, OverflowError):
        return False
    return True


def _check_keys(raw: bytes, pairs: int, texts: list[str]) -> None:
    """Reject duplicate keys in an object: parsers differ in which one they keep, and msgspec drops one silently.

    Every pair has one colon, so the colons in the body equal the parsed pairs plus the colons inside strings unless a
    pair was dropped. Only a colon written \\u003a could hide that; such a body is parsed again.
    """
    colons = _count(raw, ":")
    if colons == pairs:
        return
    inside = _count("".join(texts).encode(), ":")
    if colons == pairs + inside and not _ESCAPED_COLON.search(raw):
        return
    json.JSONDecoder(object_pairs_hook=_unique).decode(raw.decode())


def _unique(found: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _ in found:
        if key in seen:
            raise BodyError(f"the key {_shown(key)} occurs twice in one object: keep one")
        seen.add(key)


def _count(raw: bytes, character: str) -> int:
    return int(np.count_nonzero(np.frombuffer(raw, np.uint8) == ord(character)))


def _too_deep() -> BodyError:
    return BodyError(f"the body's lists and objects are nested too deep: use {MAX_DEPTH} levels or fewer")


def _why(raw: bytes, message: str) -> str:
    """Return msgspec's parse error in words for the client."""
    found = _AT_BYTE.search(message)
    rest = raw[int(found[1]) :] if found else b""
    if rest.startswith((b"NaN", b"Infinity")):
        return f"the body has NaN or Infinity {message[found.start() :] if found else ''}: JSON has only finite numbers"
    if "surrogate" in message or (not found and _HIGH_SURROGATE.search(raw)):
        return "a string in the body has half of a surrogate pair: escape both halves, or send the character in UTF-8"
    if not found:
        return "the body ends before its JSON does: send all of it"
    return f"the body is not valid JSON: {message.removeprefix('JSON is malformed: ')}: correct it there"


def _place(container: Any, value: int) -> str:
    if isinstance(container, dict):
        return next(_shown(key) for key, held in container.items() if held is value)
    return f"item {next(index for index, held in enumerate(container) if held is value)} of a list"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")
