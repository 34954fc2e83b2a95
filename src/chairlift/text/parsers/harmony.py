"""Harmony, the format of gpt-oss: messages with a header, in channels for reasoning, calls and the final answer."""

import re
from collections.abc import Sequence

from chairlift.text.parsers.arriving import Markers, Reader
from chairlift.text.parsers.calls import StepParser
from chairlift.text.parsers.dialect import Dialect
from chairlift.text.parsers.grammar import CallFormat, Lark, SpecialId
from chairlift.text.parsers.json_text import read_value
from chairlift.text.parsers.tools import Tool

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_END = "<|end|>"
_ENDS = (_END, "<|call|>", "<|return|>")
_HEADER_END = Markers(_MESSAGE)
_BODY_END = Markers(*_ENDS)
_RECIPIENT = re.compile(r"to=functions\.([^\s<]*)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>([a-z]*)")


class HarmonyParser(StepParser):
    """Reads messages: a header, a body, an end. An answer's first header begins after the role, in the prompt."""

    def _run(self) -> Reader[None]:
        text, output = self._text, self._output
        while (yield from text.peek()):
            header: list[str] = []
            if not (yield from text.until(_HEADER_END, header.append)):
                output.content("".join(header))
                return
            yield from self._read_body("".join(header))

    def _read_body(self, header: str) -> Reader[None]:
        text, output = self._text, self._output
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        name = recipient[1] if recipient is not None else ""
        if name in self._tools and (yield from text.peek()) in ("{", "<", ""):
            yield from self._read_call_of(name)
        elif channel is not None and channel[1] == "analysis":
            yield from text.until(_BODY_END, output.reasoning)
        elif channel is not None and recipient is None:
            yield from text.until(_BODY_END, output.content)
        else:  # not a message of this format, or a call that cannot be made
            output.content(header + _MESSAGE)
            output.content((yield from text.until(_BODY_END, output.content)))

    def _read_call_of(self, name: str) -> Reader[None]:
        text, output = self._text, self._output
        output.start(name)
        following = yield from text.peek()
        if following == "{":
            yield from read_value(text, output.arguments)
        elif following:
            output.arguments("{}")
        yield from text.until(_BODY_END, output.content, drop_cut=True)


class HarmonyFormat(CallFormat):
    """Messages of reasoning or text before a call, which is the last message, or before the final answer."""

    def grammar(
        self, markers: Sequence[str], tools: Sequence[Tool], required: bool, parallel: bool, special: SpecialId
    ) -> str:
        """Return the grammar for a call of one of these tools, or if not required, for a final answer."""
        lark = Lark(markers, special)
        call = lark.rule(
            "call", " | ".join(self._call(lark, index, tool, required) for index, tool in enumerate(tools))
        )
        channels = ["analysis"] if required else ["analysis", "commentary"]
        starts = [lark.rule(channel, lark.text(f"{_CHANNEL}{channel}{_MESSAGE}")) for channel in channels]
        body = lark.until("body", _END)
        message = lark.rule("message", f"({' | '.join(starts)})", body, lark.text(f"{_START}assistant"))
        final = lark.rule("final", lark.text(f"{_CHANNEL}final{_MESSAGE}"), "TEXT")
        return lark.source(f"{message}*", call if required else f"({call} | {final})")


HARMONY = Dialect(
    name="harmony",
    signs=((_CHANNEL, _MESSAGE),),
    kept=(_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS),
    parser=HarmonyParser,
    calls=HarmonyFormat(before=f"{_CHANNEL}commentary to=functions.", after=f" {_CONSTRAIN}json{_MESSAGE}"),
    has_channels=True,
)
