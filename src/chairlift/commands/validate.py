"""`chairlift validate`: the same requests on the real engine and in the simulator, and the simulator's error."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.commands.options import with_model, with_settings
from chairlift.commands.reports import (
    JsonFile,
    OutputTokens,
    PromptTokens,
    TrafficSeed,
    check_files,
    choose_shape,
    show,
    write_numbers,
)
from chairlift.commands.screen import notes
from chairlift.core.errors import ChairliftError

if TYPE_CHECKING:
    from chairlift.traffic.query import Query


@with_settings
@with_model("")
def validate(
    shape: Annotated[
        str | None, typer.Option(help="A model's shape with random weights, such as smollm2-135m, in place of --model.")
    ] = None,
    workload: Annotated[str, typer.Option(help="The requests: uniform, lognormal, uniform256, ...")] = "lognormal",
    requests: Annotated[int | None, typer.Option(help="Number of requests.", min=1)] = None,
    prompt_tokens: PromptTokens = "16..256",
    output_tokens: OutputTokens = "16..256",
    load: Annotated[
        list[float] | None,
        typer.Option(help="Arrivals as a share of what the machine can serve; repeatable (default: 0.5 and 0.85)."),
    ] = None,
    rate: Annotated[
        list[float] | None, typer.Option(help="Requests per second in place of --load; repeatable; inf: all at once.")
    ] = None,
    workload_seed: TrafficSeed = 1,
    json_file: JsonFile = None,
    *,
    model: str,
    settings: dict[str, Any],
) -> None:
    """Measure how near a simulation is to the real engine.

    The cost model is fitted to steps of other requests. Arrivals are Poisson; the engine runs in this process.
    """
    from dataclasses import asdict

    from chairlift.bench import drive, fidelity
    from chairlift.commands.profile import fit_table
    from chairlift.core.settings import Settings
    from chairlift.execution.build import assemble, choose_limits, load_model
    from chairlift.report.tables import table
    from chairlift.traffic.arrivals import Demand
    from chairlift.traffic.workloads import Lengths

    check_files(json_file)
    name = choose_shape(shape, model, settings)
    chosen = Settings.of(**settings)
    lengths = Lengths.parse(prompt_tokens), Lengths.parse(output_tokens)
    wrong = next((share for share in load or () if not 0 < share < inf), None)
    if wrong is not None:
        raise ChairliftError(f"--load is {wrong:g}: use a share of the machine's capacity above 0, such as 0.5")

    def queries(per_second: float, size: int | None = None) -> list[Query]:
        asked = Demand(workload, requests, *lengths, seed=workload_seed, rate=per_second, vocab_size=size)
        return asked.queries()

    for each in rate or (1.0,):  # wrong ones are refused now, before anything is loaded
        if any(isinstance(query.prompt, str) for query in queries(each)):
            raise ChairliftError(f"{workload} has prompts as text, which are not encoded here: give prompt_tokens")
    loaded = load_model(name, chosen)
    size = loaded.config.vocab_size
    drive.check(fidelity.online(queries(1.0, size)), choose_limits(loaded.config, chosen, loaded.device))

    with notes.status("measuring") as status:
        built = assemble(loaded, chosen, progress=False)
        fitted = fidelity.calibrate(built, lambda doing: status.update(f"measuring: {doing}"))
        hardware = fidelity.hardware_of(built, fitted)
        del built
        rates = rate or []
        if not rates:
            most = fidelity.capacity(hardware, settings, queries(1.0, size))
            rates = [share * most for share in load or (0.5, 0.85)]
        found = []
        for each in rates:
            status.update(f"running at {each:.2f} a second")
            real = fidelity.run_real(loaded, settings, queries(each, size))
            found.append((each, fidelity.compare(real, hardware, settings)))
    show(fit_table(fitted, name))
    for each, compared in found:
        rows = [(one.name, f"{one.real:,.1f}", f"{one.simulated:,.1f}", f"{one.error:+.1%}") for one in compared]
        arrivals = "all requests at once" if each == inf else f"{each:.2f} a second"
        show(table(f"{name}, {workload}, {arrivals}", ("", "measured", "simulated", "error"), rows, is_centered=True))
    numbers = [{"rate": each, "compared": [asdict(one) for one in compared]} for each, compared in found]
    write_numbers(json_file, {"model": name, "fit": asdict(fitted), "runs": numbers})
