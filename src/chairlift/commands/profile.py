"""`chairlift profile`: the machine's measured speeds and a model's step times, as tables and JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chairlift.commands.options import DEFAULT_MODEL
from chairlift.commands.reports import check_files, show, write_numbers
from chairlift.commands.screen import notes
from chairlift.core.words import counted

if TYPE_CHECKING:
    from rich.table import Table

    from chairlift.costs.fit import Fit
    from chairlift.costs.machine import Machine


_SHOWN = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # tokens of a step


def profile(
    shape: Annotated[
        str,
        typer.Option(help="A model's shape: qwen3-0.6b, llama-3.1-8b, ..., or a folder with a config.json."),
    ] = DEFAULT_MODEL,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="The file to write (default: profile.json beside the downloaded models).")
    ] = None,
) -> None:
    """Measure this machine: memory bandwidth, matrix products, kernel launches, copies, and a model's step times.

    The weights are random; nothing is downloaded. `chairlift simulate --hardware FILE` uses the step times.
    """
    from chairlift.bench.fidelity import calibrate, hardware_of
    from chairlift.core.settings import Settings
    from chairlift.costs.machine import measure_machine
    from chairlift.execution.build import assemble, load_model
    from chairlift.models.sources import cache_folder

    file = out or cache_folder().parent / "profile.json"
    if out is None:
        file.parent.mkdir(parents=True, exist_ok=True)
    check_files(file)
    settings = Settings.of(load_format="dummy", device=device, dtype=dtype)
    loaded = load_model(shape, settings)
    with notes.status("measuring") as status:
        machine = measure_machine(loaded.decoder, lambda doing: status.update(f"measuring: {doing}"))
        built = assemble(loaded, settings, progress=False)
        fitted = calibrate(built, lambda doing: status.update(f"measuring: {doing}"))
    hardware = hardware_of(built, fitted).plain()
    write_numbers(file, {"shape": shape, **asdict(machine), "hardware": hardware, "fit": asdict(fitted)})
    for table in tables(machine, shape):
        show(table)
    show(fit_table(fitted, shape))
    notes.print(f"written to {file}", style="dim", markup=False)


def fit_table(found: Fit, shape: str) -> Table:
    """Return the table of the fitted cost model."""
    from chairlift.report.numbers import scaled
    from chairlift.report.tables import table

    cost = found.cost
    rows = [
        ("fixed", scaled(cost.fixed, "s")),
        ("reading the weights", scaled(cost.weights, "s")),
        ("each token", scaled(cost.token, "s")),
        ("a thousand cached tokens read by decodes", scaled(1000 * cost.context, "s")),
        ("a thousand pairs of prompt tokens", scaled(1000 * cost.pair, "s")),
        ("each sampled token", scaled(cost.sample, "s")),
        ("each part of a prompt", scaled(cost.prompt, "s")),
        ("the first step of an idle engine, more", scaled(found.wake, "s")),
        *(
            (f"{counted(int(tokens), 'token')}, by the curve", scaled(cost.fixed + seconds, "s"))
            for tokens, seconds in cost.curve
            if tokens in _SHOWN
        ),
        ("error on held-out steps, median and p90", f"{found.median_error:.1%}, {found.p90_error:.1%}"),
        ("error of their sum", f"{found.bias:+.1%}"),
    ]
    return table(
        f"{shape}: a step's time, fitted to {counted(found.steps, 'step')}",
        ("", ""),
        rows,
        is_centered=True,
        has_header=False,
    )


def tables(machine: Machine, shape: str) -> list[Table]:
    """Return the table of the machine's speeds and the table of its matrix products."""
    from chairlift.report.numbers import scaled
    from chairlift.report.tables import table

    facts: list[tuple[str, str] | None] = [
        ("reads memory at", scaled(machine.rates.read_bytes_s, "B/s")),
        ("multiplies large matrices at", scaled(machine.rates.flops_s, "FLOP/s")),
    ]
    for label, value, unit in (
        ("copies to the device at", machine.to_device_bytes_s, "B/s"),
        ("copies to the host at", machine.to_host_bytes_s, "B/s"),
        ("launches a kernel in", machine.launch_s, "s"),
    ):
        if value is not None:
            facts.append((label, scaled(value, unit)))
    if machine.cost is not None:
        cost = machine.cost
        facts += [
            None,
            (f"fixed time of a step of {shape}", scaled(cost.fixed + cost.weights, "s")),
            ("each token of a large step", scaled(cost.token, "s")),
            ("a thousand cached tokens read by decodes", scaled(1000 * cost.context, "s")),
            ("copying a KV block to the host", scaled(cost.block_copy, "s")),
        ]
    rates = {(each.matrix, each.rows): each.flops_s for each in machine.products}
    rows = sorted({each.rows for each in machine.products})
    products = [
        (
            f"{each.matrix} {each.outputs:,} x {each.inputs:,}",
            *(scaled(rates[each.matrix, count], "") if (each.matrix, count) in rates else "" for count in rows),
        )
        for each in {each.matrix: each for each in machine.products}.values()
    ]
    head = f"{machine.device}, {machine.dtype}, {counted(machine.threads, 'thread')}"
    columns = ("matrix", *(f"{count:,}" for count in rows))
    return [
        table(head, ("", ""), facts, is_centered=True, has_header=False),
        table(f"{shape}: FLOP/s of a product by number of rows", columns, products, is_centered=True),
    ]
