"""Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], and since v11 [TOOL_CALLS]name[ARGS]{...}."""

import re

from chairlift.text.parsers.arriving import Markers, Reader
from chairlift.text.parsers.dialect import Dialect
from chairlift.text.parsers.grammar import CallFormat
from chairlift.text.parsers.json_calls import JsonCallParser
from chairlift.text.parsers.json_text import read_value

_CALLS, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_AFTER_NAME = Markers(_ID, _ARGS)
_NAME = re.compile(r"[^\[{\s]*")


class MistralParser(JsonCallParser):
    """Reads both formats, distinguished by the text after the marker."""

    openers = Markers(_CALLS)

    def _read_calls(self, opener: str) -> Reader[bool]:
        text = self._text
        yield from text.space()
        opening = yield from text.peek()
        if opening == "[":
            text.skip()
            return (yield from self._read_list(",", "]"))
        if opening == "{":
            return (yield from self._read_call())
        return (yield from self._read_named())

    def _read_named(self) -> Reader[bool]:
        """Read name[ARGS]{...}; an id may follow the name, and [ARGS] may be missing."""
        text = self._text
        name = yield from text.collect(_NAME)
        if name not in self._tools:
            return False
        marker = ""
        while marker != _ARGS and (yield from text.peek()) == "[":
            marker = yield from text.begun(_AFTER_NAME)
            if marker not in _AFTER_NAME.names:
                return False
            if marker == _ID:
                yield from text.collect(_NAME)
        if (yield from text.peek()) != "{":
            return False
        self._start(name)
        yield from read_value(text, self._output.arguments)
        return True


_KEPT = (_CALLS, _ID, _ARGS)

MISTRAL = Dialect(
    name="mistral",
    signs=((_CALLS,),),
    kept=_KEPT,
    parser=MistralParser,
    calls=CallFormat(
        trigger=_CALLS,
        opening="[",
        before='{"name": "',
        after='", "arguments": ',
        tail="}",
        between=", ",
        closing="]",
    ),
)

MISTRAL_ARGS = Dialect(
    name="mistral-args",
    signs=((_CALLS, _ARGS),),
    kept=_KEPT,
    parser=MistralParser,
    calls=CallFormat(trigger=_CALLS, before="", after=_ARGS, repeats=True),
)
