"""The block of reasoning before an answer, apart from its content and calls."""

import pytest
from parsing import TOOLS, cuts, parse

from chairlift.text.parsers import DIALECTS, parser_for
from chairlift.text.parsers.events import MessageParser
from chairlift.text.parsers.reasoning import MARKERS, ReasoningMarkers, opens_reasoning, reasoning_of

THINK = MARKERS[0]
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def parser_of(starts_inside: bool = False, markers: ReasoningMarkers = THINK) -> MessageParser:
    return parser_for(DIALECTS["hermes"], TOOLS, reasoning=markers, starts_inside=starts_inside)


@pytest.mark.parametrize(
    ("text", "starts_inside", "reasoning", "content", "num_calls"),
    [
        ("<think>\nHmm.\n\nSo.\n</think>\n\nYes.", False, "Hmm.\n\nSo.", "Yes.", 0),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes.", 0),
        ("\n<think>Hmm.</think>Yes.", False, "Hmm.", "Yes.", 0),
        ("\nHmm.\n</think>\n\nYes.", True, "Hmm.", "Yes.", 0),
        ("<think>\nHmm.\n</think>\nYes.", True, "Hmm.", "Yes.", 0),
        ("Hmm, <b> </thin", True, "Hmm, <b> </thin", "", 0),
        ("Hmm.\n", True, "Hmm.", "", 0),
        ("<think>Hmm", False, "Hmm", "", 0),
        ("<thi", False, "", "<thi", 0),
        (" <thinner> Yes.", False, "", " <thinner> Yes.", 0),
        ("Yes. <think>no</think>", False, "", "Yes. <think>no</think>", 0),
        (f"<think>A call: {CALL}</think>\n\n{CALL}", False, f"A call: {CALL}", "", 1),
        (f"so</think>Look:\n{CALL}\n", True, "so", "Look:", 1),
        ("", True, "", "", 0),
        ("", False, "", "", 0),
    ],
)
def test_reasoning_is_apart_wherever_the_answer_is_cut(
    text: str, starts_inside: bool, reasoning: str, content: str, num_calls: int
) -> None:
    for pieces in ([text], *cuts(text)):
        message = parse(parser_of(starts_inside), *pieces)
        assert (message.reasoning, message.content, len(message.calls)) == (reasoning, content, num_calls), pieces


@pytest.mark.parametrize("markers", MARKERS)
def test_each_pair_of_markers_is_recognised_and_read(markers: ReasoningMarkers) -> None:
    assert reasoning_of(f"{{% if '{markers.end}' in content %}}") == markers
    message = parse(parser_of(markers=markers), f"{markers.begin}\nHmm.\n{markers.end}\nYes.")
    assert (message.reasoning, message.content) == ("Hmm.", "Yes.")


def test_a_template_without_markers_has_no_reasoning() -> None:
    assert reasoning_of("{{ messages }}") is None
    assert parse(parser_for(None), "<think>so</think>").content == "<think>so</think>"


def test_channels_have_their_own_reasoning_without_tools_and_whatever_the_template_says() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    for reasoning in (None, THINK):
        message = parse(parser_for(DIALECTS["harmony"], reasoning=reasoning), text)
        assert (message.reasoning, message.content) == ("Hm.", "Yes.")


def test_a_prompt_that_ends_with_the_marker_opens_the_block() -> None:
    assert opens_reasoning("<|im_start|>assistant\n<think>\n", THINK)
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n", THINK)
    assert not opens_reasoning("What does <think> mean?<|im_end|>\n<|im_start|>assistant\n", THINK)
