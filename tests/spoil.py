"""Spoiled bytes and JSON, each a function of a random generator: what torn files and hostile authors send."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

HUGE = (50_000_000, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 7, -(2**63), 2**64, 10**400, *HUGE),
    *(0.0, -0.5, 0.1, 1e-300, 1e300, float("nan"), float("inf"), -float("inf"), 2.5),
    *("", "x", "1", "0x10", "\n", "a\nb", "\x00", "\ud800", "../../etc/passwd", "/etc/passwd", "x" * 5000, "❄"),
    *([], [None], [1, 2], ["a"], [[]], [1e300], [-1], {}, {"": None}, {"a": {"b": []}}, {"type": "linear"}),
)


def spoil_bytes(rng: random.Random, content: bytes) -> bytes:
    """Change a few bytes, cut the file, write a huge number over some bytes, or insert bytes; mostly near the front."""
    damaged = bytearray(content or b"\0")
    end = min(len(damaged), rng.choice((200, 2000, len(damaged))))
    at = rng.randrange(end)
    match rng.randrange(5):
        case 0:
            return bytes(damaged[:at])
        case 1:
            damaged[at : at + 8] = struct.pack("<Q", rng.choice(HUGE))
        case 2:
            damaged[at:at] = rng.randbytes(rng.randint(1, 40))
        case _:
            for _ in range(rng.randint(1, 4)):
                damaged[rng.randrange(end)] = rng.choice((0, 1, 8, 9, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(damaged)


def spoil_value(rng: random.Random, value: Any) -> Any:
    """A copy of a JSON value in which one thing is of another type, out of range, renamed, removed or wrapped."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.97:
        copy: Any = dict(value) if isinstance(value, dict) else list(value)
        key = rng.choice(list(copy)) if isinstance(copy, dict) else rng.randrange(len(copy))
        kind = rng.randrange(12)
        if kind == 0:
            del copy[key]
        elif kind == 1 and isinstance(copy, dict):
            copy[rng.choice(("", "x", "\n", "999999999", str(key).upper()))] = copy.pop(key)
        else:
            copy[key] = spoil_value(rng, copy[key])
        return copy
    return [value] if rng.random() < 0.1 else rng.choice(ODD)


def spoil_json(rng: random.Random, content: bytes) -> bytes:
    """Damage a JSON file in its text or, mostly, in its values."""
    kind, value = rng.randrange(12), json.loads(content)
    if kind == 0:
        return spoil_bytes(rng, content)
    if kind == 1:  # deeper than Python's own stack
        return b"[" * 100_000 + content + b"]" * 100_000
    spoiled = spoil_value(rng, value)
    if kind == 2 and isinstance(spoiled, dict) and spoiled:  # every key twice
        return (json.dumps(value)[:-1] + ", " + json.dumps(spoiled)[1:]).encode()
    if kind == 3:
        spoiled = spoil_value(rng, spoiled)
    return json.dumps(spoiled).encode()
