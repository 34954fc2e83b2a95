"""What two engines in 16 bits said, and the float32 truth: numbers for a file, and a table for a reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rich.table import Table
from rich.text import Text

from chairlift.core.words import counted

Ids = list[int]
Summary = dict[str, Any]


@dataclass(slots=True)
class Scored:
    """What one model says at every place of all answers, one after the other."""

    logprobs: list[float] = field(default_factory=list)  # of the tokens that stand there
    likeliest: Ids = field(default_factory=list)
    agrees: list[bool] = field(default_factory=list)  # nothing is likelier than what stands there


@dataclass(frozen=True, slots=True)
class Side:
    """One engine in 16 bits."""

    answers: list[Ids]  # its own, greedy
    decoded: list[float]  # the log-probabilities of their tokens, as it decoded them
    forced: Scored  # along transformers' answers


@dataclass(frozen=True, slots=True)
class Truth:
    """Transformers in float32, with the weights that both sides have."""

    along_ours: Scored
    along_theirs: Scored


def summarize(ours: Side, theirs: Side, truth: Truth) -> Summary:
    """All numbers; an error is the distance of a token's log-probability from float32's."""
    found = {
        "ours": _numbers(ours, truth.along_ours, truth.along_theirs),
        "theirs": _numbers(theirs, truth.along_theirs, truth.along_theirs),
    }
    pairs = list(zip(ours.answers, theirs.answers, strict=True))
    common = [_common(one, other) for one, other in pairs]
    return {
        **found,
        "same_answers": sum(one == other for one, other in pairs),
        "same_tokens": sum(common) / sum(len(other) for _, other in pairs),
        "ratio": {
            name: found["ours"][name] / found["theirs"][name]
            for name in ("forced_error_mean", "forced_error_max", "decoded_error_mean", "decoded_error_max")
            if found["theirs"][name]
        },
    }


def _numbers(side: Side, along_own: Scored, along_theirs: Scored) -> Summary:
    forced = _distances(side.forced.logprobs, along_theirs.logprobs)
    decoded = _distances(side.decoded, along_own.logprobs)
    pairs = zip(side.forced.likeliest, along_theirs.likeliest, strict=True)
    return {
        "agrees": fmean(side.forced.agrees),
        "as_float32": fmean(one == other for one, other in pairs),
        "forced_error_mean": fmean(forced),
        "forced_error_max": max(forced),
        "decoded_error_mean": fmean(decoded),
        "decoded_error_max": max(decoded),
    }


def _distances(some: Sequence[float], others: Sequence[float]) -> list[float]:
    return [abs(one - other) for one, other in zip(some, others, strict=True)]


def _common(one: Ids, other: Ids) -> int:
    """Tokens before two answers part."""
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(other))


def table(summary: Summary) -> Table:
    """Ours beside theirs; for errors, the ratio too."""
    ours, theirs, ratio = summary["ours"], summary["theirs"], summary["ratio"]
    weights = ", random weights" if summary["has_random_weights"] else ""
    shown = Table(
        title=Text(
            f"{summary['model']}{weights}, {summary['dtype']} on {summary['device']}:\n"
            f"{counted(summary['prompts'], 'prompt')} of {counted(summary['prompt_tokens'], 'token')}, "
            f"greedy answers of {summary['tokens']:,}"
        ),
        title_justify="left",
        caption=Text(
            f"transformers {summary['transformers']}; errors are distances of log-probabilities\n"
            "from its own in float32 with the same weights; a ratio is\n"
            "ours / theirs: about 1 when we lose what 16 bits lose"
        ),
        caption_justify="left",
    )
    shown.add_column("")
    for column in ("chairlift", "transformers", "ratio"):
        shown.add_column(column, justify="right", no_wrap=True)

    def shares(label: str, name: str) -> None:
        shown.add_row(label, f"{ours[name]:.2%}", f"{theirs[name]:.2%}", "")

    def errors(label: str, name: str) -> None:
        shown.add_row(label, f"{ours[name]:.5f}", f"{theirs[name]:.5f}", f"{ratio[name]:.2f}x" if name in ratio else "")

    shown.add_row("each answers by itself", "", "", "", style="bold")
    shown.add_row("  the same answer to the end", f"{summary['same_answers']} of {summary['prompts']}", "", "")
    shown.add_row("  tokens before answers part", f"{summary['same_tokens']:.2%}", "", "")
    errors("  error as decoded, mean", "decoded_error_mean")
    errors("  error as decoded, largest", "decoded_error_max")
    shown.add_section()
    shown.add_row("led along transformers' answers", "", "", "", style="bold")
    shares("  nothing likelier than its token", "agrees")
    shares("  likeliest token as in float32", "as_float32")
    errors("  error, mean", "forced_error_mean")
    errors("  error, largest", "forced_error_max")
    return shown
