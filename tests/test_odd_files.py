"""Files that users give beside models and batches, spoiled: each is read, or is one error of one line."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift.core.errors import ChairliftError
from chairlift.serving.keys import Keyring
from chairlift.traffic import traces, workloads
from mostly_long import mostly_long
from spoil import spoil_bytes, spoil_json

KEYS = """
[[key]]
key = "sk-12345678"
tenant = "alice"
admin = true
max_concurrent = 4
tokens_per_minute = 1000
max_priority = 3
weight = 2.5
ttft = "500ms"

[[key]]
sha256 = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
tenant = "bob"
"""


def lines(*rows: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def spoil_lines(rng: random.Random, content: bytes) -> bytes:
    """Spoil one line of a JSONL file."""
    rows = content.splitlines()
    place = rng.randrange(len(rows))
    rows[place] = spoil_json(rng, rows[place])
    return b"\n".join(rows) + b"\n"


def spoil_toml(rng: random.Random, content: bytes) -> bytes:
    """Give a field of a TOML file another value, or spoil its bytes."""
    if rng.random() < 0.4:
        return spoil_bytes(rng, content)
    rows = content.splitlines()
    place = rng.choice([at for at, row in enumerate(rows) if b" = " in row])
    odd = (
        "0",
        "-1",
        "1" + "0" * 400,
        "1e400",
        "nan",
        "inf",
        "true",
        '""',
        '"x"',
        "[]",
        "[[]]",
        "{a = 1}",
        "2026-01-01",
    )
    rows[place] = rows[place].partition(b" = ")[0] + f" = {rng.choice(odd)}".encode()
    return b"\n".join(rows)


def read_keys(path: Path) -> object:
    return Keyring.read(path, {})


def read_workload(path: Path) -> object:
    return workloads.make(str(path), 0, workloads.Lengths(1, 1, 1), workloads.Lengths(1, 1, 1), 0)


CASES: dict[str, tuple[str, bytes, Callable[[random.Random, bytes], bytes], Callable[[Path], object]]] = {
    "keys": ("keys.toml", KEYS.encode(), spoil_toml, read_keys),
    "arrivals": (
        "trace.jsonl",
        lines(*({"timestamp": 1000 * i, "input_length": 10, "output_length": 5} for i in range(3))),
        spoil_lines,
        traces.read_trace,
    ),
    "dated arrivals": (
        "trace.csv",
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808,10\n2023-11-16 18:17:04.03,3180,8\n",
        spoil_bytes,
        traces.read_trace,
    ),
    "blocks": (
        "blocks.jsonl",
        lines(*({"timestamp": i, "hash_ids": [0, 1, 2 + i]} for i in range(3))),
        spoil_lines,
        lambda path: traces.read_trace(path, traces.with_blocks),
    ),
    "workload": (
        "work.jsonl",
        lines({"prompt": "Hi", "output_tokens": 4}, {"prompt_tokens": [1, 2], "output_tokens": 2})
        + lines({"prompt_tokens": 5, "output_tokens": 2}),
        spoil_lines,
        read_workload,
    ),
}


@pytest.mark.parametrize("kind", mostly_long(CASES, 2))
def test_a_spoiled_file_is_read_or_is_one_error_of_one_line(tmp_path: Path, kind: str) -> None:
    name, content, spoil, read = CASES[kind]
    path = tmp_path / name
    path.write_bytes(content)
    read(path)
    found: Counter[str] = Counter()
    for seed in range(300):
        path.write_bytes(spoil(random.Random(seed), content))
        try:
            read(path)
            found["read"] += 1
        except ChairliftError as error:
            assert str(error) and "\n" not in str(error) and len(str(error)) < 1000, f"seed {seed}: {error!s:.2000}"
            found["refused"] += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    assert found["refused"] > 30 and found["read"] > 3
