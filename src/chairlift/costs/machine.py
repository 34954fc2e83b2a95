"""Measured rates of this machine: memory bandwidth, products, kernel launches, copies, and a model's step times."""

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

ROWS = (1, 128, 512, 4096)  # tokens in a step: one decode, a batch of decodes, a prompt chunk, a large one
_READ = {"cpu": 1 << 28, "cuda": 1 << 30}  # bytes, far more than any cache
_SQUARE = {"cpu": 1024, "cuda": 8192}  # rows, columns and depth of a product at the machine's full rate
_COPIED = 1 << 28
_LAUNCHES = 200  # fewer than a GPU's launch queue holds, so that no launch waits
_PATIENCE = 5.0  # seconds: a product that would take longer is skipped
_BLOCK, _BLOCKS = 16, 16  # block size and number of blocks of the cache for timing copies


@dataclass(frozen=True, slots=True)
class Rates:
    """Memory bandwidth and FLOP rate."""

    read_bytes_s: float
    flops_s: float  # of a large product in the model's dtype


@dataclass(frozen=True, slots=True)
class ProductRate:
    """The FLOP rate of `rows` rows times one of a model's matrices, over all layers in sequence."""

    matrix: str
    outputs: int
    inputs: int
    rows: int
    flops_s: float


@dataclass(frozen=True, slots=True)
class Machine:
    """All measurements; launch and copy rates are None on a CPU."""

    device: str
    dtype: str
    threads: int
    rates: Rates
    products: list[ProductRate] = field(default_factory=list)
    launch_s: float | None = None
    to_device_bytes_s: float | None = None
    to_host_bytes_s: float | None = None
    cost: Cost | None = None


def measure_rates(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> Rates:
    """Measure memory bandwidth and FLOP rate, for about `seconds` each."""
    held = torch.ones(_READ[device.type] // 4, device=device)  # written, since untouched pages are not read from memory
    read = held.numel() * held.element_size() / _best(held.sum, device, seconds)
    size = _SQUARE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    flops = 2 * size**3 / _best(lambda: F.linear(a, b), device, seconds)
    return Rates(read, flops)


@torch.inference_mode()
def measure_machine(decoder: Decoder, tell: Callable[[str], None] = lambda _doing: None) -> Machine:
    """Measure everything, with the model's own matrices and steps; `tell` is called with the current measurement."""
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
    """Return the shapes [outputs, inputs] of a layer's matrices and of the head."""
    found = {name: linear.shape for name, linear in decoder.blocks[0].linears.items()}
    return {**found, "head": decoder.head.shape}


def _multiply(
    name: str, outputs: int, inputs: int, layers: int, dtype: torch.dtype, device: torch.device
) -> list[ProductRate]:
    weight = torch.randn(outputs, inputs, device=device, dtype=dtype)
    # A copy per layer, used in sequence, so that a matrix is in a cache only if it would be in a real step.
    enough = -(-_READ[device.type] // 4 // (weight.numel() * weight.element_size()))
    copies = [weight.clone() for _ in range(min(layers, enough))]
    found: list[ProductRate] = []
    for rows in ROWS:
        work = 2 * rows * outputs * inputs
        used = copies if rows < ROWS[-1] else copies[:1]  # caches do not matter for a large product
        if found and work * len(used) / found[-1].flops_s > _PATIENCE:
            break
        x = torch.randn(rows, inputs, device=device, dtype=dtype)
        seconds = _best(_recorded(partial(_pass, x, used), device), device, 0.05)
        found.append(ProductRate(name, outputs, inputs, rows, work * len(used) / seconds))
    return found


def _pass(x: torch.Tensor, weights: list[torch.Tensor]) -> None:
    for weight in weights:
        F.linear(x, weight)


def _recorded(action: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return the action as a CUDA graph, without the host's launch time; on a CPU unchanged."""
    if device.type != "cuda":
        return action
    action()  # first-time compilation and allocation cannot be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay


def _launch_seconds(device: torch.device) -> float:
    """Return the host's time to launch a kernel."""
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
    """Return bytes per second to the device and to the host, with pinned memory."""
    host = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    to_device = _best(lambda: there.copy_(host, non_blocking=True), device, 0.2)
    to_host = _best(lambda: host.copy_(there, non_blocking=True), device, 0.2)
    return _COPIED / to_device, _COPIED / to_host


def _step_cost(decoder: Decoder) -> Cost:
    """Calibrate the cost model, after compiling the kernels."""
    for tokens in (1, 128):
        dry_run(decoder, tokens, 1, _BLOCK)
    return calibrate(decoder, decoder.make_cache(_BLOCKS, _BLOCK))


def _best(action: Callable[[], object], device: torch.device, within: float) -> float:
    """Return the shortest device time of as many runs as fit in `within` seconds."""
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
