"""The class of every command: plain-text help, and errors that name flags."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

from chairlift.commands.help import help_of, usage_of
from chairlift.core.errors import ChairliftError
from chairlift.core.vllm_names import flag_hint


class Command(TyperCommand):
    """A command with errors that name flags instead of settings."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the common options, or all options of a command without --help-all."""
        formatter.write(help_of(ctx, is_full=all(param.name != "help_all" for param in self.params)))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the arguments, as in the help."""
        return usage_of(self)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the flags; the error for a flag of vLLM names ours."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # typer's bundled click or the installed one raises it: compare by name
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
        """Write the commands, one sentence each."""
        formatter.write(help_of(ctx, is_full=True))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words after a group's name, as in the help."""
        return usage_of(self)


def in_flags(message: str, params: Iterable[Any]) -> str:
    """Replace names of settings in an error message with the command's flags.

    A name with an underscore is replaced everywhere; a plain word (seed, device) only at the start of the message or
    after "lower", "raise", "leave" or "set". Advice to use None is removed: on the command line it is an absent flag.
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
