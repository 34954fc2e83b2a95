"""The traffic of simulations: a recording or drawn requests, as the flags of `simulate` and `plan` describe them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chairlift.core.errors import ChairliftError

if TYPE_CHECKING:
    from chairlift.traffic.query import Query

Trace = Annotated[
    str,
    typer.Argument(
        help="A recording (JSONL of chairlift serve --record, or JSONL or CSV as Azure, Mooncake or BurstGPT publish "
        "them), or drawn requests: uniform, lognormal, groups, chats, a mix such as chats*3+uniform, tenants, flood, "
        "uniform256, ... (docs/simulation.md)."
    ),
]
Rate = Annotated[
    str | None,
    typer.Option(help="Requests per second, or x2 for twice the trace's own rate; inf: all at once."),
]
Arrivals = Annotated[
    str,
    typer.Option(help="Send times of drawn requests: poisson, constant, burst, or diurnal, which follows the day."),
]
Duration = Annotated[float | None, typer.Option(help="Seconds to send for; later requests are left out.", min=0)]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in the order of their times, and their number if it is known before they are drawn."""

    queries: Iterable[Query]
    count: int | None


def read_traffic(
    trace: str,
    rate: str | None = None,
    requests: int | None = None,
    prompt_tokens: str = "16..256",
    output_tokens: str = "16..256",
    seed: int = 0,
    arrivals: str = "poisson",
    burstiness: float | None = None,
    duration: float | None = None,
) -> Traffic:
    """Return the requests of a recording, a mix or a generator, at the rate asked for."""
    from chairlift.traffic.arrivals import Demand
    from chairlift.traffic.generators import is_generator
    from chairlift.traffic.mixes import make
    from chairlift.traffic.workloads import Lengths

    factor, number = read_rate(rate)
    if Path(trace).suffix.lower() in (".csv", ".jsonl", ".json"):
        if arrivals != "poisson" or burstiness is not None:
            raise ChairliftError(f"--arrivals and --burstiness are for drawn requests, and {trace} has its own times")
        return _recorded(Path(trace), factor, number, requests, duration)
    if factor:
        raise ChairliftError(f"--rate {rate} multiplies a recording's rate, and {trace} is drawn: give a number")
    lengths = Lengths.parse(prompt_tokens), Lengths.parse(output_tokens)
    demand = Demand(trace, requests, *lengths, seed, arrivals, number, burstiness, duration)
    if not is_generator(trace):
        drawn = make(demand).queries
        return _some(drawn, len(drawn))
    expected = demand.count
    if expected is None and number is not None and duration is not None:
        expected = round(number * duration)
    return _some(demand.stream(), expected)


def _recorded(
    path: Path, factor: float | None, rate: float | None, requests: int | None, duration: float | None
) -> Traffic:
    from chairlift.traffic.arrivals import at_rate
    from chairlift.traffic.traces import read_trace

    found = read_trace(path)[:requests]
    found = [replace(each, at=each.at / factor) for each in found] if factor else at_rate(found, rate)
    if duration is not None:
        found = [each for each in found if each.at < duration]
    return _some(found, len(found))


def _some(queries: Iterable[Query], count: int | None) -> Traffic:
    """Return requests, of which there must be one."""
    found = iter(queries)
    first = next(found, None)
    if first is None:
        raise ChairliftError("there is no request to simulate: give a longer --duration")
    return Traffic(chain((first,), found), count)


def read_rate(text: str | None) -> tuple[float | None, float | None]:
    """Read a rate as (factor, None) or (None, requests per second).

    >>> read_rate("x2"), read_rate("0.5"), read_rate(None)
    ((2.0, None), (None, 0.5), (None, None))
    """
    if text is None:
        return None, None
    try:
        number = float(text.removeprefix("x"))
    except ValueError:
        number = 0.0
    if not number > 0:
        raise ChairliftError(f"--rate is {text!r}: use requests per second such as 20, or x2 for twice the trace's own")
    return (number, None) if text.startswith("x") else (None, number)
