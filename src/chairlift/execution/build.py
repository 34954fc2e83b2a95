"""From settings to a running engine: every default that depends on the model or the device is chosen here, once."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from chairlift.core.assemble import assemble_scheduler, reads_cost
from chairlift.core.blocks import BlockPool
from chairlift.core.cost import Cost
from chairlift.core.errors import ModelError, SettingsError
from chairlift.core.limits import Limits
from chairlift.core.prefix_cache import PrefixCache
from chairlift.core.settings import Settings
from chairlift.core.speculation import MOST_IN_STEP
from chairlift.costs.calibrate import calibrate
from chairlift.costs.dry_run import compile_kernels, dry_run, warm_up_sampling
from chairlift.engine.engine import Engine
from chairlift.execution.capacity import Capacity, available_memory, plan_capacity, require_memory
from chairlift.execution.executor import TorchExecutor
from chairlift.execution.speculate import add_draft_model, check_draft, speculate
from chairlift.execution.swap import DiskBlocks, HostBlocks
from chairlift.json_file import read_json
from chairlift.models.checkpoint import Checkpoint, open_checkpoint
from chairlift.models.config import ModelConfig
from chairlift.models.decoder import Decoder
from chairlift.models.families import outline, read_config
from chairlift.models.loader import RandomTensors, load_decoder
from chairlift.models.shapes import SHAPES
from chairlift.models.sources import resolve
from chairlift.ops.kv_quant import KV_DTYPES
from chairlift.ops.triton_found import HAS_TRITON

console = Console(stderr=True)
_TRIED = 16  # most tokens of the step that is timed
_PINNED = 4 << 30  # bytes of host memory that can be pinned for a GPU in about a second


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Return seconds that never decrease."""
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model on its device, for any number of engines, one after the other."""

    config: ModelConfig
    checkpoint: Checkpoint | None  # None: random weights, and no tokenizer
    device: torch.device
    decoder: Decoder
    draft: Decoder | None = None  # the draft model of speculation


@dataclass(frozen=True, slots=True)
class Built:
    """An engine ready to serve, and its parts."""

    engine: Engine
    config: ModelConfig
    limits: Limits
    capacity: Capacity
    checkpoint: Checkpoint | None
    device: torch.device
    slowest_step: float  # rough estimate of the largest step's seconds; 0: not known


def build(model: str, settings: Settings, *, progress: bool = True) -> Built:
    """Find the model, load it, size the cache and join scheduler and executor."""
    return assemble(load_model(model, settings, progress=progress), settings, progress=progress)


def load_model(model: str, settings: Settings, *, progress: bool = True) -> Loaded:
    """Find the model and load it."""
    device = choose_device(settings.model.device)
    config, checkpoint = open_model(model, settings, device, progress)
    name, draft = settings.scheduling.draft, None
    if name is not None:
        small, source = open_model(name, settings, device, progress)
        check_draft(config, small, name)
    length = choose_limits(config, settings, device).max_length
    decoder = load(config, checkpoint, device, length, progress)
    if name is not None:
        draft = load(small, source, device, length, progress)
    return Loaded(config, checkpoint, device, decoder, draft)


def open_model(
    model: str, settings: Settings, device: torch.device, progress: bool
) -> tuple[ModelConfig, Checkpoint | None]:
    """Find a model and read its config."""
    checkpoint: Checkpoint | None = None
    if settings.model.load_format == "dummy":
        config = read_config(config_alone(model), settings.model.dtype, device.type, file=model)
    else:
        checkpoint = open_checkpoint(resolve(model, progress=progress))
        config = read_config(checkpoint.config, settings.model.dtype, device.type, checkpoint.config_file)
    return config, checkpoint


def assemble(loaded: Loaded, settings: Settings, *, progress: bool = True) -> Built:
    """Size the cache of a loaded model and join scheduler and executor."""
    config, device, decoder = loaded.config, loaded.device, loaded.decoder
    limits = choose_limits(config, settings, device)
    share = settings.cache.memory_share or (0.9 if device.type == "cuda" else 0.5)
    block_size = settings.cache.block_size or (32 if device.type == "cuda" else 16)
    kv_dtype = KV_DTYPES.get(settings.cache.kv_dtype, config.dtype)
    if device.type == "cuda":
        with console.status("compiling kernels, once on this machine") if progress else nullcontext():
            compile_kernels(decoder, limits.max_length, block_size, kv_dtype)
    beside = 0 if loaded.draft is None else loaded.draft.kv_bytes_per_block(block_size)
    capacity = plan_capacity(decoder, limits, block_size, kv_dtype, settings.cache.kv_tokens, share, beside)
    spare = 1 if device.type == "cuda" else 0  # written by the padding rows of captured steps
    cache = decoder.make_cache(capacity.blocks + spare, capacity.block_size, kv_dtype)
    slowest = 0.0
    if device.type == "cpu":
        with console.status("compiling the CPU kernels, once on this machine") if progress else nullcontext():
            dry_run(decoder, tokens=1, samples=1, block_size=capacity.block_size, kv_dtype=kv_dtype)
            warm_up_sampling(config.vocab_size, torch.float32, device)
        start, tried = time.monotonic(), min(_TRIED, limits.max_length)
        dry_run(decoder, tokens=tried, samples=1, block_size=capacity.block_size, kv_dtype=kv_dtype)
        slowest = (time.monotonic() - start) * limits.step_tokens / tried
    scheduling = settings.scheduling
    groups = capacity.groups
    caches = settings.cache.prefix_cache and not groups.windows[0]  # the first group keeps all blocks, or none does
    host_blocks, disk_blocks = choose_swap_blocks(settings, capacity, device, caches and groups.is_plain)
    cost = calibrate(decoder, cache) if reads_cost(scheduling) or host_blocks else Cost()
    pool, host, shelf = (BlockPool(count, capacity.block_size) for count in (capacity.blocks, host_blocks, disk_blocks))
    known = PrefixCache(pool, (host, shelf), cost, groups) if caches else None
    disk = None
    if known is not None and settings.cache.disk_cache is not None and disk_blocks:
        disk = DiskBlocks(Path(settings.cache.disk_cache), disk_blocks, capacity.block_bytes)
        known.is_sound = disk.is_sound
    scheduler = assemble_scheduler(scheduling, limits, pool, host, cost, known, groups.windows)
    overlap = device.type == "cuda" if scheduling.overlap is None else scheduling.overlap
    moved = HostBlocks(cache, host_blocks, disk) if host_blocks else None
    executor = TorchExecutor(decoder, cache, limits, moved, shared_reads=settings.cache.shared_reads)
    if loaded.draft is not None:
        name = str(scheduling.draft)
        add_draft_model(executor, decoder, loaded.draft, name, cache, limits.max_sequences)
    if device.type == "cuda" and HAS_TRITON:
        with console.status("capturing CUDA graphs") if progress else nullcontext():
            executor.use_graphs(capacity.blocks)
    if scheduling.speculation != "off":
        speculate(scheduler, scheduling, executor, decoder, cache, loaded.draft)
    engine = Engine(scheduler, executor, WallClock(), overlap=overlap)
    return Built(engine, config, limits, capacity, loaded.checkpoint, device, slowest)


def choose_device(name: str) -> torch.device:
    """Return the device that a setting names."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingsError(f"device {name!r} is unknown: use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise SettingsError(f"device {name!r} is not supported: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingsError(f"device {name!r} was asked for, but torch finds no CUDA device here: use cpu or auto")
    return device


def choose_limits(config: ModelConfig, settings: Settings, device: torch.device) -> Limits:
    """Return the limits of a step and of a sequence."""
    is_gpu = device.type == "cuda"
    length = settings.model.max_length or config.max_length
    if length > config.max_length:
        raise SettingsError(
            f"max_length is {length}, but the model supports {config.max_length} tokens: lower it to that or less"
        )
    wanted = settings.scheduling
    step_tokens = wanted.step_tokens or (8192 if is_gpu else 256)
    sequences = wanted.max_sequences or min(256 if is_gpu else 64, step_tokens)
    if wanted.prefill == "whole" and wanted.step_tokens is None:
        step_tokens = max(step_tokens, length + sequences)
    drafts = min(sequences * wanted.max_drafts, MOST_IN_STEP, step_tokens) if wanted.speculation != "off" else 0
    return Limits(sequences, step_tokens, length, config.vocab_size, drafts)


def choose_swap_blocks(settings: Settings, capacity: Capacity, device: torch.device, shelves: bool) -> tuple[int, int]:
    """Return the numbers of host and disk blocks for swapped KV and, with `shelves`, evicted KV; 0: unused."""
    chosen, size, groups = settings.cache, capacity.block_size, len(capacity.groups.windows)
    swaps, spills = settings.scheduling.preemption != "recompute", shelves and chosen.disk_cache is not None
    affordable = available_memory() // 4
    host = 0  # on a CPU the KV cache is host memory itself
    if not swaps and not shelves:
        return 0, 0
    if chosen.host_tokens is not None:
        host = -(-chosen.host_tokens // size) * groups
    elif swaps or spills:
        host = min(capacity.blocks, affordable // capacity.block_bytes)
    elif device.type == "cuda":
        host = min(affordable, _PINNED) // capacity.block_bytes
    if not spills or not host:
        return host, 0
    return host, 4 * host if chosen.disk_tokens is None else -(-chosen.disk_tokens // size)


def config_alone(model: str) -> dict[str, Any]:
    """Return the config for random weights, from a shape's name, a folder with a config.json, or such a file."""
    if model in SHAPES:
        return SHAPES[model]
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    try:
        return read_json(file)
    except ModelError as error:
        raise ModelError(
            f"no config to make random weights from at {model!r} ({error}): give a folder with a config.json, "
            f"such a file, or one of {', '.join(SHAPES)}"
        ) from None


def load(
    config: ModelConfig, checkpoint: Checkpoint | None, device: torch.device, max_length: int, progress: bool
) -> Decoder:
    """Load the decoder onto its device, with a progress bar if `progress`."""
    total = sum(map(math.prod, outline(config)[1].values())) * config.dtype.itemsize
    require_memory(config, total, max_length, device)
    source = checkpoint or RandomTensors(config, device)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not progress) as bar:
        task = bar.add_task("loading weights", total=total)
        return load_decoder(config, source, device, max_length, lambda count: bar.advance(task, count))
