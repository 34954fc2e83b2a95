"""Build what speculation needs: a draft model, the times of steps, and the scheduler's part."""

from __future__ import annotations

from chairlift.core.assemble import speculation_of
from chairlift.core.errors import SettingsError
from chairlift.core.scheduler import Scheduler
from chairlift.core.settings import SchedulingSettings
from chairlift.core.step_times import StepTimes
from chairlift.costs.calibrate import time_checks
from chairlift.execution.draft_model import DraftModel
from chairlift.execution.executor import TorchExecutor
from chairlift.execution.graphs import LADDER
from chairlift.models.config import ModelConfig
from chairlift.models.decoder import Decoder
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
    executor.use_draft(DraftModel(draft, blocks, executor.rows, executor.sampler, max_sequences))


def speculate(
    scheduler: Scheduler,
    settings: SchedulingSettings,
    executor: TorchExecutor,
    decoder: Decoder,
    cache: KvCache,
    draft: Decoder | None,
) -> None:
    """Let a scheduler's steps check drafts; what steps cost by their tokens is measured now."""
    limits, is_captured = scheduler.limits, executor.captures
    sizes = [size for size in (LADDER if is_captured else _CHECKED) if size <= limits.max_samples]
    draft_times = None
    if is_captured:
        measured = [(size, executor.seconds_of_decodes(size)) for size in sizes]
    else:
        measured = time_checks(decoder, cache, sizes)
    if draft is not None:
        rows = [size for size in sizes if size <= limits.max_sequences]
        passes = [(size, executor.seconds_of_draft(size)) for size in rows] if is_captured else None
        draft_times = StepTimes(passes or time_checks(draft, cache, rows), is_padded=is_captured)
    times = StepTimes(measured, is_padded=is_captured)
    scheduler.planner.speculation = speculation_of(settings, limits, times, draft_times)
    if settings.acceptance is not None:
        executor.accept_by_chance(settings.acceptance)
