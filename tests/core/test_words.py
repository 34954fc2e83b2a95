"""Counts that people read: one request, two requests, and no "1 requests" anywhere."""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path

import pytest

from chairlift.core.words import counted

SOURCE = Path(__file__).parents[2] / "src" / "chairlift"
NOUNS = ("request", "token", "block", "line", "step", "sequence", "session", "turn", "answer", "run", "thread", "seat")
# The commands and what they print; elsewhere counts are mostly in errors about numbers above 1.
ROOMS = ("commands", "bench", "costs", "simulation", "evaluation")
PRINTED = sorted([*(file for room in ROOMS for file in SOURCE.glob(f"{room}/*.py")), *SOURCE.glob("batch*.py")])


def test_a_count_has_its_noun_in_the_right_form() -> None:
    assert [counted(number, "request") for number in (0, 1, 2, 1000)] == [
        "0 requests",
        "1 request",
        "2 requests",
        "1,000 requests",
    ]
    assert counted(1, "batch") == "1 batch" and counted(2, "batch") == "2 batches"


@pytest.mark.parametrize("file", PRINTED, ids=lambda file: file.name)
def test_no_command_or_report_writes_a_plural_after_a_count_that_may_be_one(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        parts = node.values if isinstance(node, ast.JoinedStr) else []
        for value, text in pairwise(parts):
            is_count = isinstance(value, ast.FormattedValue) and "rounded(" not in ast.unparse(value)  # that says 16k
            if is_count and isinstance(text, ast.Constant):
                after = str(text.value).split(",")[0]
                wrong = [noun for noun in NOUNS if after.startswith(f" {noun}s")]
                assert not wrong, f"line {node.lineno}: use counted(number, {wrong[0]!r})"
