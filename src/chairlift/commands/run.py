"""`chairlift run`: one prompt, one answer, on stdout and nothing else there."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.commands.options import DEFAULT_MODEL, GivenSampling, Model, with_sampling, with_settings
from chairlift.commands.screen import Speed, notes, open_llm, write
from chairlift.core.errors import RequestError

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
        typer.Option(
            "--chat/--raw", help="Through the chat template, or as it stands (default: chat if there is one)."
        ),
    ] = None,
    n: Annotated[int, typer.Option(help=f"How many answers, with a line {SEPARATOR} between them.")] = 1,
    *,
    sampling: GivenSampling,
    settings: dict[str, Any],
) -> None:
    """Answer one prompt."""
    text = read_prompt(prompt)
    llm = open_llm(model, settings)
    params = replace(sampling.on(llm.defaults), n=n)
    speed = Speed()
    answers = [""] * n
    for chunk in speed.watch(llm.stream(as_asked(llm, text, chat), params)):
        if chunk.index == 0:  # the first as it comes, the others when it is complete
            write(chunk.text)
        answers[chunk.index] += chunk.text
    write("\n")
    for answer in answers[1:]:
        write(f"{SEPARATOR}\n{answer}\n")
    if sys.stderr.isatty():
        notes.print(str(speed), style="dim")


def read_prompt(given: str | None) -> str:
    """The argument, or stdin without the newline that ends it."""
    if given is None and sys.stdin.isatty():
        raise RequestError('there is no prompt: give one, as in chairlift run "Why is the sky blue?", or pipe it in')
    text = sys.stdin.read().removesuffix("\n") if given in (None, "-") else given
    if not text:
        raise RequestError("the prompt is empty: give at least one character")
    return text


def as_asked(llm: LLM, text: str, chat: bool | None) -> Prompt:
    """The prompt as one message of a chat, or plain."""
    if chat is None:
        chat = llm.tokenizer is not None and llm.tokenizer.chat_template is not None
    return llm.chat_prompt([{"role": "user", "content": text}]) if chat else text
