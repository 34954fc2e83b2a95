"""JSON read while it arrives: validated and passed on piece by piece, never built as values."""

import json
import re

from chairlift.text.parsers.arriving import SPACE, ArrivingText, Reader, Write, read_all

MAX_DEPTH = 100  # far below the depth at which clients' JSON readers fail (Python's: about 1000)

_CLOSING = {"{": "}", "[": "]"}
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX = frozenset("0123456789abcdefABCDEF")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_IS_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_SURROGATE = re.compile("[\ud800-\udfff]")


def quote(text: str) -> str:
    """Return a text as a JSON string."""
    return escape_surrogates(json.dumps(text, ensure_ascii=False))


def escape_surrogates(json_text: str) -> str:
    """Escape characters that have no UTF-8 encoding: an escape in a string may name half of a surrogate pair."""
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", json_text)


def read_value(text: ArrivingText, write: Write) -> Reader[bool]:
    """Write the text of one JSON value as it arrives; return whether it is complete and valid.

    If not, the text up to the error has been written and the rest is not read.
    """
    open_brackets: list[str] = []
    while True:
        opening = yield from text.peek()
        if opening == '"':
            is_valid = yield from read_string(text, write)
        elif opening in ("{", "["):
            if len(open_brackets) == MAX_DEPTH:
                return False
            open_brackets.append(opening)
            yield from _next(text, write)
            if (yield from text.peek()) != _CLOSING[opening]:
                if opening == "{" and not (yield from _read_key(text, write)):
                    return False
                continue
            is_valid = True
        else:
            is_valid = yield from _read_scalar(text, write)
        if not is_valid:
            return False
        if not open_brackets:
            return True
        if not (yield from _read_closing(text, write, open_brackets)):
            return False
        if not open_brackets:
            return True


def read_string(text: ArrivingText, write: Write) -> Reader[bool]:
    """Write the text of a JSON string; control characters in it, which models write for line breaks, are escaped."""
    if (yield from text.peek()) != '"':
        return False
    text.skip()
    write('"')
    while True:
        yield from text.run(_PLAIN, write)
        following = yield from text.peek()
        if following == "\\":
            text.skip()
            if not (yield from _read_escape(text, write)):
                return False
        elif following:
            text.skip()
            write(following if following == '"' else json.dumps(following)[1:-1])
            if following == '"':
                return True
        else:
            return False


def read_name(text: ArrivingText) -> Reader[str | None]:
    """Return the value of a JSON string, or None if it is not one."""
    pieces: list[str] = []
    if not (yield from read_string(text, pieces.append)):
        return None
    value: str = json.loads("".join(pieces))
    return value


def object_in(text: str) -> str | None:
    """Return the JSON object that a text consists of, or None."""
    pieces: list[str] = []

    def reader(arriving: ArrivingText) -> Reader[bool]:
        yield from arriving.space()
        is_object = (yield from arriving.peek()) == "{" and (yield from read_value(arriving, pieces.append))
        yield from arriving.space()
        return is_object and not (yield from arriving.peek())

    return escape_surrogates("".join(pieces)) if read_all(text, reader) else None


def is_json(text: str) -> bool:
    """Return whether a text is one JSON value."""

    def reader(arriving: ArrivingText) -> Reader[bool]:
        is_value = yield from read_value(arriving, len)
        return is_value and not (yield from arriving.peek())

    return read_all(text, reader)


def _next(text: ArrivingText, write: Write) -> Reader[None]:
    """Write the character that was peeked, and the whitespace after it."""
    write((yield from text.peek()))
    text.skip()
    yield from text.run(SPACE, write)


def _read_key(text: ArrivingText, write: Write) -> Reader[bool]:
    """Write a key, its colon and the whitespace up to the value."""
    if not (yield from read_string(text, write)):
        return False
    yield from text.run(SPACE, write)
    if (yield from text.peek()) != ":":
        return False
    yield from _next(text, write)
    return True


def _read_closing(text: ArrivingText, write: Write, open_brackets: list[str]) -> Reader[bool]:
    """After a value: close brackets, up to the next value of the innermost open one."""
    while open_brackets:
        # After the outermost value nothing is read, not even whitespace.
        yield from text.run(SPACE, write)
        following = yield from text.peek()
        if following == _CLOSING[open_brackets[-1]]:
            open_brackets.pop()
            write(following)
            text.skip()
        elif following == ",":
            yield from _next(text, write)
            return open_brackets[-1] == "[" or (yield from _read_key(text, write))
        else:
            return False
    return True


def _read_escape(text: ArrivingText, write: Write) -> Reader[bool]:
    """Write an escape sequence, of which the backslash has been read."""
    escape = "\\"
    kind = yield from text.peek()
    is_valid = bool(kind) and kind in '"\\/bfnrtu'
    if is_valid:
        text.skip()
        escape += kind
    for _ in range(4 if is_valid and kind == "u" else 0):
        digit = yield from text.peek()
        is_valid = digit in _HEX
        if not is_valid:
            break
        text.skip()
        escape += digit
    write(escape)
    return is_valid


def _read_scalar(text: ArrivingText, write: Write) -> Reader[bool]:
    """Write a number, true, false or null."""
    word = yield from text.collect(_SCALAR)
    write(word)
    return _IS_SCALAR.fullmatch(word) is not None
