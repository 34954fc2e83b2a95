"""Qwen3-Coder: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>."""

import re

from chairlift.text.parsers.arriving import Markers, Reader
from chairlift.text.parsers.calls import CallParser
from chairlift.text.parsers.dialect import Dialect
from chairlift.text.parsers.grammar import CallFormat
from chairlift.text.parsers.json_text import quote
from chairlift.text.parsers.keyed_grammar import xml_arguments
from chairlift.text.parsers.typed_text import TrimmedText, is_string, typed

_BEGIN, _END = "<tool_call>", "</tool_call>"
# Seed-OSS writes the same format between markers of its own; models sometimes leave the outer markers out.
_AROUND = {_BEGIN: _END, "<seed:tool_call>": "</seed:tool_call>"}
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]*")
_WITHIN = Markers(_PARAMETER, _FUNCTION_END)
_VALUE_END = Markers(_PARAMETER_END)


class QwenCoderParser(CallParser):
    """Reads parameters and types their text by the function's schema; strings are passed on as they arrive."""

    openers = Markers(*_AROUND, _FUNCTION)

    def _read_calls(self, opener: str) -> Reader[bool]:
        text = self._text
        closing = _AROUND.get(opener)
        if closing:
            yield from text.space()
            if not (yield from text.literal(_FUNCTION)):
                return False
        name = yield from text.collect(_NAME)
        if name not in self._tools or not (yield from text.literal(">")):
            return False
        self._start(name)
        self._output.arguments("{")
        if (yield from self._read_parameters(name)) and closing:
            yield from self._read_closing(closing)
        return True

    def _read_parameters(self, name: str) -> Reader[bool]:
        """Read the parameters and the end of the function; return whether all of it is there."""
        text, properties = self._text, self._tools[name].properties
        separator = ""
        while True:
            text.hold()
            yield from text.space()
            marker = yield from text.begun(_WITHIN)
            if marker == _FUNCTION_END:
                text.release()
                self._output.arguments("}")
                return True
            key = (yield from text.collect(_NAME)) if marker == _PARAMETER else ""
            if not key or not (yield from text.literal(">")):
                yield from self._break_off()
                return False
            text.release()
            self._output.arguments(f"{separator}{quote(key)}: ")
            separator = ", "
            if not (yield from self._read_parameter(properties.get(key))):
                return False

    def _read_parameter(self, schema: object) -> Reader[bool]:
        """Read a value and the marker after it; return whether the marker is there."""
        write = self._output.arguments
        value: list[str] = []
        if is_string(schema):
            write('"')
            trimmed = TrimmedText(lambda piece: write(quote(piece)[1:-1]))
        else:
            trimmed = TrimmedText(value.append)
        is_complete = bool((yield from self._text.until(_VALUE_END, trimmed.add, drop_cut=True)))
        if is_complete:
            write('"' if is_string(schema) else typed("".join(value), schema))
        return is_complete


QWEN_CODER = Dialect(
    name="qwen-coder",
    signs=((_FUNCTION, _PARAMETER),),
    kept=(*_AROUND, *_AROUND.values()),
    parser=QwenCoderParser,
    calls=CallFormat(
        trigger=_BEGIN,
        before=f"\n{_FUNCTION}",
        after=">\n",
        tail=f"{_FUNCTION_END}\n{_END}",
        between="\n",
        repeats=True,
        arguments=xml_arguments,
    ),
)
