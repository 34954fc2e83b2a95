"""Chats over HTTP on replicas of one model, under two routing policies: the time to first token of each.

    python benchmarks/routing_http.py [--model smollm2-135m] [--replicas 2] [--sessions 64] [--turns 5] [--at-once 4]

Each session begins with tokens of its own and sends its whole history with every turn. The server is started once for
each policy, as a user would start it, with the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING

from chairlift.bench.http import Reply, Server, exchange, get
from chairlift.report.numbers import percentile

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCABULARY = 10_000


@contextmanager
def serving(given: argparse.Namespace, policy: str) -> Iterator[str]:
    """Start a server and yield its URL."""
    command = [sys.executable, "-m", "chairlift", "serve", given.model, "--port", "0", "--log-level", "error"]
    command += ["--replicas", str(given.replicas), "--routing", policy, "--kv-tokens", str(given.kv_tokens)]
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log)
        try:
            while not (found := re.search(r"address\s+(http\S+)/v1", Path(log.name).read_text())):
                assert process.poll() is None, Path(log.name).read_text()
                time.sleep(0.1)
            yield found[1]
        finally:
            process.terminate()
            process.wait()


async def ask(server: Server, prompt: list[int], answer: int) -> tuple[float, list[int]]:
    """Return the seconds to the first token, and the answer's tokens."""
    body = {"prompt": prompt, "max_tokens": answer, "temperature": 0, "ignore_eos": True, "stream": True}
    body["return_token_ids"] = True
    start, first, raw = time.perf_counter(), 0.0, b""

    def take(part: bytes) -> bool:
        nonlocal first, raw
        first = first or time.perf_counter() - start
        raw += part
        return b"data: [DONE]" in raw

    request = server.write("POST", "/v1/completions", json.dumps(body).encode())
    await exchange(server, request, reply := Reply(), take)
    assert reply.status == 200, str(reply)
    events = [line[6:] for line in raw.decode().splitlines() if line.startswith("data: {")]
    tokens = [token for event in events for choice in json.loads(event)["choices"] for token in choice["token_ids"]]
    return first, tokens


async def chat(url: str, given: argparse.Namespace) -> list[float]:
    """Run all sessions; return the time to first token of every turn after the first."""
    server, gate, times = Server.parse(url), asyncio.Semaphore(given.at_once), list[float]()
    draw = Random(1)
    histories = [[draw.randrange(VOCABULARY) for _ in range(given.history)] for _ in range(given.sessions)]

    async def turn(number: int, history: list[int], question: list[int]) -> None:
        async with gate:
            history += question
            took, tokens = await ask(server, history, given.answer)
            history += tokens
            if number:
                times.append(took)

    for number in range(given.turns):
        questions = [[draw.randrange(VOCABULARY) for _ in range(given.question)] for _ in histories]
        order = draw.sample(range(given.sessions), given.sessions)  # people do not take turns
        await asyncio.gather(*(turn(number, histories[each], questions[each]) for each in order))
    return times


def hit_rate(page: str) -> float:
    """Return the share of prompt tokens that the replicas found in their prefix caches."""

    def total(name: str) -> float:
        return sum(float(value) for value in re.findall(rf"^chairlift:{name}\{{.*\}} (\S+)$", page, re.MULTILINE))

    return total("prefix_cache_hits_total") / total("prefix_cache_queries_total")


def main() -> None:
    """Print a line for each policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    for name, default in (("replicas", 2), ("sessions", 64), ("turns", 5), ("at-once", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("history", 200), ("question", 30), ("answer", 8), ("kv-tokens", 40_000)):
        parser.add_argument(f"--{name}", type=int, default=default, help="tokens")
    given = parser.parse_args()
    for policy in ("round-robin", "cache-aware"):
        with serving(given, policy) as url:
            times = asyncio.run(chat(url, given))
            page = bytes(asyncio.run(get(Server.parse(url), "/metrics")).body).decode()
        p50, p95 = median(times), percentile(times, 95)
        print(
            f"{policy:12} first token of turns 2 to {given.turns}: p50 {1000 * p50:.0f} ms, p95 {1000 * p95:.0f} ms; "
            f"prefix hits {hit_rate(page):.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
