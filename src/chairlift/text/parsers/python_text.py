"""Python literals, read while they arrive and rewritten as JSON."""

import re

from chairlift.text.parsers.arriving import ArrivingText, Reader, Write, read_all
from chairlift.text.parsers.json_text import is_json, quote

MAX_DEPTH = 30

_CLOSING = {"{": "}", "[": "]", "(": ")"}
_PLAIN = {mark: re.compile(rf"[^\\{mark}]*") for mark in "'\""}
_WORD = re.compile(r"[-+.0-9A-Za-z_]*")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = frozenset("0123456789abcdefABCDEF")


def as_json(literal: str) -> str | None:
    """Return a Python literal as JSON, or None if it is not one.

    >>> as_json("{'a': (1, None), 'b': True}")
    '{"a": [1, null], "b": true}'
    """
    pieces: list[str] = []

    def reader(text: ArrivingText) -> Reader[bool]:
        is_value = yield from read_value(text, pieces.append)
        return is_value and not (yield from text.peek())

    return "".join(pieces) if read_all(literal, reader) else None


def read_value(text: ArrivingText, write: Write, depth: int = 0) -> Reader[bool]:
    """Read one literal and write it as JSON; return whether it is one. JSON's own constants are read, too."""
    opening = yield from text.peek()
    if opening in ("'", '"'):
        string = yield from _read_string(text)
        if string is not None:
            write(quote(string))
        return string is not None
    if opening and opening in _CLOSING:
        return depth < MAX_DEPTH and (yield from _read_items(text, write, depth))
    word = yield from text.collect(_WORD)
    word = _CONSTANTS.get(word, word)
    write(word)
    return is_json(word)


def _read_items(text: ArrivingText, write: Write, depth: int) -> Reader[bool]:
    """Read a list, a tuple or a dict, with or without a comma after its last item."""
    opening = yield from text.peek()
    closing = _CLOSING[opening]
    is_dict = opening == "{"
    text.skip()
    write("{" if is_dict else "[")
    separator = ""
    while True:
        yield from text.space()
        if (yield from text.peek()) == closing:
            break
        write(separator)
        if is_dict and not (yield from _read_key(text, write)):
            return False
        if not (yield from read_value(text, write, depth + 1)):
            return False
        yield from text.space()
        if (yield from text.peek()) != ",":
            break
        text.skip()
        separator = ", "
    write("}" if is_dict else "]")
    return (yield from text.literal(closing))


def _read_key(text: ArrivingText, write: Write) -> Reader[bool]:
    key = yield from _read_string(text)
    yield from text.space()
    if key is None or not (yield from text.literal(":")):
        return False
    write(quote(key) + ": ")
    yield from text.space()
    return True


def _read_string(text: ArrivingText) -> Reader[str | None]:
    """Return the value of a string literal, or None if it is not one."""
    mark = yield from text.peek()
    if mark not in _PLAIN:
        return None
    text.skip()
    pieces: list[str] = []
    while True:
        yield from text.run(_PLAIN[mark], pieces.append)
        following = yield from text.peek()
        if not following:
            return None
        text.skip()
        if following == mark:
            return "".join(pieces)
        pieces.append((yield from _read_escape(text)))


def _read_escape(text: ArrivingText) -> Reader[str]:
    """Return what an escape sequence stands for, after its backslash; an unknown one stands for itself."""
    kind = yield from text.peek()
    if not kind:
        return ""
    text.skip()
    if kind not in _DIGITS:
        return _ESCAPES.get(kind, "\\" + kind)
    digits = ""
    while len(digits) < _DIGITS[kind] and (following := (yield from text.peek())) in _HEX:
        digits += following
        text.skip()
    is_character = len(digits) == _DIGITS[kind] and int(digits, 16) <= 0x10FFFF
    return chr(int(digits, 16)) if is_character else f"\\{kind}{digits}"
