"""A long prompt joins running answers: the longest pause between their tokens, with prefill and decode apart or not.

    python benchmarks/apart.py

It starts `chairlift serve` with the default model on the loopback interface: first with one engine, then with one for
prompts and one for answers, each with one CPU thread. Eight streams run; a prompt of 2,000 tokens is sent after 100
tokens. For each server it prints the gaps between two tokens of one stream before the prompt is sent, while it is
computed, and from its first token to its tenth, and the time to its first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx


@contextmanager
def server(model: str, *flags: str, threads: int) -> Iterator[str]:
    """Run a server; its engines have one thread each."""
    command = [sys.executable, "-m", "chairlift", "serve", model, "--port", "0", "--log-level", "warning", *flags]
    with tempfile.NamedTemporaryFile("w+") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        process = subprocess.Popen(command, stderr=log, env=environment)
        try:
            while not (found := re.search(r"address\s+(http\S+)/v1", Path(log.name).read_text())):
                if process.poll() is not None:
                    raise SystemExit(Path(log.name).read_text())
                time.sleep(0.1)
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
            print(Path(log.name).read_text()[-2000:] if "ERROR" in Path(log.name).read_text() else "", end="")


async def stream(http: httpx.AsyncClient, prompt: list[int], tokens: int, times: list[float]) -> None:
    """Send a request and note when each of its tokens arrives."""
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    async with http.stream("POST", "/v1/completions", json={**body, "return_token_ids": True}) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:]).get("choices")
                times += [time.monotonic()] * len(choices[0].get("token_ids") or ()) if choices else []


def gaps_of(streams: list[list[float]], begin: float, end: float) -> list[float]:
    """Return the times between two tokens of one stream, the second of which arrived in a span, in order of length."""
    return sorted(b - a for times in streams for a, b in pairwise(times) if begin < b <= end) or [0.0]


class Measured(NamedTuple):
    """The gaps of the streams before a newcomer, while its prompt is computed and while it decodes, in seconds."""

    before: list[float]
    during: list[float]
    after: list[float]
    first: float  # the newcomer's time to its first token


async def measure(url: str, streams: int, length: int, seed: int) -> Measured:
    """Let streams run, and send a newcomer."""
    rng = random.Random(seed)

    def prompt(count: int) -> list[int]:
        return [rng.randrange(100, 40_000) for _ in range(count)]

    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        times: list[list[float]] = [[] for _ in range(streams)]
        running = [asyncio.create_task(stream(http, prompt(24), 4000, each)) for each in times]
        while min(map(len, times), default=20) < 20:
            await asyncio.sleep(0.05)
        begin = time.monotonic()
        while min(map(len, times), default=120) < 120:
            await asyncio.sleep(0.05)
        sent = time.monotonic()
        newcomer: list[float] = []
        await stream(http, prompt(length), 10, newcomer)
        end = time.monotonic()
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    spans = ((begin, sent), (sent, newcomer[0]), (newcomer[0], end))
    return Measured(*(gaps_of(times, *span) for span in spans), newcomer[0] - sent)


def shown(gaps: list[float]) -> str:
    """Return the median, the 90th percentile and the longest gap, in milliseconds."""
    return " / ".join(f"{1000 * gaps[int(share * (len(gaps) - 1))]:.0f}" for share in (0.5, 0.9, 1.0))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--only", choices=["one", "apart"])
    parser.add_argument("--serve", default="", help="further flags of chairlift serve")
    chosen = parser.parse_args()
    ways = {"one": ("one engine", ("--replicas", "1"), 1), "apart": ("apart", ("--role", "prefill=1,decode=1"), 2)}
    for name, (words, flags, threads) in ways.items():
        if chosen.only not in (None, name):
            continue
        with server(chosen.model, *flags, *chosen.serve.split(), threads=threads) as url:
            rows = [asyncio.run(measure(url, chosen.streams, chosen.prompt, seed)) for seed in range(chosen.times)]
        for before, during, after, first in rows:
            print(
                f"{words}: gaps of {shown(before)} ms (median / p90 / longest) before the newcomer, {shown(during)} "
                f"during its prompt, {shown(after)} behind it; its first token after {first:.3f} s",
                flush=True,
            )
        print(f"{words}: median time to first token {statistics.median(row.first for row in rows):.3f} s")


if __name__ == "__main__":
    main()
