"""Calls that begin a line and need no marker: JSON objects, or Python as in [get_weather(city="Kyoto"), now()]."""

import re

from chairlift.text.parsers.arriving import Markers, Reader
from chairlift.text.parsers.json_calls import JsonCallParser
from chairlift.text.parsers.json_text import quote
from chairlift.text.parsers.python_text import read_value

# Markers that some models write before such calls, and after them.
AROUND = {
    "<|python_tag|>": "",
    "<|python_start|>": "<|python_end|>",
    "<|tool_call_start|>": "<|tool_call_end|>",
}

_NAME = re.compile(r"[-.\w]*")
_KEY = re.compile(r"""[^\s=,()\[\]{}'"]*""")


class BareCallParser(JsonCallParser):
    """Reads a list of calls in brackets, or calls separated by semicolons; arguments in Python come one by one."""

    openers = Markers(*AROUND)
    bare = "{["

    def _read_calls(self, opener: str) -> Reader[bool]:
        text = self._text
        yield from text.space()
        is_list = (yield from text.peek()) == "["
        separator, bracket = (",", "]") if is_list else (";", "")
        if is_list:
            text.skip()
        if not (yield from self._read_list(separator, bracket)):
            return False
        if closing := AROUND.get(opener):
            yield from self._read_closing(closing)
        return True

    def _read_call(self) -> Reader[bool]:
        if (yield from self._text.peek()) == "{":
            return (yield from super()._read_call())
        name = yield from self._text.collect(_NAME)
        if name not in self._tools or not (yield from self._text.literal("(")):
            return False
        return (yield from self._read_keywords(name))

    def _read_keywords(self, name: str) -> Reader[bool]:
        """Read key=value pairs up to the closing bracket; return whether the call was started."""
        text = self._text
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
