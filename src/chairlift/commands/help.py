"""The help of each command, in plain text: whole words at any width, brackets as written.

A command with many options has two helps: `--help` shows the common options, one clause each, and `--help-all` shows
all options in full.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from chairlift.core.settings import options

WIDEST = 100  # columns: longer lines are hard to read
_NAMES = 30  # most columns for the names of options; a longer name gets its own line
_WRITTEN = re.compile(r"(?P<names>-.*?)(?: <(?P<new>.+)>| \[(?P<choices>.+)\]| (?P<old>[A-Z][A-Z ]*))?")
# Placeholder of a value by typer's name of its type: lower case since about 0.20, upper case before.
_KINDS = {
    "str": "TEXT",
    "list[str]": "TEXT",
    "int": "N",
    "int range": "N",
    "float": "NUMBER",
    "float range": "NUMBER",
    "path": "PATH",
    "INTEGER": "N",
    "INTEGER RANGE": "N",
    "FLOAT": "NUMBER",
    "FLOAT RANGE": "NUMBER",
}

# The settings that `--help` shows, one line each; only `--help-all` shows the others.
COMMON_SETTINGS = {
    "device": "auto, cpu, cuda or cuda:N",
    "dtype": "auto, float32, bfloat16 or float16",
    "generation_config": "auto (the model's own sampling values) or none",
    "max_length": "Longest sequence (default: the model's own)",
    "kv_tokens": "Size of the KV cache (default: all that fits)",
    "kv_dtype": "auto, int8 or fp8; 8 bits hold twice the tokens",
    "memory_share": "Share of memory to use, above 0 and up to 1",
    "max_sequences": "Sequences in one batch",
    "step_tokens": "Tokens in one forward pass",
    "target_tpot": "Longest step, such as 50ms, instead of --step-tokens",
    "policy": "Order of requests: fcfs, priority, sjf, fair, ...",
}
# Options of single commands that only `--help-all` shows.
RARE_OPTIONS = {
    "api_workers",
    "on",
    "replica_cpus",
    "rank_placement",
    "queued_tokens",
    "routing",
    "max_waiting_tokens",
    "grace",
    "max_body_mb",
    "cors_origin",
    "tls_cert",
    "tls_key",
    "record",
    "tool_parser",
    "metrics_compat",
    "otlp_endpoint",
    "ui_prompts",
    "log_format",
    "log_level",
}
_RARE_SETTINGS = {found.name for _, found in options()} - COMMON_SETTINGS.keys()


def _show_all(context: typer.Context, is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(help_of(context, is_full=True))
        raise typer.Exit


HelpAll = Annotated[
    bool, typer.Option("--help-all", help="Show all options, in full.", callback=_show_all, is_eager=True)
]


def help_of(context: typer.Context, *, is_full: bool) -> str:
    """Format the help of a command or group, as wide as the terminal."""
    width = min(shutil.get_terminal_size().columns, WIDEST)
    command: Any = context.command
    lines = _wrapped(f"Usage: {context.command_path} {' '.join(usage_of(command))}", width, "")
    for paragraph in (command.help or "").split("\n\n"):
        lines += ["", *_wrapped(paragraph, width, "  ")]
    sections = dict(_sections(context, is_full))
    lengths = [len(name) for entries in sections.values() for name, _ in entries]
    left = 4 + max(length for length in lengths if length <= _NAMES)
    for title, entries in sections.items():
        lines += ["", f"{title}:", *_two_columns(entries, left, width)]
    return "\n".join(lines) + "\n"


def usage_of(command: Any) -> list[str]:
    """Return the words that may follow a command's name."""
    pieces = ["[OPTIONS]"]
    for param in command.params:
        if param.param_type_name == "argument":
            pieces.append(_metavar(param) if param.required else f"[{_metavar(param)}]")
    if hasattr(command, "commands"):
        pieces.append("COMMAND ...")
    return pieces


def _metavar(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _sections(context: typer.Context, is_full: bool) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield section titles, each with its entries: names and text."""
    command: Any = context.command
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in command.get_params(context):
        if not is_full and _is_rare(param):
            continue
        panel = "Arguments" if param.param_type_name == "argument" else param.rich_help_panel or "Options"
        sections.setdefault(panel, []).append(_entry(param, context, is_full))
    commands = getattr(command, "commands", {})
    sections["Commands"] = [(name, _first_sentence(each.help or "")) for name, each in commands.items()]
    yield from ((title, entries) for title, entries in sections.items() if entries)


def _is_setting(param: Any) -> bool:
    return (getattr(param, "rich_help_panel", None) or "").endswith("settings")


def _is_rare(param: Any) -> bool:
    return param.name in (_RARE_SETTINGS if _is_setting(param) else RARE_OPTIONS)


def _entry(param: Any, context: typer.Context, is_full: bool) -> tuple[str, str]:
    """Return the names of an option or argument as typed, and its text."""
    text = param.help or ""
    if param.param_type_name == "argument":
        return _metavar(param), text
    written, full_text = param.get_help_record(context)
    added = full_text.removeprefix(text).strip()  # the default and the range, in brackets
    if param.is_flag:
        added = re.sub(r"default: [\w-]+", f"default: {'on' if param.default else 'off'}", added)
    found = _WRITTEN.fullmatch(written)
    assert found is not None, written
    typed = found["new"] or found["old"] or ""
    choices = found["choices"] or (typed if typed not in _KINDS and found["new"] else "")
    kind = "CHOICE" if choices else _KINDS.get(typed, typed)
    if is_full:
        offered = f"One of: {choices.replace('|', ', ')}." if choices else ""
        return f"{found['names']} {kind}".strip(), " ".join(filter(None, (text, offered, added)))
    short = COMMON_SETTINGS.get(param.name) if _is_setting(param) else None
    clause = short or first_clause(text)
    default = re.search(r"default: ([^;\]]*)", added)
    if default and not short:
        clause += f" (default: {default[1]})"
    return f"{found['names'].partition(', --max')[0]} {kind}".strip(), clause


def first_clause(text: str) -> str:
    """Return a help text up to its first semicolon or full stop.

    >>> first_clause("Where to listen; 0.0.0.0 opens it to the network."), first_clause("One. Two.")
    ('Where to listen', 'One')
    """
    return re.split(r";|\.(?=\s|$)", text, maxsplit=1)[0]


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", text.strip(), maxsplit=1)[0].replace("\n", " ")


def _two_columns(entries: Iterable[tuple[str, str]], left: int, width: int) -> Iterator[str]:
    """Yield lines with names on the left and texts on the right, broken between words."""
    for name, text in entries:
        lines = _wrapped(text, width, " " * left) or [""]
        if len(name) + 4 <= left:
            lines[0] = f"  {name}".ljust(left) + lines[0].lstrip()
        else:
            lines.insert(0, f"  {name}")
        yield from lines


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
