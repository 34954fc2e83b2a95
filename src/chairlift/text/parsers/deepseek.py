"""DeepSeek V3 and R1 (name, then JSON in a code fence) and V3.1 (name, then JSON), between the same markers."""

import re

from chairlift.text.parsers.arriving import Markers, Reader
from chairlift.text.parsers.calls import CallParser
from chairlift.text.parsers.dialect import Dialect
from chairlift.text.parsers.grammar import CallFormat
from chairlift.text.parsers.json_text import read_value


def _marker(words: str) -> str:
    """Return a marker, with the bar and the space of DeepSeek's special tokens."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_ALL_BEGIN, _ALL_END = _marker("tool calls begin"), _marker("tool calls end")
_BEGIN, _SEPARATOR, _END = _marker("tool call begin"), _marker("tool sep"), _marker("tool call end")
_FENCE = "```json"
_NAME = re.compile(r"[^<\s]*")


class DeepSeekParser(CallParser):
    """Reads both formats: in the older one the word `function` precedes the separator, and the name follows it."""

    openers = Markers(_ALL_BEGIN, _BEGIN, _ALL_END)

    def _read_calls(self, opener: str) -> Reader[bool]:
        text = self._text
        if opener == _ALL_END:  # part of the format after a call, otherwise content
            return self._output.is_after_call and text.release() == opener
        if opener == _ALL_BEGIN:
            yield from text.space()
            if not (yield from text.literal(_BEGIN)):
                return False
        name = yield from text.collect(_NAME)
        if not (yield from text.literal(_SEPARATOR)):
            return False
        is_fenced = name == "function" and (yield from text.peek()) != "{"
        if is_fenced:
            name = yield from text.collect(_NAME)
            yield from text.space()
            if not (yield from text.literal(_FENCE)):
                return False
        yield from text.space()
        if name not in self._tools or (yield from text.peek()) != "{":
            return False
        self._start(name)
        if (yield from read_value(text, self._output.arguments)):
            yield from self._read_closing(*(["```"] if is_fenced else []), _END)
        return True


_KEPT = (_ALL_BEGIN, _ALL_END, _BEGIN, _SEPARATOR, _END)

# The templates of both contain the word `function`; the fence tells them apart.
DEEPSEEK = Dialect(
    name="deepseek",
    signs=((_ALL_BEGIN, _FENCE),),
    kept=_KEPT,
    parser=DeepSeekParser,
    calls=CallFormat(
        trigger=_ALL_BEGIN,
        before=f"{_BEGIN}function{_SEPARATOR}",
        after=f"\n{_FENCE}\n",
        tail=f"\n```{_END}",
        between="\n",
        closing=_ALL_END,
    ),
)

DEEPSEEK_V31 = Dialect(
    name="deepseek-v3.1",
    signs=((_ALL_BEGIN,),),
    kept=_KEPT,
    parser=DeepSeekParser,
    calls=CallFormat(trigger=_ALL_BEGIN, before=_BEGIN, after=_SEPARATOR, tail=_END, closing=_ALL_END),
)
