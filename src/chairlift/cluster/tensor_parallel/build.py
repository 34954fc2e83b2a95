"""From settings to a running engine, on as many ranks as they say.

What only several ranks need is imported for several ranks alone: a GPU box without msgspec runs one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from chairlift.core.errors import SettingsError
from chairlift.core.settings import Settings, options
from chairlift.execution import build as one_rank
from chairlift.execution.build import Built, Found, Loaded, find_model, join, load_found, prepare
from chairlift.models.division import of_one_rank

if TYPE_CHECKING:
    from chairlift.cluster.tensor_parallel.ranks import Ranks
    from chairlift.cluster.tensor_parallel.remote import Remote


@dataclass(frozen=True, slots=True)
class Divided(Loaded):
    """Rank 0's part of a model, and the other ranks."""

    ranks: Ranks = field(kw_only=True)


def build(model: str, settings: Settings, *, progress: bool = True) -> Built:
    """Find the model, load it, size the cache and join scheduler and executor."""
    return assemble(load_model(model, settings, progress=progress), settings, progress=progress)


def load_model(
    model: str,
    settings: Settings,
    *,
    progress: bool = True,
    ranks: Ranks | None = None,
    remote: Remote | None = None,
) -> Loaded:
    """Find the model and load it, on `ranks` if given, else on as many new ones as the settings say.

    With `remote`, these are on other hosts.
    """
    if settings.model.tensor_parallel == 1 and ranks is None:
        return one_rank.load_model(model, settings, progress=progress)
    from chairlift.cluster.tensor_parallel.ranks import Ranks

    found = find_model(model, settings, progress=progress)
    check(found, settings, is_remote=remote is not None)
    ranks = ranks or Ranks(settings.model.tensor_parallel, found.device, remote)
    # Ranks on this host read the files that were found; other hosts find the model by its name.
    path = model if found.checkpoint is None or ranks.are_remote else str(found.checkpoint.path)
    with ranks.ending_on_error():
        ranks.send({"load": {"model": path, "settings": flat(settings)}})
        loaded = load_found(found, settings, progress=progress, group=ranks.group)
    return Divided(loaded.config, loaded.checkpoint, loaded.device, loaded.decoder, ranks=ranks)


def assemble(loaded: Loaded, settings: Settings, *, progress: bool = True) -> Built:
    """Size the cache of a loaded model on every rank, and join scheduler and executor."""
    if not isinstance(loaded, Divided):
        return one_rank.assemble(loaded, settings, progress=progress)
    from chairlift.cluster.tensor_parallel.executor import TensorParallelExecutor

    ranks = loaded.ranks
    ranks.on_fault = lambda _reason: None  # frees the engine before this one, and its KV cache
    with ranks.ending_on_error():
        ranks.send({"prepare": flat(settings)})
        prepared = prepare(loaded, settings, progress=progress)
        built = join(prepared, loaded, settings, TensorParallelExecutor(prepared.executor, ranks))
    ranks.on_fault = built.engine.end
    return replace(built, close=ranks.close)


def check(found: Found, settings: Settings, *, is_remote: bool = False) -> None:
    """Raise a SettingsError, before a process is started, for settings that several ranks cannot have."""
    count = settings.model.tensor_parallel
    of_one_rank(found.config, count)
    if settings.scheduling.speculation != "off":
        raise SettingsError(
            f"tensor_parallel is {count} with speculation {settings.scheduling.speculation}, which one rank alone can "
            "do yet: leave one of them out"
        )
    if settings.cache.disk_cache is not None:
        raise SettingsError(
            f"tensor_parallel is {count} with a disk_cache, which only one rank has: leave disk_cache out; host_tokens "
            "keeps evicted KV in memory"
        )
    if found.device.type != "cuda":
        return
    if found.device.index:
        raise SettingsError(
            f"device is {found.device} with tensor_parallel {count}, which uses the first GPUs: leave device out and "
            "choose them with CUDA_VISIBLE_DEVICES"
        )
    if torch.cuda.device_count() < count and not is_remote:
        raise SettingsError(
            f"tensor_parallel is {count}, but torch finds {torch.cuda.device_count()} GPUs here: each rank needs one"
        )


def flat(settings: Settings) -> dict[str, Any]:
    """Return settings by their flat names, as Settings.of takes them."""
    return {found.name: getattr(getattr(settings, group), found.name) for group, found in options()}
