"""Job: the arguments of an engine process; start: loads its model with its part of the machine."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from chairlift.cluster.tensor_parallel.remote import Remote
from chairlift.core.errors import CapacityError, RequestError, SettingsError
from chairlift.core.settings import Settings
from chairlift.engine.engine import Engine
from chairlift.offline.vocabulary import all_eos_ids, read_tokenizer
from chairlift.serving.compiling import Compiler
from chairlift.serving.messages import Hello
from chairlift.text.grammar import Grammars

if TYPE_CHECKING:
    from chairlift.cluster.kv_store.store import KvStore
    from chairlift.cluster.kv_transfer.incoming import Incoming
    from chairlift.cluster.kv_transfer.outgoing import Outgoing
    from chairlift.execution.build import Built, Loaded
    from chairlift.execution.exchange import BlockExchange


class Job(msgspec.Struct, frozen=True):
    """The arguments of the engine process."""

    model: str
    settings: dict[str, Any]
    sockets: list[str]  # one per HTTP process; the first also receives the statistics
    beat: int  # descriptor of the shared memory
    parent: int  # process id; the engine process ends with it
    progress: bool = False
    # The engines of the server share the machine's memory, its GPUs and its cores.
    place: int = 0
    engines: int = 1
    lock: str = ""  # file that an engine locks while it measures and takes memory, if there are several
    receives_at: list[str] = []  # addresses where it receives KV blocks of other engines
    sends: bool = False  # whether it may be asked to send KV blocks to other engines
    cluster_key: str | None = None  # file with the key of connections between hosts
    kv_store: str | None = None  # URL of a Redis server that keeps evicted blocks
    remote: Remote | None = None  # the ranks on other hosts


class BlockEnds(NamedTuple):
    """An engine's ends of the connections that carry KV blocks between engines, and to the KV store."""

    exchange: BlockExchange
    incoming: list[Incoming]
    outgoing: Outgoing | None
    store: KvStore | None


class Started(NamedTuple):
    """An engine that is ready to serve."""

    engine: Engine
    hello: Hello
    slowest_step: float  # seconds
    compiler: Compiler | None = None
    blocks: BlockEnds | None = None


def start(job: Job) -> Started:
    """Load the model."""
    from chairlift.cluster.tensor_parallel.build import assemble, load_model

    with alone(job):
        settings = share_of(Settings.of(**job.settings), job)
        try:
            loaded = load_model(job.model, settings, progress=job.progress, remote=job.remote)
            compiler = Compiler(lambda: grammars_of(job.model, loaded))
            preparing = compiler.prepare()
            built = assemble(loaded, settings, progress=job.progress)
        except CapacityError as error:
            if job.engines > 1:
                raise CapacityError(f"{error} (engine {job.place + 1} of {job.engines} that share it)") from None
            raise
    preparing.join()
    if compiler.grammars is not None:
        built.use_masker(compiler.grammars)
    limits, config = built.limits, built.config
    hello = Hello(
        model=job.model,
        device=str(built.device),
        dtype=str(config.dtype).removeprefix("torch."),
        max_sequences=limits.max_sequences,
        step_tokens=limits.step_tokens,
        max_length=limits.max_length,
        vocab_size=limits.vocab_size,
        block_size=built.capacity.block_size,
        kv_tokens=built.capacity.tokens,
        capacity=str(built.capacity),
        eos_ids=sorted(config.eos_ids),
        weights=built.weights,
    )
    return Started(built.engine, hello, built.slowest_step, compiler, block_ends(job, built))


def block_ends(job: Job, built: Built) -> BlockEnds | None:
    """Open the connections for KV blocks; None if there are none."""
    if not job.receives_at and not job.sends and job.kv_store is None:
        return None
    from chairlift.cluster.kv_store.store import KvStore
    from chairlift.cluster.kv_transfer.incoming import Incoming
    from chairlift.cluster.kv_transfer.layout import exchange_of, layout_of
    from chairlift.cluster.kv_transfer.outgoing import Outgoing
    from chairlift.cluster.kv_transfer.wire import read_key

    blocks, layout, size = exchange_of(built), layout_of(built, job.model), built.capacity.block_size
    key = b"" if job.cluster_key is None else read_key(Path(job.cluster_key))
    queue = built.engine.scheduler.memory.prefixes.exchange
    incoming = [Incoming(address, key, layout, size, queue, blocks) for address in job.receives_at]
    outgoing = Outgoing(key, layout, size, blocks) if job.sends else None
    store = None if job.kv_store is None else KvStore(job.kv_store, layout, size, queue, blocks)
    return BlockEnds(blocks, incoming, outgoing, store)


@contextmanager
def alone(job: Job) -> Iterator[None]:
    """Let one engine of the server at a time measure free memory and take its part."""
    with ExitStack() as stack:
        if job.engines > 1:
            with suppress(OSError):  # a cleaner of /tmp may have removed the folder: measuring alone is not vital
                fcntl.flock(stack.enter_context(Path(job.lock).open("w")), fcntl.LOCK_EX)
        yield


def share_of(settings: Settings, job: Job) -> Settings:
    """Return the settings of one of several engines: the GPUs in turn, equal parts of memory and cores."""
    if job.engines == 1:
        return settings
    import torch

    from chairlift.execution.build import choose_device

    device, parts, taken = choose_device(settings.model.device), job.engines, 0.0
    ranks = settings.model.tensor_parallel
    if device.type == "cuda" and ranks > 1:
        show_gpus(job.place * ranks, ranks, job.engines)
        return settings
    if device.type == "cuda":
        if settings.model.device == "auto":
            count = torch.cuda.device_count()
            device = torch.device("cuda", job.place % count)
            parts = len(range(job.place % count, job.engines, count))
        # The engine counts what others have taken as taken from its share.
        free, total = torch.cuda.mem_get_info(device)
        taken = 1 - free / total
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // parts))
    share = settings.cache.memory_share or (0.9 if device.type == "cuda" else 0.5)
    return replace(
        settings,
        model=replace(settings.model, device=str(device)),
        cache=replace(settings.cache, memory_share=min(1.0, taken + share / parts)),
    )


def show_gpus(first: int, count: int, engines: int) -> None:
    """Let this process and its ranks see their own GPUs alone; CUDA must not have been used yet."""
    import torch

    found = torch.cuda.device_count()
    if found < engines * count:
        raise SettingsError(
            f"{engines} engines of tensor_parallel {count} need {engines * count} GPUs, but torch finds {found}: lower "
            "--replicas or --tensor-parallel"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(found)))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[first : first + count])


def grammars_of(model: str, loaded: Loaded) -> Grammars:
    """Read the vocabulary of a model for its grammars."""
    tokenizer, missing = read_tokenizer(model, loaded.checkpoint)
    if tokenizer is None:
        raise RequestError(f"structured output needs a tokenizer: {missing}")
    config = loaded.config
    return Grammars(tokenizer, config.vocab_size, sorted(all_eos_ids(tokenizer, config.eos_ids, config.vocab_size)))
