"""Reads the JSON files of a model: of bounded size, with every failure as one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chairlift.core.errors import ModelError

MAX_BYTES = 32 << 20
"""Several times what the largest index of shards has; Python's objects take up to twenty times as many bytes."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        if not path.is_file():  # opening a pipe would wait for a writer, reading a device may never end
            raise ModelError(f"{path} is not a file: put the model's own there")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ModelError(f"{path} has {size:,} bytes, and at most {MAX_BYTES:,} are read: fetch it again")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ModelError(f"{path} cannot be read: {problem.strerror or problem}") from problem
    except (ValueError, RecursionError) as problem:
        raise ModelError(f"{path} is not JSON ({problem}): delete it and fetch it again") from problem
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object: delete it and fetch it again")
    return value
