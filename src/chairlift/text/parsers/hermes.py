"""Hermes, Qwen 2.5 and Qwen 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from chairlift.text.parsers.arriving import Markers, Reader
from chairlift.text.parsers.dialect import Dialect
from chairlift.text.parsers.grammar import CallFormat
from chairlift.text.parsers.json_calls import JsonCallParser

_BEGIN, _END = "<tool_call>", "</tool_call>"


class HermesParser(JsonCallParser):
    """Reads one JSON object between markers."""

    openers = Markers(_BEGIN)

    def _read_calls(self, opener: str) -> Reader[bool]:
        yield from self._text.space()
        if not (yield from self._read_call()):
            return False
        yield from self._read_closing(_END)
        return True


HERMES = Dialect(
    name="hermes",
    signs=(("<tool_call>", '"name"'), ("<tool_call>", '\\"name\\"')),
    kept=(_BEGIN, _END),
    parser=HermesParser,
    calls=CallFormat(
        trigger=_BEGIN,
        before='\n{"name": "',
        after='", "arguments": ',
        tail=f"}}\n{_END}",
        between="\n",
        repeats=True,
    ),
)
