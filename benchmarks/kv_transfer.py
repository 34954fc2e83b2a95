"""KV blocks from one process to another, as prefill engines send them: bytes per second, by each way.

    python benchmarks/kv_transfer.py --device cuda          # CUDA IPC: two processes on one GPU
    python benchmarks/kv_transfer.py --device cpu --way tcp
    UCX_TLS=tcp UCX_NET_DEVICES=lo python benchmarks/kv_transfer.py --device cpu --way tcp     # NIXL if installed

The blocks are those of Llama-3.1-8B (32 layers, 8 KV heads of 128, bfloat16) on a GPU, and of the default model on a
CPU. Each prompt is sent in one piece, as a step has computed it, and timed until the receiver's cache has it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from chairlift.cluster.kv_transfer.incoming import Incoming
from chairlift.cluster.kv_transfer.outgoing import Outgoing
from chairlift.cluster.kv_transfer.region import ways_between
from chairlift.core.blocks import BlockPool
from chairlift.core.cache_groups import CacheGroups
from chairlift.core.plan import StepPlan
from chairlift.core.prefix_cache import PrefixCache
from chairlift.core.prefix_node import packed
from chairlift.core.prefixes import PrefixBinding
from chairlift.execution.exchange import BlockExchange
from chairlift.ops.kv_cache import KvCache

KEY = b"a key of the benchmark"


def make(device: torch.device, tokens: int) -> tuple[KvCache, int]:
    """Return a cache for one prompt, and its block size."""
    if device.type == "cuda":
        size = 32
        return KvCache(32, tokens // size, 8, 128, size, torch.bfloat16, device), size
    size = 16
    return KvCache(30, tokens // size, 3, 64, size, torch.float32, device), size


def receive(address: str, device: torch.device, tokens: int) -> None:
    """Take blocks into a cache until the parent process ends."""
    cache, size = make(device, tokens)
    blocks, pool = BlockExchange(cache), BlockPool(tokens // size, size)
    tree = PrefixCache(pool)
    binding = PrefixBinding(pool, tree, CacheGroups((0,), size, 1))
    incoming = Incoming(address, KEY, "same", size, tree.exchange, blocks)
    print("ready", flush=True)
    while True:
        while not tree.exchange.arrived:
            time.sleep(0.0001)
        incoming.hear()
        plan = StepPlan()
        binding.take_in(plan, 1 << 20)
        binding.plan_moves(plan)
        if plan.received:
            blocks.receive(plan.received)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # as `collect` waits for a step
        binding.confirm(plan)
        read, tree.exchange.read = tree.exchange.read, []
        blocks.free(read)


def main() -> None:
    """Send prompts and print the rate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--way", choices=["local", "tcp"], default="local", help="local: CUDA IPC or shared memory")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    if chosen.receive:
        receive(chosen.receive, device, chosen.tokens)
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{Path(folder)}/kv" if chosen.way == "local" else "tcp:127.0.0.1:29417"
        arguments = ["--device", chosen.device, "--tokens", str(chosen.tokens), "--receive", address]
        other = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE)
        try:
            assert other.stdout is not None and other.stdout.readline() == b"ready\n"
            send(address, device, chosen.tokens, chosen.times)
        finally:
            other.kill()


def send(address: str, device: torch.device, tokens: int, times: int) -> None:
    """Send prompts one after the other, each with tokens of its own."""
    cache, size = make(device, tokens)
    cache.data.normal_() if cache.data.is_floating_point() else cache.data.fill_(1)
    outgoing = Outgoing(KEY, "same", size, BlockExchange(cache))
    table, seconds = list(range(tokens // size)), []
    for number in range(times + 2):
        outgoing.begin(str(number), address, "", packed([number * tokens + i for i in range(tokens)]))
        begun = time.perf_counter()
        outgoing.computed(str(number), table, tokens)
        outgoing.finish(str(number))
        while not outgoing.take_done():
            time.sleep(0.00005)
        seconds.append(time.perf_counter() - begun)
    assert outgoing.sent == (times + 2) * len(table), "a connection was lost"
    size_bytes = len(table) * BlockExchange(cache).block_bytes
    median = statistics.median(seconds[2:])
    print(
        f"{ways_between(address, device)[0]}: "
        f"{tokens:,} tokens, {size_bytes / 1e6:.0f} MB: median {1000 * median:.2f} ms ({size_bytes / median / 1e9:.1f} "
        f"GB/s), fastest {1000 * min(seconds[2:]):.2f} ms"
    )


if __name__ == "__main__":
    main()
