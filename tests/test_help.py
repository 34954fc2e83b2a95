"""The help of every command as a new user sees it: nothing lost, no word cut, the common options on one screen."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from chairlift import cli
from chairlift.commands.command import in_flags
from chairlift.commands.help import COMMON_SETTINGS, RARE_OPTIONS
from chairlift.core.settings import options


def every_command(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command with the words that call it; groups too."""
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from every_command(command, *path, name)


COMMANDS = dict(every_command(typer.main.get_command(cli.app)))


@cache
def shown(*arguments: str, columns: int = 80) -> str:
    done = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": str(columns)}, prog_name="chairlift")
    assert done.exit_code == 0
    return done.stdout


def helps(path: tuple[str, ...], columns: int = 80) -> list[str]:
    """A command's help, and the long one where there is one."""
    has_more = any(param.name == "help_all" for param in COMMANDS[path].params)
    return [shown(*path, flag, columns=columns) for flag in ("--help", "--help-all")[: 1 + has_more]]


def squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_the_help_has_every_text_as_it_was_written_and_every_flag(path: tuple[str, ...]) -> None:
    everything = squeezed(helps(path)[-1])
    command = COMMANDS[path]
    for param in command.params:
        assert squeezed(param.help) in everything, "the help of an option is shown whole, brackets too"
        assert param.param_type_name == "argument" or all(
            flag in everything for flag in (*param.opts, *param.secondary_opts)
        )
    assert squeezed(command.help) in everything


def test_what_to_install_for_traces_keeps_its_bracket() -> None:
    assert "pip install 'chairlift[otel]'" in " ".join(shown("serve", "--help-all").split())


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_no_word_is_cut_and_no_line_is_too_long_at_80_columns(path: tuple[str, ...]) -> None:
    whole = [word for text in helps(path, columns=1000) for word in text.split()]
    for text in helps(path):
        assert max(map(len, text.splitlines())) <= 80
        assert set(text.split()) <= set(whole)


def test_the_help_of_serve_fits_on_a_screen_with_a_line_for_most_options() -> None:
    text = shown("serve", "--help")
    assert len(text.splitlines()) <= 60
    flags = [line for line in text.splitlines() if line.startswith("  -")]
    assert len(flags) > 15 and "--help-all" in text
    missing = [name for name in COMMON_SETTINGS if f"--{name.replace('_', '-')} " not in text]
    assert set(missing) <= COMMON_SETTINGS.keys() - {found.name for _, found in options()}
    assert not [name for name in RARE_OPTIONS if f"--{name.replace('_', '-')}" in text]


def test_every_command_with_a_model_takes_it_as_a_flag_and_where_it_can_as_its_argument() -> None:
    for path, command in COMMANDS.items():
        names = {name: param for param in command.params for name in param.opts}
        if not names.keys() & {"--model", "model_argument"}:
            continue
        assert "-m" in names and names["-m"] is names["--model"], path
        arguments = [param.name for param in command.params if param.param_type_name == "argument"]
        assert "model_argument" in arguments or arguments or path == ("bench", "serve"), path


def test_a_message_names_the_flags_of_the_command_that_has_them() -> None:
    params = COMMANDS["run",].params
    assert in_flags("seed is x: lower n or raise max_length", params) == "--seed is x: lower --n or raise --max-length"
    assert in_flags("/max_length/seed: use 1, or None for all", params) == "/max_length/seed: use 1"
    assert in_flags("the seed of max_lengths", params) == "the seed of max_lengths"


FIRST_WORD = """
import os, sys
from chairlift import cli

class Stderr:
    encoding = "utf-8"
    def write(self, text):
        if text.strip():
            print(text.strip(), "after torch" if "torch" in sys.modules else "before torch", flush=True)
            os._exit(0)
    def flush(self): pass
    def isatty(self): return False
    def fileno(self): return 2

sys.stderr = Stderr()
cli.main()
"""


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_a_command_says_what_it_loads_before_it_imports_torch(command: str) -> None:
    asked = [sys.executable, "-c", FIRST_WORD, command]
    done = subprocess.run(asked, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True)
    assert done.stdout == "loading smollm2-135m before torch\n"
