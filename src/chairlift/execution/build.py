"""From settings to a running engine: every default that depends on the model or the device is chosen here, once."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from chairlift.core.assemble import assemble_scheduler, reads_cost
from chairlift.core.blocks import BlockPool
from chairlift.core.constraint import Masker
from chairlift.core.cost import Cost
from chairlift.core.errors import SettingsError
from chairlift.core.limits import Limits
from chairlift.core.prefix_cache import PrefixCache
from chairlift.core.settings import Settings
from chairlift.core.speculation import MOST_IN_STEP
from chairlift.costs.calibrate import calibrate
from chairlift.costs.dry_run import compile_kernels, dry_run, warm_up_sampling
from chairlift.engine.engine import Engine, Executor
from chairlift.execution.capacity import Capacity, available_memory, plan_capacity, require_memory
from chairlift.execution.exchange import BlockExchange
from chairlift.execution.executor import TorchExecutor
from chairlift.execution.speculate import add_draft_model, add_head, check_draft, speculate
from chairlift.execution.swap import DiskBlocks, HostBlocks
from chairlift.models.checkpoint import Checkpoint, open_checkpoint
from chairlift.models.config import ModelConfig
from chairlift.models.decoder import Decoder
from chairlift.models.division import of_one_rank
from chairlift.models.eagle3 import Eagle3Head
from chairlift.models.eagle3_files import load_head
from chairlift.models.families import read_config, record
from chairlift.models.formats.on_load import OnLoad
from chairlift.models.loader import Quantizing, RandomTensors, TensorSource, load_decoder
from chairlift.models.shapes import config_alone
from chairlift.models.sources import resolve
from chairlift.ops.assistant import assisted
from chairlift.ops.group import Group
from chairlift.ops.kv_cache import KvCache
from chairlift.ops.kv_quant import KV_DTYPES
from chairlift.ops.masks import pinned_rows
from chairlift.ops.triton_found import HAS_TRITON

console = Console(stderr=True)
_TRIED = 16  # most tokens of the step that is timed
_MIB = 1 << 20
_PINNED = 4 << 30  # bytes of host memory that can be pinned for a GPU in about a second


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Return seconds that never decrease."""
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class Found:
    """A model's files and config, before its weights are read."""

    config: ModelConfig
    checkpoint: Checkpoint | None  # None: random weights, and no tokenizer
    device: torch.device


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model on its device, for any number of engines, one after the other; of several ranks, this rank's part."""

    config: ModelConfig  # of the whole model
    checkpoint: Checkpoint | None  # None: random weights, and no tokenizer
    device: torch.device
    decoder: Decoder
    draft: Decoder | None = None  # the draft model of speculation
    head: Eagle3Head | None = None  # or the model's head


@dataclass(frozen=True, slots=True)
class Prepared:
    """The executor of a loaded model and its memory: what every rank has."""

    executor: TorchExecutor
    limits: Limits
    capacity: Capacity
    cache: KvCache
    host_blocks: int
    disk: DiskBlocks | None
    disk_blocks: int
    cost: Cost
    slowest_step: float


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
    weight_bytes: int  # of the matrices that a step reads, on one rank
    weights: str  # their formats and bytes, in words
    close: Callable[[], None] = lambda: None  # ends the processes of the other ranks
    exchange: BlockExchange | None = None  # for blocks from and to other processes; None: of several ranks

    def use_masker(self, masker: Masker) -> None:
        """Compute masks with it, in memory that a GPU can copy from."""
        if self.device.type == "cuda":
            masker.allocate = pinned_rows
        self.engine.scheduler.masker = masker


def build(model: str, settings: Settings, *, progress: bool = True) -> Built:
    """Find the model, load it, size the cache and join scheduler and executor."""
    return assemble(load_model(model, settings, progress=progress), settings, progress=progress)


def load_model(model: str, settings: Settings, *, progress: bool = True) -> Loaded:
    """Find the model and load all of it; cluster/tensor_parallel has the same function for any number of ranks."""
    if settings.model.tensor_parallel > 1:
        raise SettingsError(f"tensor_parallel is {settings.model.tensor_parallel}, but this runs in one process: use 1")
    found = find_model(model, settings, progress=progress)
    name = settings.scheduling.draft
    if name is None:
        return load_found(found, settings, progress=progress)
    if settings.scheduling.speculation == "eagle3":
        folder = resolve(name, progress=progress)
        loaded = load_found(found, settings, progress=progress)
        length = choose_limits(found.config, settings, found.device).max_length
        return replace(loaded, head=load_head(folder, loaded.decoder, length))
    small = find_model(name, settings, progress=progress)
    check_draft(found.config, small.config, name)
    loaded = load_found(found, settings, progress=progress)
    length = choose_limits(found.config, settings, found.device).max_length
    draft = load(small.config, small.checkpoint, found.device, length, progress)
    return replace(loaded, draft=draft)


def assemble(loaded: Loaded, settings: Settings, *, progress: bool = True) -> Built:
    """Size the cache of a loaded model and join scheduler and executor."""
    prepared = prepare(loaded, settings, progress=progress)
    exchange = prepared.executor.exchange = BlockExchange(prepared.cache)
    return replace(join(prepared, loaded, settings, prepared.executor), exchange=exchange)


def find_model(model: str, settings: Settings, *, progress: bool = True) -> Found:
    """Find the model and read its config."""
    wanted = settings.model
    device = choose_device(wanted.device)
    if wanted.load_format == "dummy":
        return Found(
            read_config(config_alone(model), wanted.dtype, device.type, model, wanted.quantization), None, device
        )
    checkpoint = open_checkpoint(resolve(model, progress=progress))
    given = checkpoint.config, wanted.dtype, device.type, checkpoint.config_file, wanted.quantization
    config = read_config(*given, checkpoint.format)
    is_rounded = isinstance(config.format, OnLoad)
    checkpoint.keeps_stored = device.type == "cpu" and wanted.dtype == "auto" and not is_rounded
    return Found(config, checkpoint, device)


def load_found(found: Found, settings: Settings, *, progress: bool = True, group: Group | None = None) -> Loaded:
    """Load a model; of several ranks, this rank's part."""
    config, checkpoint, device = found.config, found.checkpoint, found.device
    length = choose_limits(config, settings, device).max_length
    return Loaded(config, checkpoint, device, load(config, checkpoint, device, length, progress, group))


def prepare(loaded: Loaded, settings: Settings, *, progress: bool = True) -> Prepared:
    """Size the cache of a loaded model and make its executor. All ranks run this at the same time."""
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
            # With one thread there is never an assistant; but ranks must run the same passes.
            if decoder.is_compiled and (torch.get_num_threads() > 1 or decoder.group is not None):
                with assisted():
                    dry_run(decoder, tokens=1, samples=1, block_size=capacity.block_size, kv_dtype=kv_dtype)
            warm_up_sampling(config.vocab_size, torch.float32, device)
        start, tried = time.monotonic(), min(_TRIED, limits.max_length)
        dry_run(decoder, tokens=tried, samples=1, block_size=capacity.block_size, kv_dtype=kv_dtype)
        slowest = (time.monotonic() - start) * limits.step_tokens / tried
    shelves = keeps_prefixes(settings, capacity) and capacity.groups.is_plain
    host_blocks, disk_blocks = choose_swap_blocks(settings, capacity, device, shelves, decoder.group)
    cost = calibrate(decoder, cache) if reads_cost(settings.scheduling) or host_blocks else Cost()
    disk = None
    if settings.cache.disk_cache is not None and disk_blocks:
        disk = DiskBlocks(Path(settings.cache.disk_cache), disk_blocks, capacity.block_bytes)
    moved = HostBlocks(cache, host_blocks, disk) if host_blocks else None
    executor = TorchExecutor(decoder, cache, limits, moved, shared_reads=settings.cache.shared_reads)
    if loaded.draft is not None:
        name = str(settings.scheduling.draft)
        add_draft_model(executor, decoder, loaded.draft, name, cache, limits.max_sequences)
    if loaded.head is not None:
        add_head(executor, loaded.head, cache, limits)
    if device.type == "cuda" and HAS_TRITON:
        with console.status("capturing CUDA graphs") if progress else nullcontext():
            executor.use_graphs(capacity.blocks)
    return Prepared(executor, limits, capacity, cache, host_blocks, disk, disk_blocks, cost, slowest)


def join(prepared: Prepared, loaded: Loaded, settings: Settings, executor: Executor) -> Built:
    """Join a scheduler to the executor: that of `prepared`, or one that also runs other ranks."""
    capacity, limits, cost = prepared.capacity, prepared.limits, prepared.cost
    counts = capacity.blocks, prepared.host_blocks, prepared.disk_blocks
    pool, host, shelf = (BlockPool(count, capacity.block_size) for count in counts)
    caches = keeps_prefixes(settings, capacity)
    known = PrefixCache(pool, (host, shelf), cost, capacity.groups) if caches else None
    if known is not None and prepared.disk is not None:
        known.is_sound = prepared.disk.is_sound
    scheduling, device = settings.scheduling, loaded.device
    scheduler = assemble_scheduler(scheduling, limits, pool, host, cost, known, capacity.groups.windows)
    overlap = device.type == "cuda" if scheduling.overlap is None else scheduling.overlap
    if scheduling.speculation != "off":
        speculate(scheduler, scheduling, prepared.executor, loaded.decoder, prepared.cache)
    engine = Engine(scheduler, executor, WallClock(), overlap=overlap)
    read = loaded.decoder.formats
    return Built(
        engine,
        loaded.config,
        limits,
        capacity,
        loaded.checkpoint,
        device,
        prepared.slowest_step,
        sum(read.values()),
        describe_formats(read),
    )


def describe_formats(read: dict[str, int]) -> str:
    """Return the formats of the weights that a step reads, in words.

    >>> describe_formats({"int4": 82 << 20, "float32": 216 << 20})
    'float32 216 MiB, int4 82 MiB'
    """
    by_size = sorted(read.items(), key=lambda entry: -entry[1])
    return ", ".join(f"{name} {count / _MIB:,.0f} MiB" for name, count in by_size)


def keeps_prefixes(settings: Settings, capacity: Capacity) -> bool:
    """Whether there is a prefix cache: the first group of layers keeps all blocks, or none does."""
    return settings.cache.prefix_cache and not capacity.groups.windows[0]


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


def choose_swap_blocks(
    settings: Settings, capacity: Capacity, device: torch.device, shelves: bool, group: Group | None
) -> tuple[int, int]:
    """Return the numbers of host and disk blocks for swapped KV and, with `shelves`, evicted KV; 0: unused."""
    chosen, size, groups = settings.cache, capacity.block_size, len(capacity.groups.windows)
    swaps, spills = settings.scheduling.preemption != "recompute", shelves and chosen.disk_cache is not None
    affordable = available_memory() // 4
    if group is not None:  # the ranks share the host's memory, and each keeps its part of every block there
        affordable = group.least(affordable // group.size)
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


def load(
    config: ModelConfig,
    checkpoint: Checkpoint | None,
    device: torch.device,
    max_length: int,
    progress: bool,
    group: Group | None = None,
) -> Decoder:
    """Load the decoder, or this rank's part of it, onto its device, with a progress bar if `progress`."""
    ranks = 1 if group is None else group.size
    own = of_one_rank(config, ranks)
    total = record(own, ranks).nbytes
    if checkpoint is not None and checkpoint.keeps_stored and (config.format is None or not config.format.expands):
        total = min(total, checkpoint.nbytes() // ranks)
    require_memory(own, total, max_length, device, ranks)
    source: TensorSource = checkpoint or RandomTensors(config, device)
    if isinstance(config.format, OnLoad):
        source = Quantizing(source, config.format)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not progress) as bar:
        task = bar.add_task("loading weights", total=total)
        return load_decoder(config, source, device, max_length, lambda count: bar.advance(task, count), group)
