"""Settings: a small tree of frozen dataclasses that defines the Python API, the command line and the config file.

Each setting has a help sentence on when to change it. A value that no user would change is a constant instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from math import inf
from typing import Any

from chairlift.core.batching import GATES
from chairlift.core.drafting import MAX_DRAFTS
from chairlift.core.errors import SettingsError
from chairlift.core.policies import POLICIES
from chairlift.core.predictor import PREDICTORS
from chairlift.core.preemption import PREEMPTIONS
from chairlift.core.prefill import PREFILL_MODES
from chairlift.core.vllm_names import setting_hint


def option(default: Any, help: str, choices: tuple[str, ...] = ()) -> Any:
    """Return a field with its help: what the setting is, and when to change it."""
    return field(default=default, metadata={"help": help, "choices": choices})


def hidden(default: Any) -> Any:
    """Return a field without a flag, for measurements alone."""
    return field(default=default, metadata={"help": "", "choices": (), "is_hidden": True})


def seconds(default: float | None, help: str) -> Any:
    """Return a field in seconds, which the command line also takes as 50ms or 2s."""
    return field(default=default, metadata={"help": help, "choices": (), "is_time": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The model's device, dtype, length and sampling defaults."""

    device: str = option(
        "auto", "cpu, cuda or cuda:N (auto: the first GPU, or the CPU); change it to run on another GPU."
    )
    dtype: str = option(
        "auto",
        "auto is the model's own dtype on a GPU, and float32 on a CPU, where 16-bit weights stay in 16 bits with the "
        "same results and quantized integers are multiplied without converting them. float32 converts all weights "
        "when they are loaded: use it for exact results with quantized weights.",
        ("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = option(
        "none",
        "Round the layers of a 16-bit model while it is loaded: fp8, int8, or int4 with a scale for each 128 inputs; "
        "use it when memory or the time of a token is short, at lower accuracy. A checkpoint that is quantized needs "
        "no setting.",
        ("none", "fp8", "int8", "int4"),
    )
    tensor_parallel: int = option(
        1,
        "Ranks that share the model, each a process with its own GPU, or its share of a CPU's cores; raise it when the "
        "weights do not fit one device.",
    )
    load_format: str = option(
        "auto",
        "dummy makes random weights from the config alone; use it to measure speed without a download.",
        ("auto", "dummy"),
    )
    max_length: int | None = option(
        None, "Longest sequence, prompt included (default: the model's own); lower it when memory is short."
    )
    generation_config: str = option(
        "auto",
        "Sampling defaults for requests that set none: auto takes the model's own (generation_config.json, or those "
        "published for its family), none samples at temperature 1; set none to compare with other engines.",
        ("auto", "none"),
    )
    seed: int = option(0, "Seeds the requests that have no seed of their own; change it to sample other answers.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """The KV cache: block size, dtype and capacity on the device, in host memory and on disk."""

    block_size: int | None = option(
        None,
        "Tokens per KV block, a multiple of 16 (default 16 on a CPU, 32 on a GPU); larger blocks save host time "
        "and waste more of each sequence's last block.",
    )
    kv_tokens: int | None = option(
        None,
        "Capacity of the KV cache in tokens (default: all that fits), not counting that layers with a sliding window "
        "free theirs; set it to bound memory or to test preemption.",
    )
    kv_dtype: str = option(
        "auto",
        "Dtype of the KV cache: the model's dtype, or 8 bits with a scale per token and head; change it when memory "
        "limits the batch or the context: 8 bits hold twice the tokens of 16, at slightly lower accuracy.",
        ("auto", "int8", "fp8"),
    )
    memory_share: float | None = option(
        None,
        "Share of memory that may be used (default 0.9 of a GPU, half of free RAM); lower it to share the machine.",
    )
    prefix_cache: bool = option(
        True,
        "Reuse the KV of earlier prompts and answers for equal prefixes (not if every layer has a sliding window); "
        "turn it off to measure without it.",
    )
    shared_reads: bool = option(
        True,
        "On a GPU, read the KV of a prefix that several sequences share once per step; turn it off to measure without "
        "it.",
    )
    host_tokens: int | None = option(
        None,
        "Tokens of evicted or swapped-out KV kept in host memory (default: up to a quarter of free RAM, on a GPU or "
        "with swap); raise it when prefix hits are lost to eviction; 0 turns it off. If layers have a sliding "
        "window, evicted KV is not kept.",
    )
    disk_cache: str | None = option(
        None, "A folder on a fast disk for cached KV that host memory has no room for; set it for long sessions."
    )
    disk_tokens: int | None = option(
        None, "Capacity of disk_cache in tokens (default: four times host_tokens); set it to bound the file."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingSettings:
    """Batch size, token budget, policy, batching, prefill and preemption."""

    max_sequences: int | None = option(
        None, "Sequences in one batch (default 64 on a CPU, 256 on a GPU); lower it for faster single answers."
    )
    step_tokens: int | None = option(
        None, "Tokens in one forward pass (default 256 on a CPU, 8192 on a GPU); lower it for smoother streaming."
    )
    target_tpot: float | None = seconds(
        None,
        "Longest predicted step, such as 50ms, which sets the tokens of a step; set it to bound the time per output "
        "token.",
    )
    policy: str = option(
        "fcfs",
        "Order in which requests are admitted: fcfs; priority (higher first); sjf (shortest predicted answer first); "
        "multibin (by bins of predicted length); fair (equal service per tenant); deadline (earliest first); "
        "longest-prefix (most cached prompt tokens first). Only priority without aging can starve a request.",
        tuple(POLICIES),
    )
    aging: float | None = option(
        None,
        "Credit per second of waiting: predicted tokens for sjf (default 1), cached tokens for longest-prefix (default "
        "1000), levels for priority (default 0: strict); raise it to shorten the longest waits.",
    )
    predictor: str = option(
        "history",
        "How sjf, multibin and fair predict the length of an answer: from finished answers, or from max_tokens; oracle "
        "takes known lengths, in experiments only.",
        tuple(PREDICTORS),
    )
    batching: str = option(
        "continuous",
        "When requests join the batch: continuous admits at every step; dynamic and static admit only after the whole "
        "batch has finished; use them to compare, or for jobs of equal lengths.",
        tuple(GATES),
    )
    batch_window: float = seconds(0.05, "Longest time that a dynamic batch waits to fill; raise it for larger batches.")
    prefill: str = option(
        "chunked",
        "How prompts share a step with decodes: chunked; splitfuse (all steps of one moderate size); prefill-first "
        "(new prompts before decodes); whole (each prompt in one step).",
        tuple(PREFILL_MODES),
    )
    preemption: str = option(
        "recompute",
        "How a preempted sequence gets its KV back: recompute it, swap it to host memory, or auto, whichever is "
        "predicted to be cheaper; change it when sequences are preempted often.",
        tuple(PREEMPTIONS),
    )
    speculation: str = option(
        "off",
        "Check several drafted tokens of a sequence in one step, as many as make it faster: ngram drafts what followed "
        "the same tokens before (edits, extraction, agents), draft uses a small model and eagle3 an EAGLE-3 head of "
        "the model (--draft). Use it for latency; answers are the same.",
        ("off", "ngram", "draft", "eagle3"),
    )
    max_drafts: int = option(
        8,
        "Most drafts of a sequence in one step, up to 8; lower it if most are rejected. The number is chosen by step.",
    )
    draft: str | None = option(
        None,
        "The small model of --speculation draft, which must have the same vocabulary, or the head of --speculation "
        "eagle3, made for the model: a name or path, as MODEL.",
    )
    acceptance: float | None = hidden(None)  # bench only: drafts are accepted with this probability
    fixed_drafts: int | None = hidden(None)  # bench only: drafts of every check, in place of the chosen number
    overlap: bool | None = option(
        None, "Plan a step while the previous one runs (default: on a GPU); turn it off to debug step by step."
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, by group."""

    model: ModelSettings = ModelSettings()
    cache: CacheSettings = CacheSettings()
    scheduling: SchedulingSettings = SchedulingSettings()

    @staticmethod
    def of(**values: Any) -> Settings:
        """Build settings from flat names, as in `LLM(model, max_length=2048)`; None keeps the default.

        >>> Settings.of(block_size=32).cache.block_size
        32
        """
        _refuse_unknown(values.keys() - {found.name for _, found in options(with_hidden=True)})
        groups: dict[str, dict[str, Any]] = {}
        for group, found in options(with_hidden=True):
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
            (self.model, "tensor_parallel", 1),
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
                "disk_cache needs host memory to copy through, and host_tokens is 0: leave one of them out"
            )
        chosen = self.scheduling
        for name in ("target_tpot", "batch_window", "aging"):
            value = getattr(chosen, name)
            if value is not None and not 0 <= value < inf:
                raise SettingsError(f"{name} is {value}: use 0 or more, or leave it out")
        if not 1 <= chosen.max_drafts <= MAX_DRAFTS:
            raise SettingsError(f"max_drafts is {chosen.max_drafts}: use 1 to {MAX_DRAFTS}")
        if (chosen.speculation in ("draft", "eagle3")) != (chosen.draft is not None):
            raise SettingsError(
                f"speculation is {chosen.speculation} and draft is {chosen.draft or 'not set'}: speculation draft "
                "needs a model and eagle3 a head, and only they have one; set both or neither"
            )
        if chosen.acceptance is not None and not 0 <= chosen.acceptance <= 1:
            raise SettingsError(f"acceptance is {chosen.acceptance}: use a probability from 0 to 1")
        if chosen.speculation == "off" and (chosen.acceptance is not None or chosen.fixed_drafts is not None):
            raise SettingsError("acceptance needs drafts: set speculation to ngram, draft or eagle3")
        if chosen.target_tpot is not None and (chosen.target_tpot == 0 or chosen.prefill != "chunked"):
            raise SettingsError(
                f"target_tpot is {chosen.target_tpot} with {chosen.prefill} prompts: it must be above 0 and needs "
                "chunked prefill; set prefill to chunked or leave target_tpot out"
            )


def options(*, with_hidden: bool = False) -> Iterator[tuple[str, Field[Any]]]:
    """Yield every setting with the name of its group."""
    for group, kind in (("model", ModelSettings), ("cache", CacheSettings), ("scheduling", SchedulingSettings)):
        for found in fields(kind):
            if with_hidden or not found.metadata.get("is_hidden"):
                yield group, found


def _refuse_unknown(names: set[str]) -> None:
    """Raise for unknown names: suggest our name for vLLM's or the closest one, or list all settings."""
    if not names:
        return
    known = sorted(found.name for _, found in options())
    hints = []
    for name in sorted(names):
        close = get_close_matches(name, known, n=1)
        hints.append(
            setting_hint(name) or f"there is no setting {name}" + (f" (did you mean {close[0]}?)" if close else "")
        )
    rest = "" if all(map(setting_hint, names)) else f"; the settings are {', '.join(known)}"
    raise SettingsError("; ".join(hints) + rest)
