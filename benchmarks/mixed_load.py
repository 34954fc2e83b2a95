"""Mixed load on a real server: streams, whole replies, clients that leave, bad requests; memory per 1,000 requests.

    python benchmarks/mixed_load.py --minutes 60

It starts `chairlift serve` with a small random model on the loopback interface, sends from 16 clients, and prints
the resident memory of every process of the server after each 1,000 requests. The exit status is 1 if a reply was wrong,
if the server's counts do not add up at the end, if KV blocks are left in use, or if memory grew by more than a tenth
after the first fifth of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

CLIENTS = 16
PAUSE = 0.5  # seconds, the longest time between a client's requests
ENDS = ("finished", "aborted", "rejected", "failed")


def body_of(rng: random.Random) -> tuple[str, dict[str, Any], int]:
    """Return a path, a body and the status to expect."""
    kind = rng.randrange(10)
    prompt = [rng.randrange(3, 300) for _ in range(rng.choice((3, 20, 200)))]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randint(1, 60), "temperature": rng.choice((0, 1))}
    if kind == 0:
        return "/v1/completions", {**body, "temperature": -1}, 400
    if kind == 1:
        return "/v1/completions", {**body, "prompt": [5] * 5000}, 400
    if kind == 2:
        return "/v1/completions", {**body, "n": 4, "logprobs": 5}, 200
    if kind == 3:
        return "/v1/completions", {**body, "prompt_logprobs": 2, "n": 2}, 200
    if kind == 4:
        return "/v1/completions", {**body, "stop_token_ids": prompt[:3], "bad_words": ["a", "the end"]}, 200
    if kind == 5:
        return "/v1/completions", {**body, "use_beam_search": True, "best_of": 3, "temperature": 0}, 200
    if kind == 6:
        return "/v1/completions", {**body, "prompt": [[7, 8, 9], [10, 11]], "presence_penalty": 0.5}, 200
    return "/v1/completions", {**body, "stream": True}, 200


async def client(url: str, rng: random.Random, until: float, seen: Counter[str], wrong: list[str]) -> None:
    """Send one request after another."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        while time.monotonic() < until and not wrong:
            await asyncio.sleep(rng.uniform(0, PAUSE))
            path, body, expected = body_of(rng)
            leaves = rng.random() < 0.1
            try:
                async with http.stream("POST", path, json=body) as reply:
                    if reply.status_code != expected:
                        wrong.append(f"{reply.status_code}, not {expected}: {(await reply.aread())[:300]!r}")
                        return
                    if not leaves:
                        content = await reply.aread()
                        if body.get("stream") and b"data: [DONE]" not in content[-40:]:
                            wrong.append(f"a stream without an end: {content[-200:]!r}")
                    seen["left" if leaves else str(reply.status_code)] += 1
            except httpx.HTTPError as error:
                wrong.append(f"{type(error).__name__}: {error}")


def processes(root: int) -> dict[int, int]:
    """Return the resident KiB of a process and all its descendants."""
    parents: dict[int, int] = {}
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                parents[int(each.name)] = int((each / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, new = {root}, {root}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    sizes = {}
    for pid in sorted(found):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        sizes[pid] = int(match.group(1)) if (match := re.search(r"VmRSS:\s+(\d+)", status)) else 0
    return sizes


def metrics_of(url: str) -> dict[str, float]:
    page = httpx.get(f"{url}/metrics", timeout=30).text
    lines = (line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("chairlift:"))
    found: Counter[str] = Counter()
    for name, value in lines:
        found[name.partition("{")[0].removeprefix("chairlift:")] += float(value)
    return dict(found)


async def run(url: str, root: int, seconds: float) -> list[str]:
    """Drive the clients, and print memory as requests are done."""
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    until = time.monotonic() + seconds
    tasks = [asyncio.create_task(client(url, random.Random(i), until, seen, wrong)) for i in range(CLIENTS)]
    told, history = 0, []
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0.2)
        if seen.total() // 1000 > told:
            told = seen.total() // 1000
            sizes = processes(root)
            history.append(sum(sizes.values()) / 1024)
            parts = " ".join(f"{size / 1024:,.0f}" for size in sizes.values())
            print(f"{seen.total():>8,} requests, {history[-1]:,.0f} MiB in all processes: {parts}", flush=True)
    await asyncio.gather(*tasks)
    print(f"{seen.total():,} requests: {dict(seen)}")
    if len(history) > 5:
        early, late = max(history[: len(history) // 5 + 1]), max(history[-3:])
        print(f"memory: {early:,.0f} MiB in the first fifth, {late:,.0f} MiB at the end")
        if late > 1.1 * early:
            wrong.append(f"memory grew from {early:,.0f} to {late:,.0f} MiB")
    return wrong


def main() -> None:
    """Start a server, load it, and check what is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--port", type=int, default=8123)
    chosen = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from tiny import make_tiny_model

    url = f"http://127.0.0.1:{chosen.port}"
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "tiny")
        command = [sys.executable, "-m", "chairlift", "serve", "--model", str(model), "--port", str(chosen.port)]
        server = subprocess.Popen([*command, "--max-length", "512", "--log-level", "error"], env=os.environ)
        try:
            for _ in range(600):
                try:
                    if httpx.get(f"{url}/health").status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                time.sleep(0.2)
            wrong = asyncio.run(run(url, server.pid, 60 * chosen.minutes))
            time.sleep(2)
            found = metrics_of(url)
            ends = {name: found.get(f"requests_{name}_total", 0) for name in ENDS}
            print(
                f"submitted {found['requests_submitted_total']:,.0f} = {ends}; KV in use {found['kv_cache_usage_perc']}"
            )
            if found["requests_submitted_total"] != sum(ends.values()):
                wrong.append("submitted is not the sum of all ends")
            if found["kv_cache_usage_perc"]:
                wrong.append("KV blocks are in use with no request")
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
