"""`chairlift run`: answer one prompt; stdout has the answer and nothing else."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.commands.options import DEFAULT_MODEL, GivenSampling, Model, with_sampling, with_settings
from chairlift.commands.screen import Speed, notes, open_llm, write
from chairlift.core.errors import RequestError
from chairlift.core.structured import Structured

if TYPE_CHECKING:
    from chairlift.offline.llm import LLM, Prompt

SEPARATOR = "---"


@with_settings
@with_sampling
def run(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; - or nothing reads it from stdin.")
    ] = None,
    model: Model = DEFAULT_MODEL,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Apply the chat template, or not (default: apply it if the model has one)."),
    ] = None,
    schema: Annotated[
        Path | None, typer.Option(help="A file with a JSON schema; the answer is JSON that matches it.")
    ] = None,
    n: Annotated[int, typer.Option(help=f"Number of answers, with a line {SEPARATOR} between them.")] = 1,
    *,
    sampling: GivenSampling,
    settings: dict[str, Any],
) -> None:
    """Answer one prompt."""
    text = read_prompt(prompt)
    structured = None if schema is None else Structured.of({"json": read_schema(schema)})
    llm = open_llm(model, settings)
    params = replace(sampling.on(llm.defaults), n=n, structured=structured)
    speed = Speed()
    answers = [""] * n
    for chunk in speed.watch(llm.stream(to_prompt(llm, text, chat), params)):
        if chunk.index == 0:  # the first answer is streamed, the others are printed when all are complete
            write(chunk.text)
        answers[chunk.index] += chunk.text
    write("\n")
    for answer in answers[1:]:
        write(f"{SEPARATOR}\n{answer}\n")
    if sys.stderr.isatty():
        notes.print(str(speed), style="dim")


def read_schema(file: Path) -> str:
    """Return the text of a schema's file."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the schema {file} cannot be read: {error}") from None


def read_prompt(given: str | None) -> str:
    """Return the argument, or stdin without its last newline."""
    if given is None and sys.stdin.isatty():
        raise RequestError('there is no prompt: give one, as in chairlift run "Why is the sky blue?", or pipe it in')
    text = sys.stdin.read().removesuffix("\n") if given in (None, "-") else given
    if not text:
        raise RequestError("the prompt is empty: give at least one character")
    return text


def to_prompt(llm: LLM, text: str, chat: bool | None) -> Prompt:
    """Return the prompt as one chat message, or as plain text."""
    if chat is None:
        chat = llm.tokenizer is not None and llm.tokenizer.chat_template is not None
    return llm.chat_prompt([{"role": "user", "content": text}]) if chat else text
