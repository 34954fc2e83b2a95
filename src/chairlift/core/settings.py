"""Settings: a small tree of frozen dataclasses that is at once the Python API, the command line and the config file.

Each has a sentence on when to change it; where there is none to write, we choose for the user.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Any

from chairlift.core.batching import GATES
from chairlift.core.errors import SettingsError
from chairlift.core.policy import POLICIES
from chairlift.core.preemption import PREEMPTIONS
from chairlift.core.prefill import PREFILL_MODES


def option(default: Any, help: str, choices: tuple[str, ...] = ()) -> Any:
    """A field with the sentence that tells a user when to change it."""
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Which model, where and how precise."""

    device: str = option("auto", "cpu, cuda or cuda:N; change it to leave the first GPU to others.")
    dtype: str = option(
        "auto",
        "float32 on a CPU and the model's own on a GPU; change it to trade accuracy for memory.",
        ("auto", "float32", "bfloat16", "float16"),
    )
    load_format: str = option(
        "auto",
        "dummy makes random weights from the config alone: to measure speed without a download.",
        ("auto", "dummy"),
    )
    max_length: int | None = option(
        None, "Longest sequence, prompt included (default: the model's own); lower it when memory is short."
    )
    seed: int = option(0, "Where the seeds of requests without one come from; change it for other draws.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """How the KV cache is cut and how large it is."""

    block_size: int = option(16, "Tokens in a KV block, a multiple of 16; larger wastes more at each sequence's end.")
    kv_tokens: int | None = option(
        None, "Tokens the KV cache holds (default: what memory allows); set it to bound memory or to test pressure."
    )
    memory_share: float | None = option(
        None,
        "Share of memory that may be used (default 0.9 of a GPU, half of free RAM); lower it to share the machine.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingSettings:
    """How requests share the steps."""

    max_sequences: int | None = option(
        None, "Sequences in the batch at once (default 64 on a CPU, 256 on a GPU); lower it for faster single answers."
    )
    step_tokens: int | None = option(
        None, "Tokens in one forward pass (default 512 on a CPU, 8192 on a GPU); lower it for smoother streaming."
    )
    policy: str = option("fcfs", "Who goes next; change it when some requests matter more.", tuple(POLICIES))
    batching: str = option("continuous", "When the batch takes new requests; others exist to compare.", tuple(GATES))
    prefill: str = option("chunked", "How prompts share a step with decodes.", tuple(PREFILL_MODES))
    preemption: str = option("recompute", "What a sequence that yields its memory loses.", tuple(PREEMPTIONS))
    overlap: bool | None = option(
        None, "Plan a step while the one before runs (default: on a GPU); turn it off to debug step by step."
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """All of them."""

    model: ModelSettings = ModelSettings()
    cache: CacheSettings = CacheSettings()
    scheduling: SchedulingSettings = SchedulingSettings()

    @staticmethod
    def of(**values: Any) -> Settings:
        """From flat names, as in `LLM(model, max_length=2048)`; None keeps the default.

        >>> Settings.of(block_size=32).cache.block_size
        32
        """
        unknown = values.keys() - {found.name for _, found in options()}
        if unknown:
            known = ", ".join(sorted(found.name for _, found in options()))
            raise SettingsError(f"unknown setting {', '.join(sorted(unknown))}: there are {known}")
        groups: dict[str, dict[str, Any]] = {}
        for group, found in options():
            value = values.get(found.name)
            if value is None:
                continue
            choices = found.metadata["choices"]
            if choices and value not in choices:
                raise SettingsError(f"{found.name} is {value!r}: use one of {', '.join(choices)}")
            groups.setdefault(group, {})[found.name] = value
        made = Settings(
            model=ModelSettings(**groups.get("model", {})),
            cache=CacheSettings(**groups.get("cache", {})),
            scheduling=SchedulingSettings(**groups.get("scheduling", {})),
        )
        made._check()
        return made

    def _check(self) -> None:
        if self.cache.block_size < 16 or self.cache.block_size % 16:
            raise SettingsError(f"block_size is {self.cache.block_size}: use a multiple of 16, such as 16 or 32")
        share = self.cache.memory_share
        if share is not None and not 0 < share <= 1:
            raise SettingsError(f"memory_share is {share}: use a share above 0 and up to 1")
        if self.cache.kv_tokens is not None and self.cache.kv_tokens < 1:
            raise SettingsError(f"kv_tokens is {self.cache.kv_tokens}: use 1 or more, or leave it out")
        if self.model.max_length is not None and self.model.max_length < 2:
            raise SettingsError(f"max_length is {self.model.max_length}: a prompt and an answer need at least 2 tokens")
        for name in ("max_sequences", "step_tokens"):
            value = getattr(self.scheduling, name)
            if value is not None and value < 1:
                raise SettingsError(f"{name} is {value}: use 1 or more, or leave it out")


def options() -> Iterator[tuple[str, Field[Any]]]:
    """Every setting with the group it belongs to."""
    for group, kind in (("model", ModelSettings), ("cache", CacheSettings), ("scheduling", SchedulingSettings)):
        for found in fields(kind):
            yield group, found
