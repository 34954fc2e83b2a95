"""Formats made to explode, sent to a real server beside 16 ordinary streams.

    python benchmarks/structured_hostile.py [--formats 500] [--model M] [--load-format dummy]

It prints how many were refused and served, the longest time of one, and the 99th percentile of the time between two
tokens of the streams, with and without the attack, which take turns. The exit status is 1 if a reply was neither an
answer nor a 400, or if the server is not healthy at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / each) for each in ("serving", ".")]
from running import running  # noqa: E402

STREAMS, ATTACKERS, TURNS = 16, 4, 5


def hostile(rng: random.Random) -> dict[str, Any]:
    """Return a format that costs far more than its size."""
    size, deep = rng.choice((10, 100, 1000)), rng.randint(5, 60)
    letter = rng.choice("abcxyz")
    expressions = (
        f"({letter}|{letter})*" * size + "!",
        "(" * deep + letter + "{1,40})" * deep,
        f"({letter}+{letter}+)+!" * (size // 10 + 1),
        f"(.*.*.*){{{deep},{2 * deep}}}{letter}",
        "|".join(f"{letter}{number}.*{number}" for number in range(size)),
        f"[^{letter}]{{{size * 100},}}",
    )
    nested: dict[str, Any] = {"type": "string"}
    for level in range(deep * 3):
        nested = {"type": "object", "properties": {f"{letter}{level}": nested}, "required": [f"{letter}{level}"]}
    alternatives = [{"anyOf": [{"type": "string", "maxLength": i * j + 1} for i in range(8)]} for j in range(12)]
    schemas: tuple[Any, ...] = (
        {"enum": [f"{letter} {number}" for number in range(20 * size)]},
        {"type": "string", "minLength": 10 ** rng.randint(4, 12)},
        {"type": "array", "minItems": 10 ** rng.randint(4, 9), "items": {"type": "integer"}},
        {"type": "integer", "multipleOf": rng.randint(10**5, 10**9)},
        nested,
        {"allOf": alternatives},
        {"$ref": "#/$defs/r0", "$defs": {f"r{i}": {"$ref": f"#/$defs/r{(i + 1) % deep}"} for i in range(deep)}},
        {"$ref": "#/$defs/t", "$defs": {"t": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/t"}}] * deep}}},
        {"type": "object", "patternProperties": {f"^{letter}{i}.*": {"type": "integer"} for i in range(size)}},
        {"type": "object", "properties": {f"{letter}{i}": {"type": "null"} for i in range(5 * size)}},
    )
    grammars = (
        f'start: a\na: a a | a a a | a b\nb: a? a? a? "{letter}"',
        "start: "
        + " ".join(f"r{i}" for i in range(size))
        + "\n"
        + "\n".join(f'r{i}: "{letter}"*' for i in range(size)),
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(deep)) + f'\nr{deep}: "{letter}"',
        "start: X\nX: /" + f"({letter}|{letter}{letter})*" * deep + "/",
        "start: " + "(" * 10 * deep + f'"{letter}"' + ")*" * 10 * deep,
    )
    kind, choices = rng.choice((("regex", expressions), ("json", schemas), ("grammar", grammars)))
    return {kind: rng.choice(choices)}


async def stream(http: httpx.AsyncClient, gaps: list[float], until: float) -> None:
    """Read one ordinary answer after another, and note the time between tokens."""
    while time.monotonic() < until:
        body = {"prompt": "Once upon a time", "max_tokens": 64, "ignore_eos": True, "stream": True}
        last = None
        async with http.stream("POST", "/v1/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    now = time.monotonic()
                    if last is not None:
                        gaps.append(now - last)
                    last = now
                    if now > until:
                        return


async def attack(
    http: httpx.AsyncClient, rng: random.Random, left: list[int], seen: Counter[str], until: float
) -> None:
    """Send hostile formats until they are used up."""
    while left[0] > 0 and time.monotonic() < until:
        left[0] -= 1
        begun = time.monotonic()
        reply = await http.post("/v1/completions", json={"prompt": [5], "max_tokens": 4, "structured": hostile(rng)})
        seen[str(reply.status_code)] += 1
        seen["longest, ms"] = max(seen["longest, ms"], int(1000 * (time.monotonic() - begun)))
        if reply.status_code not in (200, 400, 429):
            print(reply.status_code, reply.text[:300])


async def run(url: str, formats: int, seconds: float) -> tuple[Counter[str], list[float], list[float]]:
    """Take turns of the streams alone and under attack; return the counts and the gaps of both."""
    seen: Counter[str] = Counter()
    left, rng = [formats], random.Random(16)
    gaps: tuple[list[float], list[float]] = ([], [])
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=64)) as http:
        for turn in range(2 * TURNS):
            until = time.monotonic() + seconds
            works = [stream(http, gaps[turn % 2], until) for _ in range(STREAMS)]
            if turn % 2:
                works += [attack(http, rng, left, seen, until) for _ in range(ATTACKERS)]
            await asyncio.gather(*works)
        while left[0] > 0:  # the rest, without streams
            await asyncio.gather(*(attack(http, rng, left, seen, time.monotonic() + 60) for _ in range(ATTACKERS)))
        seen["healthy"] = (await http.get("/health")).status_code == 200
    return seen, *gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", type=int, default=500)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, with the model's tokenizer")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each turn")
    chosen = parser.parse_args()
    with running(chosen.model, "--log-level", "error", "--load-format", chosen.load_format) as server:
        seen, alone, attacked = asyncio.run(run(server.url, chosen.formats, chosen.seconds))
    print(dict(seen))
    p99 = [statistics.quantiles(each, n=100)[98] for each in (alone, attacked)]
    medians = [statistics.median(each) for each in (alone, attacked)]
    print(
        f"time between tokens of {STREAMS} streams: p99 {1e3 * p99[0]:.0f} ms alone, {1e3 * p99[1]:.0f} ms attacked = "
        f"{p99[1] / p99[0]:.2f}x; median {1e3 * medians[0]:.0f} and {1e3 * medians[1]:.0f} ms = "
        f"{medians[1] / medians[0]:.2f}x"
    )
    wrong = set(seen) - {"200", "400", "429", "healthy", "longest, ms"}
    sys.exit(bool(wrong) or not seen["healthy"])


if __name__ == "__main__":
    main()
