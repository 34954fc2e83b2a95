"""Every command's class: plain help, and errors in the words of the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

from chairlift.commands.help import help_of, usage_of
from chairlift.core.errors import ChairliftError
from chairlift.core.vllm_names import flag_hint


class Command(TyperCommand):
    """A command whose errors name flags where Python's users would read names of settings."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show the common options, or all where there are few."""
        formatter.write(help_of(ctx, is_full=all(param.name != "help_all" for param in self.params)))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The arguments, as in the help."""
        return usage_of(self)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the flags; one that vLLM has is answered with ours."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # typer's own click or the installed one raises it: only its name is the same
            if type(error).__name__ == "NoSuchOption" and (hint := flag_hint(str(getattr(error, "option_name", "")))):
                raise ChairliftError(hint) from None
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except ChairliftError as error:
            error.args = (in_flags(str(error), self.params), *error.args[1:])
            raise


class Group(TyperGroup):
    """A group of commands."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show the commands, one sentence each."""
        formatter.write(help_of(ctx, is_full=True))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """What follows a group's name, as in the help."""
        return usage_of(self)


def in_flags(message: str, params: Iterable[Any]) -> str:
    """An error message with the flags of a command in place of the names of settings that they set.

    A name with an underscore is a setting's wherever it is; a plain word (seed, device) only where a message begins
    with it or tells the user to change it. What Python's users may write as None is a flag that is not given.
    """
    for param in params:
        flag = next((name for name in param.opts if name.startswith("--")), None)
        if flag is None:
            continue
        before = (
            r"(?<![\w/.-])" if "_" in param.name else r"(?:(?<=\blower )|(?<=\braise )|(?<=\bleave )|(?<=\bset )|^)"
        )
        message = re.sub(rf"{before}{re.escape(param.name)}(?![\w/-])", flag, message)
    return re.sub(r",? or None\b[^,;:]*", "", message)
