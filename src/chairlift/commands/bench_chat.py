"""`chairlift bench chat`: what the prefix cache is worth to chat sessions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from chairlift.commands.bench import show
from chairlift.commands.compare import progress_bar
from chairlift.commands.options import DEFAULT_MODEL, with_model, with_settings
from chairlift.core.errors import ChairliftError


@with_settings
@with_model("")
def bench_chat(
    shape: Annotated[
        str | None, typer.Option(help="A model's shape with random weights, such as stories15m, in place of --model.")
    ] = None,
    sessions: Annotated[int, typer.Option(help="Who all begin at once.", min=1)] = 64,
    turns: Annotated[int, typer.Option(help="Questions of each, the next as soon as the last is answered.", min=1)] = 5,
    system_tokens: Annotated[int, typer.Option(help="Length of the system prompt that all share.", min=0)] = 1000,
    user_tokens: Annotated[int, typer.Option(help="Length of a question.", min=1)] = 30,
    answer_tokens: Annotated[int, typer.Option(help="Length of an answer.", min=1)] = 30,
    workload_seed: Annotated[int, typer.Option(help="Another seed draws other tokens.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file, too.")] = None,
    *,
    model: str,
    settings: dict[str, Any],
) -> None:
    """The same chat sessions with the prefix cache and without: first tokens, prompt tokens computed, speed."""
    if shape and model:
        raise ChairliftError("--shape and --model exclude each other: give one")
    if not settings["prefix_cache"]:
        raise ChairliftError("every chat runs with the prefix cache and without: leave out --no-prefix-cache")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ChairliftError(f"{json_file} cannot be written: there is no such folder")
    from chairlift.bench.chat import Chat, measure, table

    if shape:
        settings["load_format"] = "dummy"
    chat = Chat(sessions, turns, system_tokens, user_tokens, answer_tokens, workload_seed)
    with progress_bar(2 * chat.answered) as (notice, advance):
        summary = measure(shape or model or DEFAULT_MODEL, settings, chat, notice, advance)
    show(table(summary))
    if json_file is not None:
        json_file.write_text(json.dumps(summary, indent=2) + "\n")
