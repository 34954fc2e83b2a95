"""Build what speculation needs: a draft model or head, the times of steps, and the scheduler's part."""

from __future__ import annotations

from chairlift.core.assemble import speculation_of
from chairlift.core.errors import SettingsError
from chairlift.core.limits import Limits
from chairlift.core.scheduler import Scheduler
from chairlift.core.settings import SchedulingSettings
from chairlift.core.step_times import StepTimes
from chairlift.costs.calibrate import time_checks
from chairlift.execution.draft_model import DraftModel
from chairlift.execution.executor import TorchExecutor
from chairlift.execution.graphs import LADDER
from chairlift.execution.head_drafts import HeadDrafts
from chairlift.models.config import ModelConfig
from chairlift.models.decoder import Decoder
from chairlift.models.eagle3 import Eagle3Head
from chairlift.ops.kv_cache import KvCache

_CHECKED = (1, 2, 3, 5, 9, 17, 33, 65)  # tokens of the steps that are timed where steps are not captured


def check_draft(model: ModelConfig, draft: ModelConfig, name: str) -> None:
    """Refuse a draft model that has other tokens."""
    if draft.vocab_size != model.vocab_size:
        raise SettingsError(
            f"the draft model {name} has a vocabulary of {draft.vocab_size:,} tokens and the model {model.vocab_size:,}"
            ": they must be the same; choose a draft model of the same family"
        )


def add_draft_model(
    executor: TorchExecutor, decoder: Decoder, draft: Decoder, name: str, cache: KvCache, max_sequences: int
) -> None:
    """Let an executor draft with a small model, in blocks with the numbers of the model's own."""
    if decoder.layout.windows[0] or draft.layout.windows != (0,):
        raise SettingsError(
            f"the draft model {name} cannot be used: it or the model has layers with a sliding window, and both need "
            "KV blocks that stay allocated; use speculation ngram"
        )
    blocks = draft.make_cache(cache.blocks, cache.block_size)
    executor.drafts = DraftModel(draft, blocks, executor.rows, executor.sampler, max_sequences)


def add_head(executor: TorchExecutor, head: Eagle3Head, cache: KvCache, limits: Limits) -> None:
    """Let an executor draft with an EAGLE-3 head."""
    most = max(limits.step_tokens, limits.max_samples)
    executor.drafts = HeadDrafts(head, cache, executor.rows, executor.sampler, limits.max_sequences, most)


def speculate(
    scheduler: Scheduler,
    settings: SchedulingSettings,
    executor: TorchExecutor,
    decoder: Decoder,
    cache: KvCache,
) -> None:
    """Let a scheduler's steps check drafts; what steps cost by their tokens is measured now."""
    limits, is_captured = scheduler.limits, executor.captures
    sizes = [size for size in (LADDER if is_captured else _CHECKED) if size <= limits.max_samples]
    drafts, draft_times = executor.drafts, None
    if is_captured:
        measured = [(size, executor.seconds_of_decodes(size)) for size in sizes]
    else:
        measured = time_checks(decoder, cache, sizes)
    if drafts is not None:
        rows = [size for size in sizes if size <= limits.max_sequences]
        draft_times = StepTimes(drafts.times(rows), is_padded=is_captured)
    times = StepTimes(measured, is_padded=is_captured)
    scheduler.planner.speculation = speculation_of(settings, limits, times, draft_times)
    if settings.acceptance is not None:
        executor.accept_by_chance(settings.acceptance)
