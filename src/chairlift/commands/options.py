"""Flags that several commands share, generated from the settings so that each is defined once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

import typer

from chairlift.commands.help import HelpAll
from chairlift.core.errors import ChairliftError
from chairlift.core.params import SamplingParams
from chairlift.core.settings import Settings, options

if TYPE_CHECKING:
    from chairlift.offline.defaults import SamplingDefaults

DEFAULT_MODEL = "smollm2-135m"  # also in models.sources; a test compares the two

_MODEL_HELP = f"A short name, a folder, a .gguf file, or org/name on the Hugging Face hub (default: {DEFAULT_MODEL})."
Model = Annotated[str, typer.Option("--model", "-m", metavar="NAME", help=_MODEL_HELP, show_default=False)]
Command = Callable[..., Any]
ALIASES = {"step_tokens": ("--max-batch-tokens",)}  # names in other engines


@dataclass(frozen=True, slots=True)
class Flag:
    """One sampling flag: a field of SamplingParams as the command line shows it."""

    name: str
    kind: Any
    default: Any
    help: str


# Defaults at a terminal where the model has none: less random and longer than the API's, which are OpenAI's.
TERMINAL: dict[str, Any] = {"max_tokens": 1024, "temperature": 0.7}
SAMPLING = (
    Flag("max_tokens", int | None, None, "Longest answer (default: the model's own, or 1024)."),
    Flag(
        "temperature",
        float | None,
        None,
        "Sampling temperature (default: the model's own, or 0.7); 0 takes the likeliest token, 1 samples from the "
        "model's own distribution.",
    ),
    Flag("top_p", float | None, None, "Keep only the likeliest tokens that together have this probability."),
    Flag("top_k", int | None, None, "Keep only this many of the likeliest tokens; 0 keeps all."),
    Flag("min_p", float | None, None, "Drop tokens less likely than this share of the likeliest one."),
    Flag("repetition_penalty", float | None, None, "Above 1, tokens that have occurred already become less likely."),
    Flag("seed", int | None, None, "The same seed gives the same answer (default: random)."),
    Flag("stop", list[str], [], "End the answer before this text; repeatable."),
)


@dataclass(frozen=True, slots=True)
class GivenSampling:
    """The sampling flags that were given on the command line."""

    values: dict[str, Any]

    def on(self, defaults: SamplingDefaults) -> SamplingParams:
        """Merge with a model's defaults: a flag overrides the model's value, which overrides TERMINAL."""
        return SamplingParams(**{**TERMINAL, **defaults.values, **self.values})

    @staticmethod
    def of(flags: dict[str, Any]) -> GivenSampling:
        """Keep the flags that were given; an invalid value is rejected before a model is loaded."""
        given = {name: value for name, value in flags.items() if value not in (None, [])}
        SamplingParams(**given)
        return GivenSampling(given)


def with_model(default: str = DEFAULT_MODEL) -> Callable[[Command], Command]:
    """Add the argument MODEL and the flag --model to a command, which gets the keyword `model`."""
    argument = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP)]
    option = Annotated[str | None, typer.Option("--model", "-m", metavar="NAME", help="The same as MODEL.")]
    kind = inspect.Parameter.KEYWORD_ONLY
    flags = [
        inspect.Parameter("model_argument", kind, default=None, annotation=argument),
        inspect.Parameter("model", kind, default=None, annotation=option),
    ]

    def choose(values: dict[str, Any]) -> str:
        first, second = values["model_argument"], values["model"]
        if first is not None and second is not None and first != second:
            raise ChairliftError(f"MODEL is {first!r} and --model is {second!r}: give one of them")
        given = first if first is not None else second
        return default if given is None else str(given)

    return lambda command: _gather(command, flags, "model", choose)


def with_models(command: Command) -> Command:
    """Add the argument MODEL and the repeated flag --model to a command, which gets the keyword `model`: a list."""
    argument = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP)]
    option = Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="[NAME=]MODEL",
            help="The same as MODEL; repeat it as NAME=MODEL to serve several models, each with engines of its own "
            "and an equal share of memory.",
        ),
    ]
    kind = inspect.Parameter.KEYWORD_ONLY
    flags = [
        inspect.Parameter("model_argument", kind, default=None, annotation=argument),
        inspect.Parameter("model", kind, default=None, annotation=option),
    ]

    def choose(values: dict[str, Any]) -> list[str]:
        first, given = values["model_argument"], values["model"] or []
        if first is not None and given and [first] != given:
            raise ChairliftError(f"MODEL is {first!r} and --model is {', '.join(map(repr, given))}: give one of them")
        return [first] if first is not None else given or [DEFAULT_MODEL]

    return _gather(command, flags, "model", choose)


def with_settings(command: Command, groups: tuple[str, ...] = ("model", "cache", "scheduling")) -> Command:
    """Add a flag for each engine setting of these groups to a command, which gets them as the keyword `settings`.

    A flag that the command already has keeps its meaning: `--seed` of `run` is the seed of that answer.
    """
    taken = inspect.signature(command).parameters
    flags = []
    for group, found in options():
        if found.name in taken or group not in groups:
            continue
        kind = _kinds(group)[found.name]
        choices = found.metadata["choices"]
        if choices:
            kind = Literal[choices]
        flags.append(_parameter(found.name, kind, found.default, found.metadata["help"], f"{group.title()} settings"))
        if found.metadata.get("is_time"):
            flags[-1] = _timed(flags[-1])
    shown = inspect.Parameter("help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=HelpAll)

    def settings(values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name != "help_all"}

    return _gather(command, [*flags, shown], "settings", settings)


@functools.cache  # each command needs them, and evaluating them takes long
def _kinds(group: str) -> dict[str, Any]:
    """Return the types of a group's settings."""
    return get_type_hints(type(getattr(Settings(), group)))


def with_sampling(command: Command) -> Command:
    """Add the sampling flags to a command, which gets the given ones as the keyword `sampling`."""
    flags = [_parameter(flag.name, flag.kind, flag.default, flag.help, "Sampling") for flag in SAMPLING]
    return _gather(command, flags, "sampling", GivenSampling.of)


def _parameter(name: str, kind: Any, default: Any, help: str, panel: str) -> inspect.Parameter:
    dashed = name.replace("_", "-")
    is_switch = kind is bool or kind == bool | None
    names = [f"--{dashed}/--no-{dashed}"] if is_switch else [f"--{dashed}", *ALIASES.get(name, ())]
    shown = typer.Option(*names, help=help, rich_help_panel=panel, show_default=default not in (None, []))
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, shown])


def _timed(flag: inspect.Parameter) -> inspect.Parameter:
    """Make a flag accept a time with or without a unit."""
    _, shown = get_args(flag.annotation)
    shown.parser, shown.metavar = duration, "TIME"
    return flag.replace(annotation=Annotated[float | None, shown])


def duration(text: str | float) -> float:
    """Read seconds: a number, or a number with the unit ms or s.

    >>> duration("50ms"), duration("2s"), duration("0.5")
    (0.05, 2.0, 0.5)
    """
    if isinstance(text, float | int):
        return float(text)
    for unit, factor in (("ms", 1e-3), ("s", 1.0), ("", 1.0)):
        if text.endswith(unit):
            try:
                return float(text.removesuffix(unit)) * factor
            except ValueError:
                break
    raise typer.BadParameter(f"{text!r} is not a time: use 50ms, 2s, or a number of seconds")


def _gather(
    command: Command, flags: Iterable[inspect.Parameter], keyword: str, make: Callable[[dict[str, Any]], Any]
) -> Command:
    """Replace a command's keyword with flags in its signature; their values are passed to it as that keyword."""
    flags = list(flags)

    @functools.wraps(command)
    def gathered(**values: Any) -> Any:
        taken = {flag.name: values.pop(flag.name) for flag in flags}
        return command(**values, **{keyword: make(taken)})

    signature = inspect.signature(command, eval_str=True)
    own = [each for each in signature.parameters.values() if each.name != keyword]
    own = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]  # typer passes them by name
    parameters = [*flags, *own] if keyword == "model" else [*own, *flags]  # the help shows them in this order
    gathered.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    gathered.__annotations__ = {each.name: each.annotation for each in parameters}
    return gathered
