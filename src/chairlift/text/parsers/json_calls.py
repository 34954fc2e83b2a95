"""Calls written as JSON objects: {"name": ..., "arguments": {...}}, shared by several families."""

from dataclasses import dataclass

from chairlift.text.parsers.arriving import Reader
from chairlift.text.parsers.calls import CallParser
from chairlift.text.parsers.json_text import object_in, read_name, read_value

_ARGUMENTS = ("arguments", "parameters")


@dataclass(slots=True)
class _Call:
    """What is known of a call while its object is read."""

    name: str | None = None
    arguments: str | None = None  # complete, and not passed on before the name is known
    is_started: bool = False


class JsonCallParser(CallParser):
    """Reads objects with a name and arguments, in either order; other fields are read over."""

    def _read_call(self) -> Reader[bool]:
        """Read one object; return whether it started a call."""
        if not (yield from self._text.literal("{")):
            return False
        call = _Call()
        while (yield from self._read_field(call)):
            pass
        return call.is_started

    def _read_list(self, separator: str, closing: str) -> Reader[bool]:
        """Read calls up to the closing bracket, or without one, up to the last that a separator follows."""
        text = self._text
        while True:
            yield from text.space()
            if not (yield from self._read_call()):
                return False
            text.hold()
            yield from text.space()
            following = yield from text.peek()
            if following == separator:
                text.skip()
                yield from text.space()
                if (yield from text.peek()):
                    continue
            elif following and closing:
                if following != closing:
                    return False
                text.skip()
            text.release()
            return True

    def _read_field(self, call: _Call) -> Reader[bool]:
        """Read one field and the character after it; return whether another field follows."""
        text = self._text
        yield from text.space()
        key = yield from read_name(text)
        yield from text.space()
        if key is None or not (yield from text.literal(":")):
            return (yield from self._end(call))
        yield from text.space()
        if key == "name" and call.name is None:
            call.name = yield from read_name(text)
            is_valid = call.name in self._tools
        elif key in _ARGUMENTS and call.arguments is None and not call.is_started:
            is_valid = yield from self._read_arguments(call)
        else:
            is_valid = yield from read_value(text, len)
        if is_valid and not call.is_started and call.arguments is not None:
            self._write(call)
        yield from text.space()
        following = yield from text.peek()
        if not is_valid or following not in (",", "}"):
            return (yield from self._end(call))
        text.skip()
        if following == "}":
            if call.is_started:
                text.release()
            else:
                self._write(call)
        return following == ","

    def _read_arguments(self, call: _Call) -> Reader[bool]:
        """Read the arguments: an object, which is passed on as it arrives, or one in a string, or null."""
        text = self._text
        opening = yield from text.peek()
        if opening == "{" and call.name is not None:
            self._start(call.name)
            call.is_started = True
            is_valid = yield from read_value(text, self._output.arguments)
            text.hold()
            return is_valid
        if opening == '"':
            written = yield from read_name(text)
            call.arguments = object_in(written or "{}") if written is not None else None
            return call.arguments is not None
        pieces: list[str] = []
        is_valid = yield from read_value(text, pieces.append)
        call.arguments = "".join(pieces) if opening == "{" else "{}"
        return is_valid and (opening == "{" or pieces == ["null"])

    def _write(self, call: _Call) -> None:
        """Start a call with a complete name and complete arguments."""
        if call.name is not None:
            self._start(call.name)
            self._output.arguments(call.arguments or "{}")
            self._text.hold()
            call.is_started = True

    def _end(self, call: _Call) -> Reader[bool]:
        """End an object that is not valid; return False, since no field follows."""
        if call.is_started:
            yield from self._break_off()
        return False
