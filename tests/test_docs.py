"""The documentation: its commands have flags that exist, its links and files are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from chairlift import cli

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
COMMAND = re.compile(r"^ {4}(?:\$ )?(chairlift .*)|`(chairlift [^`]*)`", re.MULTILINE)
LINK = re.compile(r"\]\(((?!http)[^)#\s]*)(?:#([^)]*))?\)")
SELECTED = re.compile(r"`(?:\w+=\S+ )*pytest ([^`]*)`|`(-k [^`]*)` there")
FILE = re.compile(r"\b(?:pytest|python) [^`|\n]*?((?:tests|benchmarks)/[\w/.]+)")

COMMANDS: Any = typer.main.get_command(cli.app)
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def unknown_flags(words: list[str]) -> list[str]:
    """The words that begin with a dash and are no flags of the command that the first words name."""
    command = COMMANDS
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    flags = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
    given = [word.strip("[]").partition("=")[0] for word in words]
    return [word for word in given if re.match("--?[a-z]", word) and word not in {"--help", *flags}]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pages
def test_a_command_in_the_documentation_has_flags_that_exist(page: Path) -> None:
    for found in COMMAND.finditer(page.read_text().replace("\\\n", " ")):
        words = shlex.split(found[1] or found[2], comments=True)[1:]
        assert not unknown_flags(words), f"chairlift {' '.join(words)}"


def test_a_flag_that_is_gone_is_found() -> None:
    assert unknown_flags(shlex.split("bench offline --shape x --gone --repeat=3 -1")) == ["--gone"]


@pages
def test_a_link_in_the_documentation_leads_somewhere(page: Path) -> None:
    for found in LINK.finditer(page.read_text()):
        target = page.parent / found[1] if found[1] else page
        assert target.exists(), found[0]
        assert not found[2] or found[2] in anchors(target), found[0]


@pages
def test_a_file_that_the_documentation_runs_is_there(page: Path) -> None:
    for found in FILE.finditer(page.read_text()):
        assert (ROOT / found[1]).exists(), found[0]


@pages
def test_a_name_that_selects_tests_in_the_documentation_is_in_their_files(page: Path) -> None:
    source = ""
    for found in SELECTED.finditer(page.read_text()):
        words = shlex.split(found[1] or found[2])
        if paths := [ROOT / word for word in words if word.startswith("tests/")]:
            files = [file for path in paths for file in ([path] if path.is_file() else path.glob("*.py"))]
            source = "".join(file.read_text() for file in files)
        if "-k" in words:
            names = set(words[words.index("-k") + 1].split()) - {"and", "or", "not"}
            assert [name for name in names if name not in source and not name.isupper()] == [], found[0]
