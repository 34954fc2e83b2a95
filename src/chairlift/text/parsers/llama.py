"""Llama 3: {"name": ..., "parameters": {...}}, several separated by semicolons; and plain JSON of any other model."""

from chairlift.text.parsers.arriving import Markers, Reader
from chairlift.text.parsers.dialect import Dialect
from chairlift.text.parsers.grammar import CallFormat
from chairlift.text.parsers.json_calls import JsonCallParser

_TAG = "<|python_tag|>"


class BareJsonParser(JsonCallParser):
    """Reads JSON objects, or a list of them, that begin a line."""

    bare = "{["

    def _read_calls(self, opener: str) -> Reader[bool]:
        yield from self._text.space()
        if (yield from self._text.peek()) == "[":
            self._text.skip()
            return (yield from self._read_list(",", "]"))
        return (yield from self._read_list(";", ""))


class LlamaParser(BareJsonParser):
    """Reads JSON objects that begin a line or follow the tag."""

    openers = Markers(_TAG)


LLAMA = Dialect(
    name="llama",
    signs=(("<|python_tag|>", '"parameters"'), ("<|start_header_id|>", '"parameters"')),
    kept=(_TAG,),
    parser=LlamaParser,
    calls=CallFormat(before='{"name": "', after='", "parameters": ', tail="}", between="; "),
)

JSON = Dialect(
    name="json",
    signs=(("tool_calls",),),
    parser=BareJsonParser,
    calls=CallFormat(before='{"name": "', after='", "arguments": ', tail="}", between="\n"),
)
