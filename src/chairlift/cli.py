"""The command line: `chairlift serve`, `route`, `explain`, `run`, `chat`, `pull`, `batch`, `bench` and others."""

from __future__ import annotations

import signal
import sys
from io import TextIOWrapper
from typing import Annotated

import typer

from chairlift import __version__
from chairlift.commands import bench
from chairlift.commands.batch import batch
from chairlift.commands.bench_agreement import agreement
from chairlift.commands.bench_cache import cache
from chairlift.commands.bench_chat import bench_chat
from chairlift.commands.bench_quality import quality
from chairlift.commands.bench_sizes import sizes
from chairlift.commands.bench_speculation import speculation
from chairlift.commands.chat import chat
from chairlift.commands.command import Command, Group
from chairlift.commands.compare import compare
from chairlift.commands.explain import explain
from chairlift.commands.plan import plan
from chairlift.commands.profile import profile
from chairlift.commands.pull import pull
from chairlift.commands.route import route
from chairlift.commands.run import run
from chairlift.commands.serve import serve
from chairlift.commands.simulate import simulate_command
from chairlift.commands.validate import validate
from chairlift.commands.view import view
from chairlift.core.errors import ChairliftError

app = typer.Typer(
    name="chairlift",
    help="Run large language models with continuous batching on a paged KV cache.",
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for each in (serve, route, chat, run, batch, pull, explain):
    app.command(cls=Command)(each)
for each in (cache, quality, agreement, sizes, speculation):
    bench.app.command(cls=Command)(each)
bench.app.command("chat", cls=Command)(bench_chat)
app.add_typer(bench.app, name="bench")
for each in (compare, plan, profile, validate):
    app.command(cls=Command)(each)
app.command("simulate", cls=Command)(simulate_command)
app.command(cls=Command)(view)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run a command; an error of the user is one line on stderr."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # one invalid byte must not end an answer
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that files are closed and processes ended
    _restore_interrupts()
    try:
        app()
    except ChairliftError as error:
        sys.exit(f"error: {error}")
    except Exception as error:
        if not _was_interrupted(error):
            raise
        sys.exit(130)


def _restore_interrupts() -> None:
    """Let SIGINT interrupt this command even where its shell started it with SIGINT ignored.

    A shell without job control (a script, make, CI) ignores SIGINT for commands in the background, and Python keeps an
    ignored SIGINT ignored. Our commands hold a model's memory or a GPU: a Ctrl-C that ends the script, or `kill -INT`,
    must end them too. A command that should outlive its terminal is started with nohup, which ignores SIGHUP, or with
    setsid: both work as before.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C caused an error: it may interrupt a step, and then the clean-up after it fails too."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__context__
    return False


if __name__ == "__main__":
    main()
