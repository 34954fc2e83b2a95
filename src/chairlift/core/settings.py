"""Settings: a small tree of frozen dataclasses that is at once the Python API, the command line and the config file.

Each has a sentence on when to change it; where there is none to write, we choose for the user.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from math import inf
from typing import Any

from chairlift.core.batching import GATES
from chairlift.core.errors import SettingsError
from chairlift.core.policies import POLICIES
from chairlift.core.predictor import PREDICTORS
from chairlift.core.preemption import PREEMPTIONS
from chairlift.core.prefill import PREFILL_MODES
from chairlift.core.vllm_names import setting_hint


def option(default: Any, help: str, choices: tuple[str, ...] = ()) -> Any:
    """A field with the sentence that tells a user when to change it."""
    return field(default=default, metadata={"help": help, "choices": choices})


def seconds(default: float | None, help: str) -> Any:
    """A field in seconds, which the command line also takes as 50ms or 2s."""
    return field(default=default, metadata={"help": help, "choices": (), "is_time": True})


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
    generation_config: str = option(
        "auto",
        "Sampling values for requests that name none: auto takes the model's own (generation_config.json, or what is "
        "published for its family), none samples at temperature 1; set none to compare with other engines.",
        ("auto", "none"),
    )
    seed: int = option(0, "Where the seeds of requests without one come from; change it for other draws.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """How the KV cache is cut and how large it is."""

    block_size: int | None = option(
        None,
        "Tokens in a KV block, a multiple of 16 (default 16 on a CPU, 32 on a GPU); larger costs the host less and "
        "wastes more at each sequence's end.",
    )
    kv_tokens: int | None = option(
        None, "Tokens the KV cache holds (default: what memory allows); set it to bound memory or to test pressure."
    )
    kv_dtype: str = option(
        "auto",
        "What keys and values are kept as: the model's dtype, or 8 bits with a scale per token and head; change it "
        "when memory bounds the batch or the context: 8 bits hold twice the tokens of 16, a little less exactly.",
        ("auto", "int8", "fp8"),
    )
    memory_share: float | None = option(
        None,
        "Share of memory that may be used (default 0.9 of a GPU, half of free RAM); lower it to share the machine.",
    )
    prefix_cache: bool = option(
        True,
        "Keep what prompts and answers have in common with later ones (not for models that see a sliding window only); "
        "turn it off to measure without it.",
    )
    shared_reads: bool = option(
        True,
        "On a GPU, let sequences that begin alike read what they share once in each step; turn it off to measure "
        "without it.",
    )
    host_tokens: int | None = option(
        None,
        "Tokens kept in host memory: cached ones that had to make room, and those of sequences that swap has preempted "
        "(default: on a GPU, or with swap, within a quarter of free RAM); raise it when what returns was gone; 0 keeps "
        "none.",
    )
    disk_cache: str | None = option(
        None, "A folder on a fast disk for cached tokens that host memory has no room for; set it for long sessions."
    )
    disk_tokens: int | None = option(
        None, "Tokens that go to disk_cache (default: four times those in host memory); set it to bound the file."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingSettings:
    """How requests share the steps."""

    max_sequences: int | None = option(
        None, "Sequences in the batch at once (default 64 on a CPU, 256 on a GPU); lower it for faster single answers."
    )
    step_tokens: int | None = option(
        None, "Tokens in one forward pass (default 256 on a CPU, 8192 on a GPU); lower it for smoother streaming."
    )
    target_tpot: float | None = seconds(
        None, "Longest step, such as 50ms, in place of a number of tokens; set it to promise a speed of streaming."
    )
    policy: str = option(
        "fcfs",
        "Who goes next: fcfs; priority (higher first, low ones may starve unless they age); sjf (shortest predicted "
        "answer first); multibin (by bins of predicted length); fair (tenants alike); deadline (earliest first); "
        "longest-prefix (most in the prefix cache first). "
        "Nobody starves under the others.",
        tuple(POLICIES),
    )
    aging: float | None = option(
        None,
        "What a second of waiting is worth: predicted tokens for sjf (default 1), cached tokens for longest-prefix "
        "(default 1000), levels for priority (default 0: strict); raise it to bound waiting more tightly.",
    )
    predictor: str = option(
        "history",
        "How sjf, multibin and fair guess the length of an answer: from past ones, or from max_tokens; oracle is for "
        "experiments.",
        tuple(PREDICTORS),
    )
    batching: str = option(
        "continuous",
        "When the batch takes new requests: at every step; dynamic and static batches are closed until all of them is "
        "done: to compare, and for jobs of equal lengths.",
        tuple(GATES),
    )
    batch_window: float = seconds(0.05, "How long a dynamic batch waits to be full; raise it for fuller batches.")
    prefill: str = option(
        "chunked",
        "How prompts share a step with decodes: chunked; splitfuse (every step of one moderate size); prefill-first "
        "(newcomers at once, decodes wait); whole (a prompt in one step).",
        tuple(PREFILL_MODES),
    )
    preemption: str = option(
        "recompute",
        "What a sequence that yields its memory loses: recompute all, swap to host memory, or auto, whichever is "
        "cheaper; change it when memory is short.",
        tuple(PREEMPTIONS),
    )
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
        _refuse_unknown(values.keys() - {found.name for _, found in options()})
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
        size = self.cache.block_size
        if size is not None and (size < 16 or size % 16):
            raise SettingsError(f"block_size is {size}: use a multiple of 16, such as 16 or 32")
        share = self.cache.memory_share
        if share is not None and not 0 < share <= 1:
            raise SettingsError(f"memory_share is {share}: use a share above 0 and up to 1")
        if self.cache.kv_tokens is not None and self.cache.kv_tokens < 1:
            raise SettingsError(f"kv_tokens is {self.cache.kv_tokens}: use 1 or more, or leave it out")
        if self.model.max_length is not None and self.model.max_length < 2:
            raise SettingsError(f"max_length is {self.model.max_length}: a prompt and an answer need at least 2 tokens")
        for group, name, least in (
            (self.scheduling, "max_sequences", 1),
            (self.scheduling, "step_tokens", 1),
            (self.cache, "host_tokens", 0),
            (self.cache, "disk_tokens", 1),
        ):
            value = getattr(group, name)
            if value is not None and value < least:
                raise SettingsError(f"{name} is {value}: use {least} or more, or leave it out")
        if self.cache.disk_cache is not None and self.cache.host_tokens == 0:
            raise SettingsError(
                "disk_cache is reached through host memory, and host_tokens is 0: leave one of them out"
            )
        chosen = self.scheduling
        for name in ("target_tpot", "batch_window", "aging"):
            value = getattr(chosen, name)
            if value is not None and not 0 <= value < inf:
                raise SettingsError(f"{name} is {value}: use 0 or more, or leave it out")
        if chosen.target_tpot is not None and (chosen.target_tpot == 0 or chosen.prefill != "chunked"):
            raise SettingsError(
                f"target_tpot is {chosen.target_tpot} with {chosen.prefill} prompts: it must be above 0, and it is met "
                "by cutting prompts to size, so leave prefill at chunked or target_tpot out"
            )


def options() -> Iterator[tuple[str, Field[Any]]]:
    """Every setting with the group it belongs to."""
    for group, kind in (("model", ModelSettings), ("cache", CacheSettings), ("scheduling", SchedulingSettings)):
        for found in fields(kind):
            yield group, found


def _refuse_unknown(names: set[str]) -> None:
    """Name the setting that was meant, where that is known; otherwise all there are."""
    if not names:
        return
    known = sorted(found.name for _, found in options())
    said = []
    for name in sorted(names):
        close = get_close_matches(name, known, n=1)
        said.append(
            setting_hint(name) or f"there is no setting {name}" + (f" (did you mean {close[0]}?)" if close else "")
        )
    rest = "" if all(map(setting_hint, names)) else f"; the settings are {', '.join(known)}"
    raise SettingsError("; ".join(said) + rest)
