"""What this machine can do: how fast it reads, multiplies, launches and copies, and what a model's steps cost on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from chairlift.core.cost import Cost
from chairlift.costs.calibrate import calibrate
from chairlift.costs.dry_run import dry_run
from chairlift.models.decoder import Decoder

ROWS = (1, 128, 512, 4096)  # tokens in a step: one stream, a batch of decodes, a prompt's chunk, a large one
_READ = {"cpu": 1 << 28, "cuda": 1 << 30}  # bytes: far more than any cache holds
_SQUARE = {"cpu": 1024, "cuda": 8192}  # rows, columns and depth of a product that reaches the machine's full rate
_COPIED = 1 << 28
_LAUNCHES = 200  # fewer than a GPU's queue holds, so that none waits
_PATIENCE = 5.0  # seconds: a product that would take longer is left out
_BLOCK, _BLOCKS = 16, 16  # of the cache that copies of blocks are timed with


@dataclass(frozen=True, slots=True)
class Rates:
    """The two figures that bound everything else."""

    read_bytes_s: float
    flops_s: float  # of a large product in the model's dtype


@dataclass(frozen=True, slots=True)
class Product:
    """How fast so many rows are multiplied by one of a model's matrices, layer after layer."""

    matrix: str
    outputs: int
    inputs: int
    rows: int
    flops_s: float


@dataclass(frozen=True, slots=True)
class Machine:
    """All that was measured; a CPU launches nothing and copies nowhere."""

    device: str
    dtype: str
    threads: int
    rates: Rates
    products: list[Product] = field(default_factory=list)
    launch_s: float | None = None
    to_device_bytes_s: float | None = None
    to_host_bytes_s: float | None = None
    cost: Cost | None = None


def measure_rates(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> Rates:
    """Reading and multiplying alone, for about so many seconds each."""
    held = torch.ones(_READ[device.type] // 4, device=device)  # written: pages never touched are read for nothing
    read = held.numel() * held.element_size() / _best(held.sum, device, seconds)
    size = _SQUARE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    flops = 2 * size**3 / _best(lambda: F.linear(a, b), device, seconds)
    return Rates(read, flops)


@torch.inference_mode()
def measure_machine(decoder: Decoder, tell: Callable[[str], None] = lambda _doing: None) -> Machine:
    """Everything, with the model's own matrices and steps; `tell` hears what is being measured."""
    config, device = decoder.config, decoder.device
    tell("reading and multiplying")
    rates = measure_rates(device, config.dtype)
    products = []
    for name, (outputs, inputs) in matrices(decoder).items():
        tell(f"multiplying by {name}")
        products += _multiply(name, outputs, inputs, 1 if name == "head" else config.layers, config.dtype, device)
    launch, to_device, to_host = None, None, None
    if device.type == "cuda":
        tell("launching and copying")
        launch, (to_device, to_host) = _launch_seconds(device), _copy_rates(device)
    tell("steps of the model")
    cost = _step_cost(decoder)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    kind, threads = str(config.dtype).removeprefix("torch."), torch.get_num_threads()
    return Machine(name, kind, threads, rates, products, launch, to_device, to_host, cost)


def matrices(decoder: Decoder) -> dict[str, tuple[int, int]]:
    """The matrices of a layer, and the head, as [outputs, inputs]."""
    found = {name: linear.shape for name, linear in decoder.blocks[0].linears.items()}
    return {**found, "head": decoder.head.shape}


def _multiply(
    name: str, outputs: int, inputs: int, layers: int, dtype: torch.dtype, device: torch.device
) -> list[Product]:
    weight = torch.randn(outputs, inputs, device=device, dtype=dtype)
    # One after the other, as layers follow each other: the next lies in a cache only where a step would find it there.
    enough = -(-_READ[device.type] // 4 // (weight.numel() * weight.element_size()))
    copies = [weight.clone() for _ in range(min(layers, enough))]
    found: list[Product] = []
    for rows in ROWS:
        work = 2 * rows * outputs * inputs
        used = copies if rows < ROWS[-1] else copies[:1]  # a large product does not depend on where its matrix lies
        if found and work * len(used) / found[-1].flops_s > _PATIENCE:
            break
        x = torch.randn(rows, inputs, device=device, dtype=dtype)
        seconds = _best(_recorded(partial(_pass, x, used), device), device, 0.05)
        found.append(Product(name, outputs, inputs, rows, work * len(used) / seconds))
    return found


def _pass(x: torch.Tensor, weights: list[torch.Tensor]) -> None:
    for weight in weights:
        F.linear(x, weight)


def _recorded(action: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The same without what the host adds to each launch; there is nothing to record on a CPU."""
    if device.type != "cuda":
        return action
    action()  # what is compiled or allocated at first cannot be recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay


def _launch_seconds(device: torch.device) -> float:
    """What the host pays to start a kernel."""
    x = torch.zeros(1, device=device)
    took = []
    for _ in range(10):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(_LAUNCHES):
            x.add_(1)
        took.append(time.perf_counter() - start)
    return min(took) / _LAUNCHES


def _copy_rates(device: torch.device) -> tuple[float, float]:
    """Bytes a second to the device and to the host, from and to pinned memory."""
    host = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    to_device = _best(lambda: there.copy_(host, non_blocking=True), device, 0.2)
    to_host = _best(lambda: host.copy_(there, non_blocking=True), device, 0.2)
    return _COPIED / to_device, _COPIED / to_host


def _step_cost(decoder: Decoder) -> Cost:
    """The cost model, from a few steps that are timed once their kernels have been compiled."""
    for tokens in (1, 128):
        dry_run(decoder, tokens, 1, _BLOCK)
    return calibrate(decoder, decoder.make_cache(_BLOCKS, _BLOCK))


def _best(action: Callable[[], object], device: torch.device, within: float) -> float:
    """Seconds that the device needs for it: the best of as many runs as fit."""
    timed = _device_seconds if device.type == "cuda" else _host_seconds
    best = timed(action)
    stop = time.perf_counter() + within
    while time.perf_counter() < stop:
        best = min(best, timed(action))
    return best


def _host_seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _device_seconds(action: Callable[[], object]) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    action()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000
