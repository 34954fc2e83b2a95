"""Replicas on Ray that follow the load: their number, the queue and the time to first token over time, as a picture.

    python benchmarks/ray_autoscaling.py --plot docs/images/autoscaling.svg

It starts a Ray cluster on this machine, and `chairlift serve --on ray --replicas 1..3` with a small shape and random
weights. Clients that ask again and again become more, stay, become fewer, and a few stay until one replica is left. The
exit status is 1 if a request was not answered in full, or if the replicas did not go to three and back to one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
from ray.cluster_utils import Cluster

from chairlift.report.svg import chart, stacked

MOST = 3  # replicas
FEW = 2  # clients before and after the load
PROMPT, ANSWER = 400, 60  # tokens
BUCKET = 5.0  # seconds, of times to first token
_START_SECONDS = 300.0
_LONGEST = 600.0  # seconds after the load until one replica is left


@dataclass(slots=True)
class Seen:
    """Everything that was measured, with seconds since the start."""

    start: float = field(default_factory=time.monotonic)
    clients: list[tuple[float, float]] = field(default_factory=list)
    ready: list[tuple[float, float]] = field(default_factory=list)  # replicas
    queued: list[tuple[float, float]] = field(default_factory=list)  # prompt tokens
    firsts: list[tuple[float, float]] = field(default_factory=list)  # when a request was sent, time to first token
    ends: Counter[str] = field(default_factory=Counter)

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start


@contextmanager
def serving(queued_tokens: int, rows: int) -> Iterator[str]:
    """Run a cluster and the server on it; yield the server's URL."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": MOST, "include_dashboard": False, "object_store_memory": 80 << 20},
    )
    command = [sys.executable, "-m", "chairlift", "serve", "stories15m", "--load-format", "dummy", "--port", "0"]
    command += ["--on", "ray", "--replicas", f"1..{MOST}", "--log-level", "warning"]
    command += ["--queued-tokens", str(queued_tokens), "--max-sequences", str(rows), "--kv-tokens", "16384"]
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, "RAY_ADDRESS": cluster.address})
        try:
            until = time.monotonic() + _START_SECONDS
            while not (found := re.search(r"address\s+(http\S+)/v1", Path(log.name).read_text())):
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(Path(log.name).read_text())
                time.sleep(0.1)
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            cluster.shutdown()
            print(Path(log.name).read_text()[-4000:], end="")


async def ask(http: httpx.AsyncClient, seen: Seen, rng: random.Random) -> None:
    """Stream one answer, and note how it ended."""
    prompt = [rng.randrange(100, 30_000) for _ in range(PROMPT)]
    body = {"prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True, "stream": True, "return_token_ids": True}
    sent, tokens, end = seen.now, 0, "cut off"
    try:
        async with http.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                seen.ends[f"status {reply.status_code}"] += 1
                return
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    end = "answered in full" if tokens == ANSWER else f"{tokens} tokens" if end == "cut off" else end
                elif line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        end = "error event"
                    for choice in event.get("choices", ()):
                        if not tokens:
                            seen.firsts.append((sent, seen.now - sent))
                        tokens += len(choice["token_ids"])
    except httpx.HTTPError as error:
        end = type(error).__name__
    seen.ends[end] += 1


def clients_at(now: float, ramp: float, most: int) -> int:
    """Return how many clients ask: few, more and more, most of them for a while, fewer and fewer, few.

    >>> [clients_at(now, 100, 42) for now in (0, 20, 70, 120, 200, 270, 400)]
    [2, 2, 22, 42, 42, 22, 2]
    """
    rising, falling = (now - 0.2 * ramp) / ramp, (3.2 * ramp - now) / ramp
    return FEW + round((most - FEW) * max(0.0, min(1.0, rising, falling)))


async def run(url: str, seen: Seen, ramp: float, most: int) -> None:
    """Send the load until one replica is left after it, or for too long."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:

        async def client(number: int) -> None:
            rng = random.Random(number)
            while seen.now < end:
                if number < clients_at(seen.now, ramp, most):
                    await ask(http, seen, rng)
                else:
                    await asyncio.sleep(0.1)

        end = 3.2 * ramp + _LONGEST
        clients = [asyncio.create_task(client(number)) for number in range(most)]
        while seen.now < end:
            page = (await http.get("/metrics")).text
            ready, queued = (total(page, name) for name in ("replica_up", "replica_queued_tokens"))
            now = seen.now
            seen.clients.append((now, clients_at(now, ramp, most)))
            seen.ready.append((now, ready))
            seen.queued.append((now, queued))
            if now > 3.2 * ramp and ready == 1:
                end = min(end, now + 10)
            await asyncio.sleep(1)
        await asyncio.gather(*clients)


def total(page: str, name: str) -> float:
    """Return the sum of a metric over the replicas."""
    return sum(float(value) for value in re.findall(rf"^chairlift:{name}\{{.*\}} (\S+)$", page, re.MULTILINE))


def picture(seen: Seen, queued_tokens: int) -> str:
    """Draw what was measured."""
    medians: list[tuple[float, float]] = []
    for place in range(int(seen.now / BUCKET) + 1):
        found = [took for sent, took in seen.firsts if place <= sent / BUCKET < place + 1]
        medians.append(((place + 0.5) * BUCKET, median(found) if found else float("nan")))
    bound = [(at, queued_tokens * ready) for at, ready in seen.ready]
    waiting = {"waiting": seen.queued, "--queued-tokens of each replica that serves": bound}
    return stacked(
        [
            chart("Clients that ask again and again", "clients", {"clients": seen.clients}),
            chart("Replicas that serve", "replicas", {"ready": seen.ready}),
            chart("Prompt tokens of requests without a first token", "tokens", waiting),
            chart(
                f"Time to first token, median of {BUCKET:g} s by the time of sending", "seconds", {"median": medians}
            ),
        ]
    )


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=42, help="at the peak")
    parser.add_argument("--ramp", type=float, default=60.0, help="seconds in which the clients become as many")
    parser.add_argument("--queued-tokens", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=8, help="of each replica's batch")
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    with serving(given.queued_tokens, given.rows) as url:
        asyncio.run(run(url, seen := Seen(), given.ramp, given.clients))
    before = 1.0
    for at, ready in seen.ready:
        if ready != before:
            print(f"after {at:5.0f} s: {ready:.0f} replicas serve, {clients_at(at, given.ramp, given.clients)} clients")
        before = ready
    took = sorted(took for _, took in seen.firsts)
    print(f"time to first token: median {median(took):.2f} s, longest {took[-1]:.2f} s")
    print(f"{seen.ends.total():,} requests: {dict(seen.ends)}")
    if given.plot is not None:
        given.plot.write_text(picture(seen, given.queued_tokens))
    counts = [ready for _, ready in seen.ready]
    sys.exit(set(seen.ends) != {"answered in full"} or max(counts) != MOST or counts[-1] != 1)


if __name__ == "__main__":
    main()
