"""Recorded traces: arrival times, and lengths or block ids of requests, in the formats of published traces."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from chairlift.core.errors import ChairliftError
from chairlift.core.values import MOST_COUNT, one_line, show
from chairlift.traffic.query import Query

BLOCK_TOKENS = 512  # tokens per block in Mooncake's format; `serve --record` writes its own number
# Names of the arrival time, prompt length and answer length in each format, and seconds per unit of time.
COLUMNS: tuple[tuple[str, str, str, float], ...] = (
    ("timestamp", "prompt_tokens", "output_tokens", 1.0),  # our own
    ("timestamp", "input_length", "output_length", 0.001),  # Mooncake
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens", 1.0),  # Azure
    ("Timestamp", "Request tokens", "Response tokens", 1.0),  # BurstGPT
)


def with_lengths(row: Any) -> Query:
    """Read a request with an arrival time and lengths."""
    if not isinstance(row, dict):
        raise ValueError("it is not an object with a timestamp and lengths")
    for moment, prompt, output, unit in COLUMNS:
        if moment in row and prompt in row and output in row:
            at = _seconds(row[moment], unit)
            length, answer = _length(prompt, row[prompt]), _length(output, row[output])
            found = Query(length, answer, at, blocks=with_blocks(row).blocks if "hash_ids" in row else ())
            return _of_server(found, row) if "block_tokens" in row else found
    known = "; ".join(", ".join(names) for *names, _unit in COLUMNS)
    raise ValueError(f"it has {', '.join(map(str, row)) or 'nothing'}, and needs one of: {known}")


def _of_server(query: Query, row: dict[str, Any]) -> Query:
    """Add what only `chairlift serve --record` writes."""
    block, priority = row["block_tokens"], row.get("priority", 0)
    if type(block) is not int or not 0 < block <= MOST_COUNT:
        raise ValueError(f"block_tokens is {show(block)}, not a number of tokens")
    if len(query.blocks) * block > query.prompt_tokens:
        raise ValueError(f"its {len(query.blocks):,} hash_ids of {block} tokens are more than its prompt")
    if type(priority) is not int:
        raise ValueError(f"its priority is {show(priority)}, not a whole number")
    names = {name: row.get(name, "") for name in ("tenant", "endpoint")}
    for name, value in names.items():
        if not isinstance(value, str):
            raise ValueError(f"its {name} is {show(value)}, not a text")
    return replace(query, block_tokens=block, priority=priority, **names)


def with_blocks(row: Any) -> Query:
    """Read a request of Mooncake's format, with an arrival time and the block ids of its prompt."""
    match row:
        case {"timestamp": int() | float() as at, "hash_ids": [*ids]} if math.isfinite(at):
            for each in ids:
                if type(each) is not int:
                    raise ValueError(f"its hash_ids hold {json.dumps(each)[:40]}, which is not a whole number")
            if len(set(ids)) < len(ids):
                raise ValueError("its hash_ids have a duplicate, but an id stands for a whole prefix")
            return Query(BLOCK_TOKENS * len(ids), 1, at / 1000, blocks=ids)
        case {"timestamp": _, "hash_ids": [*_]}:
            raise ValueError(f"its timestamp is {json.dumps(row['timestamp'])[:40]}, which is not a number")
        case {"timestamp": _, "hash_ids": _}:
            raise ValueError(f"its hash_ids are {json.dumps(row['hash_ids'])[:40]}, which is not a list")
        case dict():
            raise ValueError(f"it has no {'hash_ids' if 'timestamp' in row else 'timestamp'}")
    raise ValueError("it is not an object")


def read_trace(
    path: Path, read: Callable[[Any], Query] = with_lengths, noun: str = "arrival", advice: str = ""
) -> list[Query]:
    """Read a recording, JSONL or CSV with a header, sorted by arrival; times are relative to the first request."""
    found: list[Query] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, row in _rows(file, is_csv=path.suffix.lower() == ".csv"):
                try:
                    found.append(read(json.loads(row) if isinstance(row, str) else row))
                except (ValueError, TypeError, OverflowError, RecursionError) as error:
                    reason = (
                        f"it is not JSON ({error.msg})" if isinstance(error, json.JSONDecodeError) else one_line(error)
                    )
                    raise ChairliftError(f"{path}, line {number}, is not a valid {noun}: {reason}{advice}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        is_text = not isinstance(error, UnicodeDecodeError)
        what = getattr(error, "strerror", error) if is_text else "it is not text in UTF-8"
        raise ChairliftError(f"{path} cannot be read: {what}{advice}") from None
    if not found:
        raise ChairliftError(f"{path} holds no {noun}s{advice}")
    found.sort(key=lambda each: each.at)
    return [replace(each, at=each.at - found[0].at) for each in found]


def _rows(file: Iterable[str], is_csv: bool) -> Iterator[tuple[int, str | dict[str, Any]]]:
    """Yield each non-empty line with its number."""
    if not is_csv:
        yield from ((number, text) for number, text in enumerate(file, 1) if text.strip())
        return
    lines = csv.DictReader(file)
    for row in lines:
        yield lines.line_num, row


def _seconds(value: Any, unit: float) -> float:
    """Convert a time to seconds: a number of units, or a date and time."""
    try:
        at = float(value) * unit
    except ValueError:
        try:
            date = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError(f"its time is {show(value)}, neither a number nor a date") from None
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    except TypeError:
        raise ValueError(f"its time is {show(value)}, neither a number nor a date") from None
    if not math.isfinite(at):
        raise ValueError(f"its time is {show(value)}, which is not finite")
    return at


def _length(name: str, value: Any) -> int:
    try:
        found = int(value)
    except (ValueError, TypeError, OverflowError):
        found = -1
    if not 0 <= found <= MOST_COUNT or isinstance(value, bool):
        raise ValueError(f"{name} is {show(value)}, not a number of tokens up to {MOST_COUNT:,}")
    return max(found, 1)  # a recorded request with an empty answer still counts
