"""`chairlift serve`: the OpenAI-compatible server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from chairlift.commands.options import with_models, with_settings
from chairlift.commands.screen import begin_loading, notes


@with_settings
@with_models
def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 opens the server to the network: set API keys then.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes any free port.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in the API (default: as given).")
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            help="Engines of each model, with equal shares of memory; one per GPU where there are several. Raise it to "
            "serve from more GPUs, or when one engine cannot use all cores. With --on ray also a range such as 1..3: "
            "the number then follows the queue.",
            metavar="N",
            show_default="1",
        ),
    ] = None,
    on: Annotated[
        Literal["ray"] | None,
        typer.Option(
            help="Run the replicas on the Ray cluster that `ray status` shows, or one started here (docs/cluster.md); "
            "needs pip install 'chairlift[ray]'. Use it for replicas on several machines."
        ),
    ] = None,
    replica_cpus: Annotated[
        float,
        typer.Option(
            help="CPU cores of a replica on a Ray cluster without GPUs. Raise it when an answer is too slow for one "
            "core.",
            min=0.1,
        ),
    ] = 1.0,
    role: Annotated[
        str,
        typer.Option(
            help="Compute prompts and answers in different engines, so that a long prompt does not slow answers down: "
            "how many engines for each, such as prefill=1,decode=2 (docs/cluster.md); engines of both=N are in both "
            "pools. prefill or decode alone is for a server behind chairlift route. Use it when long prompts and "
            "steady streams share a server.",
            metavar="ROLES",
        ),
    ] = "both",
    kv_listen: Annotated[
        str | None,
        typer.Option(
            help="Address where a server of --role decode receives KV from other hosts; on a private network: it is "
            "authenticated, not encrypted.",
            metavar="HOST:PORT",
        ),
    ] = None,
    cluster_key: Annotated[
        Path | None,
        typer.Option(help="A file with the secret that servers of one cluster share, for --role prefill or decode."),
    ] = None,
    kv_store: Annotated[
        str | None,
        typer.Option(
            help="A Redis or Valkey server for evicted KV, such as redis://:PASSWORD@HOST:6379, which replicas that "
            "name it share (docs/cluster.md). Use it when prompts return after they were evicted, or at another "
            "replica.",
            metavar="URL",
        ),
    ] = None,
    routing: Annotated[
        Literal["cache-aware", "least-loaded", "session", "round-robin"],
        typer.Option(
            help="Which replica gets a request: cache-aware (most of its prompt cached, least work), least-loaded, "
            "session (by X-Session-Id, prompt_cache_key or user), round-robin. Change it to compare."
        ),
    ] = "cache-aware",
    rank_placement: Annotated[
        Literal["node", "pack", "spread"],
        typer.Option(
            help="Where the ranks of --tensor-parallel run with --on ray: node (all of a replica on one node), pack "
            "(on as few nodes as possible), spread (each on its own, if there are enough). Change it when no node has "
            "enough GPUs."
        ),
    ] = "node",
    queued_tokens: Annotated[
        int,
        typer.Option(
            help="Prompt tokens that wait at each replica before another is started, with a range of --replicas. Lower "
            "it for a shorter wait, raise it to run fewer replicas.",
            min=1,
        ),
    ] = 8192,
    api_keys: Annotated[
        Path | None,
        typer.Option(help="A TOML file of API keys (docs/keys.md); also read from CHAIRLIFT_API_KEYS.", exists=False),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="An administrator's key that clients must send. Every user of this machine can see it in ps: use "
            "--api-keys where that matters.",
            metavar="KEY",
        ),
    ] = None,
    api_workers: Annotated[
        int, typer.Option(help="HTTP processes; raise it when one core cannot write all streams.", min=1, max=64)
    ] = 1,
    max_waiting: Annotated[
        int,
        typer.Option(
            help="Requests that may wait for a first token; further ones get 429. Raise it for bursts of jobs.", min=1
        ),
    ] = 4096,
    max_waiting_tokens: Annotated[
        int | None,
        typer.Option(
            help="Prompt tokens that may wait (default: a million, or the KV cache if it is larger). Lower it when "
            "memory is short.",
            min=1,
        ),
    ] = None,
    max_wait: Annotated[
        float,
        typer.Option(
            help="Longest predicted wait for a first token in seconds; requests beyond it get 429. Lower it to your "
            "latency target, raise it for clients that prefer to wait."
        ),
    ] = 60.0,
    request_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds until a request without a timeout of its own is aborted (default: none)."),
    ] = None,
    grace: Annotated[
        float, typer.Option(help="Seconds to finish running requests after SIGTERM; match your orchestrator's.")
    ] = 30.0,
    max_body_mb: Annotated[
        float, typer.Option(help="Largest request body in MiB; raise it for very long prompts.")
    ] = 8,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="A web origin that may call this server; repeatable, * for all.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="A certificate chain file, to serve HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The private key file of --tls-cert.")] = None,
    tool_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model writes tool calls, for a chat template that is not recognised (docs/structured.md)."
        ),
    ] = None,
    metrics_compat: Annotated[
        Literal["vllm"] | None, typer.Option(help="Also expose metrics under vLLM's names, for existing dashboards.")
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(help="URL that receives OpenTelemetry traces over HTTP; needs pip install 'chairlift[otel]'."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Append a line for every request to this file, for chairlift simulate and plan: its time, lengths, "
            "tenant and prompt blocks, the last two hashed with a random key; never content. Use it to plan hardware "
            "for your own traffic.",
            metavar="FILE",
        ),
    ] = None,
    ui: Annotated[
        bool,
        typer.Option(
            "--ui/--no-ui", help="Serve the live page at / (docs/page.md); turn it off to serve the API alone."
        ),
    ] = True,
    ui_prompts: Annotated[
        bool,
        typer.Option(
            "--ui-prompts", help="Let the live page show the end of each prompt; set it where its readers may."
        ),
    ] = False,
    log_format: Annotated[
        Literal["auto", "json", "words"], typer.Option(help="JSON lines, or words (default: words on a terminal).")
    ] = "auto",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(help="Lowest level that is logged; info has a line for every request."),
    ] = "info",
    *,
    model: list[str],
    settings: dict[str, Any],
) -> None:
    """Serve a model, or several, over an OpenAI-compatible API."""
    from chairlift.cluster.kv_store.resp import Address
    from chairlift.cluster.kv_transfer.wire import read_key
    from chairlift.core.errors import SettingsError
    from chairlift.core.settings import Settings
    from chairlift.routing.pools import roles_of
    from chairlift.routing.scaling import read_counts
    from chairlift.serving.keys import digest_of
    from chairlift.serving.recording import prepare
    from chairlift.text.parsers import DIALECTS

    chosen = Settings.of(**settings)  # rejects a wrong value before a process is started
    if chosen.scheduling.batching == "static":
        raise SettingsError(
            "--batching static waits until the batch is full, which may never happen in a server: use --batching "
            "dynamic, which waits for --batch-window at most"
        )
    if (tls_cert is None) != (tls_key is None):
        raise SettingsError("--tls-cert and --tls-key go together: give both or neither")
    for file in (tls_cert, tls_key):
        if file is not None and not file.is_file():
            raise SettingsError(f"{file} does not exist: give existing files as --tls-cert and --tls-key")
    if not max_wait > 0:
        raise SettingsError(f"--max-wait is {max_wait:g}: use seconds above 0")
    if request_timeout is not None and request_timeout <= 0:
        raise SettingsError(f"--request-timeout is {request_timeout}: use seconds above 0, or leave it out")
    if tool_parser is not None and tool_parser not in DIALECTS:
        raise SettingsError(f"--tool-parser is {tool_parser}: use one of {', '.join(DIALECTS)}")
    least, most = read_counts(replicas)
    if on is None and least != most:
        raise SettingsError(f"--replicas is {replicas}: a range needs --on ray; use one number")
    roles = roles_of(role, most)
    if on == "ray":
        from chairlift.cluster.ray.connect import check_installed

        check_installed()
        refused = {"--role": role != "both", "--record": record is not None, "--api-workers": api_workers > 1}
        for flag in (name for name, is_set in refused.items() if is_set):
            raise SettingsError(f"{flag} does not work with --on ray yet: leave one of them out")
        if rank_placement != "node" and len(model) > 1:
            raise SettingsError("--rank-placement is for a server with one model: start one for each")
    if role in ("prefill", "decode") and cluster_key is None:
        raise SettingsError(f"--role {role} is for a server behind a router: give both the same --cluster-key")
    if (role == "decode") != (kv_listen is not None):
        raise SettingsError("--role decode needs --kv-listen HOST:PORT, and only it does")
    if kv_listen is not None and (len(roles) > 1 or len(model) > 1):
        raise SettingsError("--role decode is for a server with one engine: start one server for each")
    if cluster_key is not None:
        read_key(cluster_key)
    if kv_store is not None:
        Address.of(kv_store)  # rejects a wrong URL before loading
    if record is not None:
        prepare(record)
    digest = None if api_key is None else digest_of(api_key)  # rejects an invalid key before loading
    models = named_models(model, served_model_name)
    if on is None:
        for each in models.values():
            begin_loading(each, settings, is_told=True)
    else:  # the nodes load them; they have other working folders
        models = {name: str(Path(each).absolute()) if Path(each).exists() else each for name, each in models.items()}
    from chairlift.serving.plan import ModelPlan, Plan
    from chairlift.serving.server import run

    plan = Plan(
        models=[ModelPlan(name, each) for name, each in models.items()],
        replicas=len(roles) if on is None else 1,
        roles=roles if len(set(roles)) > 1 else [],
        role=roles[0] if len(set(roles)) == 1 else "both",
        receives_at="" if kv_listen is None else f"tcp:{kv_listen}",
        cluster_key=None if cluster_key is None else str(cluster_key),
        routing=routing,
        kv_store=kv_store,
        settings={name: value for name, value in settings.items() if value is not None},
        host=host,
        port=port,
        workers=api_workers,
        max_waiting=max_waiting,
        max_waiting_tokens=max_waiting_tokens,
        max_wait=max_wait,
        timeout=request_timeout,
        grace=grace,
        max_body=int(max_body_mb * (1 << 20)),
        keys=None if api_keys is None else str(api_keys),
        key_digest=digest,
        origins=cors_origin or [],
        certificate=None if tls_cert is None else str(tls_cert),
        private_key=None if tls_key is None else str(tls_key),
        tool_parser=tool_parser,
        metrics_compat=metrics_compat,
        otlp_endpoint=otlp_endpoint,
        record=None if record is None else str(record.absolute()),
        ui=ui,
        ui_prompts=ui_prompts,
        log_format=log_format,
        log_level=log_level,
    )

    def say(text: str) -> None:
        notes.print(text, markup=False)

    if on == "ray":
        from chairlift.cluster.ray import serve as on_ray

        sys.exit(
            on_ray.run(plan, on_ray.RayPlan(least or 1, most or 1, replica_cpus, rank_placement, queued_tokens), say)
        )
    sys.exit(run(plan, say))


def named_models(given: list[str], served_name: str | None = None) -> dict[str, str]:
    """Return where each model is, by its name in the API.

    >>> named_models(["small=org/a", "large=org/b"]), named_models(["org/a"], "a")
    ({'small': 'org/a', 'large': 'org/b'}, {'a': 'org/a'})
    """
    from chairlift.core.errors import SettingsError

    found: dict[str, str] = {}
    for text in given:
        name, _, where = text.partition("=")
        if not name or not where or Path(text).exists():  # a file's name may have an equals sign
            name, where = text, text
        if name in found:
            raise SettingsError(f"two models have the name {name!r}: give each its own with --model NAME=MODEL")
        found[name] = where
    if served_name is None:
        return found
    if len(found) > 1:
        raise SettingsError("--served-model-name names one model: name several with --model NAME=MODEL")
    return {served_name: next(iter(found.values()))}
