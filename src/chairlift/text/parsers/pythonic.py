"""Calls written as Python: [get_weather(city="Kyoto"), now()], as Llama 3.2 and 4 and others do."""

import re

from chairlift.text.parsers.arriving import Markers, Reader
from chairlift.text.parsers.calls import CallParser
from chairlift.text.parsers.dialect import Dialect
from chairlift.text.parsers.grammar import CallFormat
from chairlift.text.parsers.json_text import quote
from chairlift.text.parsers.keyed_grammar import python_arguments
from chairlift.text.parsers.python_text import read_value

_BEGIN, _END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[-.\w]*")
_KEY = re.compile(r"\w*")


class PythonicParser(CallParser):
    """Reads a list of calls that begins a line or follows the marker; arguments are passed on one by one."""

    openers = Markers(_BEGIN)
    bare = "["

    def _read_calls(self, opener: str) -> Reader[bool]:
        yield from self._text.space()
        if not (yield from self._text.literal("[")) or not (yield from self._read_list(",", "]")):
            return False
        if opener == _BEGIN:
            yield from self._read_closing(_END)
        return True

    def _read_call(self) -> Reader[bool]:
        text = self._text
        name = yield from text.collect(_NAME)
        if name not in self._tools or not (yield from text.literal("(")):
            return False
        separator = "{"
        while key := (yield from self._read_key()):
            if separator == "{":
                self._start(name)
            self._output.arguments(f"{separator}{quote(key)}: ")
            separator = ", "
            text.hold()
            yield from text.space()
            value: list[str] = []
            if not (yield from read_value(text, value.append)):
                return (yield from self._break_off())
            self._output.arguments("".join(value))
            text.hold()
            yield from text.space()
            if (yield from text.peek()) != ",":
                break
            text.skip()
        if not (yield from text.literal(")")):
            return separator != "{" and (yield from self._break_off())
        if separator == "{":
            self._start(name)
        text.release()
        self._output.arguments("{}" if separator == "{" else "}")
        return True

    def _read_key(self) -> Reader[str]:
        """Read the name of an argument and the equals sign; return nothing if they are not there."""
        text = self._text
        yield from text.space()
        key = yield from text.collect(_KEY)
        yield from text.space()
        return key if key and (yield from text.literal("=")) else ""


PYTHONIC = Dialect(
    name="pythonic",
    signs=((_BEGIN,),),
    kept=(_BEGIN, _END),
    parser=PythonicParser,
    calls=CallFormat(
        opening="[", before="", after="(", tail=")", between=", ", closing="]", arguments=python_arguments
    ),
)
