"""Plan: the settings of the server, from the command line."""

from __future__ import annotations

from typing import Any

import msgspec

from chairlift.cluster.tensor_parallel.remote import Remote
from chairlift.core.settings import SchedulingSettings, Settings
from chairlift.routing.pools import Role


class ModelPlan(msgspec.Struct, frozen=True):
    """A model to serve: its name in the API, and where it is."""

    name: str
    model: str


class EnginePlan(msgspec.Struct, frozen=True):
    """One engine process: a replica of a model."""

    place: int  # among all engines of the server
    model: ModelPlan
    replica: int
    role: Role = "both"

    @property
    def name(self) -> str:
        """A name that no other engine and no tenant has: a tenant's name has no slash."""
        return f"{self.place}/{self.replica}"


class Plan(msgspec.Struct, frozen=True):
    """The settings of the server, from the command line; passed to further HTTP processes as JSON."""

    models: list[ModelPlan]
    settings: dict[str, Any]
    replicas: int = 1  # engines of each model
    roles: list[Role] = []  # of each replica, if prompts and answers are computed apart
    role: Role = "both"  # of the whole server, for a router in front of it
    receives_at: str = ""  # address for KV blocks from other hosts
    cluster_key: str | None = None  # file with the key of connections between hosts
    tells_load: bool = False  # whether the reply of /ready has the load, for a gateway that starts and ends servers
    kv_store: str | None = None  # URL of a Redis server that keeps evicted blocks
    remote: Remote | None = None  # the ranks of its engine on other hosts
    routing: str = "cache-aware"
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    max_waiting: int = 4096
    max_waiting_tokens: int | None = None
    max_wait: float = 60.0
    timeout: float | None = None
    grace: float = 30.0
    max_body: int = 8 << 20
    keys: str | None = None
    key_digest: str | None = None  # sha256 of --api-key
    origins: list[str] = []
    certificate: str | None = None
    private_key: str | None = None
    tool_parser: str | None = None
    metrics_compat: str | None = None
    otlp_endpoint: str | None = None
    record: str | None = None  # file that gets a line for every request, for simulations
    ui: bool = True  # serve the live page
    ui_prompts: bool = False  # let it show the ends of prompts
    log_format: str = "auto"
    log_level: str = "info"
    engine_command: list[str] | None = None
    folder: str = ""  # of the sockets; created at start

    @property
    def scheduling(self) -> SchedulingSettings:
        """The scheduling settings."""
        return Settings.of(**self.settings).scheduling

    @property
    def sampling(self) -> str:
        """The source of sampling values that a request leaves out."""
        return Settings.of(**self.settings).model.generation_config

    @property
    def engines(self) -> list[EnginePlan]:
        """All engine processes, those of the first model first."""
        pairs = [(model, replica) for model in self.models for replica in range(self.replicas)]
        roles = self.roles or ["both"] * self.replicas
        return [EnginePlan(place, model, replica, roles[replica]) for place, (model, replica) in enumerate(pairs)]

    def kv_address_of(self, engine: EnginePlan) -> str:
        """Return where an engine receives KV blocks of other engines of this server."""
        return f"unix:{self.folder}/kv-{engine.place}"

    def socket_of(self, worker: int, engine: EnginePlan) -> str:
        """Return the address of an HTTP process's socket for an engine."""
        return f"ipc://{self.folder}/http-{worker}-{engine.place}"
