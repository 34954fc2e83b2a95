"""`chairlift bench chat`: chat sessions with and without the prefix cache."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from chairlift.commands.options import with_model, with_settings
from chairlift.commands.reports import JsonFile, check_files, choose_shape, progress_bar, show, write_numbers
from chairlift.core.errors import ChairliftError


@with_settings
@with_model("")
def bench_chat(
    shape: Annotated[
        str | None, typer.Option(help="A model's shape with random weights, such as stories15m, in place of --model.")
    ] = None,
    sessions: Annotated[int, typer.Option(help="Chat sessions, which all start at once.", min=1)] = 64,
    turns: Annotated[
        int, typer.Option(help="Questions per session, each sent as soon as the last is answered.", min=1)
    ] = 5,
    system_tokens: Annotated[
        int, typer.Option(help="Length of the system prompt that all sessions share.", min=0)
    ] = 1000,
    user_tokens: Annotated[int, typer.Option(help="Length of a question.", min=1)] = 30,
    answer_tokens: Annotated[int, typer.Option(help="Length of an answer.", min=1)] = 30,
    workload_seed: Annotated[int, typer.Option(help="Another seed draws other tokens.")] = 0,
    json_file: JsonFile = None,
    *,
    model: str,
    settings: dict[str, Any],
) -> None:
    """Compare chat sessions with and without the prefix cache: time to first token, computed prompt tokens, speed."""
    chosen = choose_shape(shape, model, settings)
    if not settings["prefix_cache"]:
        raise ChairliftError("every chat runs with the prefix cache and without: leave out --no-prefix-cache")
    check_files(json_file)
    from chairlift.bench.chat import Chat, chat_table, measure

    chat = Chat(sessions, turns, system_tokens, user_tokens, answer_tokens, workload_seed)
    with progress_bar(2 * chat.output_tokens) as (notice, advance):
        summary = measure(chosen, settings, chat, notice, advance)
    show(chat_table(summary))
    write_numbers(json_file, summary)
