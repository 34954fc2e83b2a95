"""`chairlift route`: one endpoint in front of several servers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from chairlift.commands.screen import notes


def route(
    urls: Annotated[list[str], typer.Argument(metavar="URL...", help="The servers, such as http://10.0.0.2:8000.")],
    routing: Annotated[
        Literal["cache-aware", "least-loaded", "session", "round-robin"],
        typer.Option(
            help="Which server gets a request: cache-aware (most of its prompt cached, least work), least-loaded, "
            "session (by X-Session-Id, prompt_cache_key or user), round-robin. Change it to compare."
        ),
    ] = "cache-aware",
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 opens the router to the network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes any free port.", min=0, max=65535)] = 8080,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            help="A TOML file of API keys (docs/keys.md), to hold tenants' limits for all servers together; keys are "
            "passed on in any case.",
            exists=False,
        ),
    ] = None,
    cluster_key: Annotated[
        Path | None,
        typer.Option(
            help="A file with the secret that the servers share, if some have --role prefill and others --role decode."
        ),
    ] = None,
    grace: Annotated[
        float, typer.Option(help="Seconds to finish running requests after SIGTERM; match your orchestrator's.")
    ] = 30.0,
    max_body_mb: Annotated[
        float, typer.Option(help="Largest request body in MiB; raise it for very long prompts.")
    ] = 8,
    tls_cert: Annotated[Path | None, typer.Option(help="A certificate chain file, to serve HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The private key file of --tls-cert.")] = None,
    log_format: Annotated[
        Literal["auto", "json", "words"], typer.Option(help="JSON lines, or words (default: words on a terminal).")
    ] = "auto",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(help="Lowest level that is logged; info has a line for every request."),
    ] = "info",
) -> None:
    """Serve one OpenAI-compatible endpoint in front of several servers."""
    from chairlift.core.errors import SettingsError
    from chairlift.gateway.run import GatewayPlan, run

    if (tls_cert is None) != (tls_key is None):
        raise SettingsError("--tls-cert and --tls-key go together: give both or neither")
    for file in (tls_cert, tls_key):
        if file is not None and not file.is_file():
            raise SettingsError(f"{file} does not exist: give existing files as --tls-cert and --tls-key")
    plan = GatewayPlan(
        urls=urls,
        routing=routing,
        host=host,
        port=port,
        keys=None if api_keys is None else str(api_keys),
        cluster_key=None if cluster_key is None else str(cluster_key),
        grace=grace,
        max_body=int(max_body_mb * (1 << 20)),
        certificate=None if tls_cert is None else str(tls_cert),
        private_key=None if tls_key is None else str(tls_key),
        log_format=log_format,
        log_level=log_level,
    )
    sys.exit(run(plan, lambda text: notes.print(text, markup=False)))
