"""The engines of a benchmark, ours included, each in its own process.

Separate processes separate memory peaks and thread pools, and allow each engine its own interpreter. A process loads
once, reports that it is ready, and then runs the workload on each command, so that runs of two engines interleave.
Nothing here may import more than the standard library before an engine is loaded.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any, Protocol, cast


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The parameters to load an engine with."""

    model: str  # an argument of LLM for ours, a Hugging Face folder for the others
    scratch: str  # a folder for converted models
    device: str
    threads: int
    longest: int  # prompt and output tokens of the longest request
    total: int  # prompt and output tokens of all requests
    # For ours only.
    settings: dict[str, Any] = field(default_factory=dict)
    temperature: float = 0.0
    profile_steps: bool = False
    record_steps: str = ""  # a file for every step of all runs
    record_view: str = ""  # a file of the first run, for the live page
    # For the others, the values that ours chose.
    dtype: str = ""
    max_sequences: int = 0
    step_tokens: int = 0


@dataclass(slots=True)
class Finished:
    """One finished request: its tokens, and the times of the first and last on time.monotonic."""

    tokens: list[int]
    first: float
    last: float


class Unavailable(Exception):  # noqa: N818  # not an error: the table shows the reason
    """Why an engine cannot run here."""


class Peer(Protocol):
    """An engine under test; its constructor loads the model."""

    def __init__(self, task: Task) -> None: ...

    def describe(self) -> dict[str, Any]:
        """Return the engine's version and settings."""
        ...

    def run(self, prompts: list[list[int]], outputs: list[int]) -> list[Finished]:
        """Answer all prompts greedily, each with exactly the given number of tokens."""
        ...


# The class of each engine; its module is imported only in its own process.
PEERS = {
    "chairlift": "chairlift.bench.peers.ours:Ours",
    "transformers": "chairlift.bench.peers.hf:Continuous",
    "transformers-static": "chairlift.bench.peers.hf:Static",
    "openvino": "chairlift.bench.peers.ov:Continuous",
    "openvino-stateful": "chairlift.bench.peers.ov:Stateful",
}
# The engine to run instead of an unavailable one.
FALLBACKS = {"transformers": "transformers-static", "openvino": "openvino-stateful"}


def load(name: str, task: Task) -> Peer:
    """Import and load an engine."""
    module, _, kind = PEERS[name].partition(":")
    try:
        found = getattr(importlib.import_module(module), kind)
        return cast(Peer, found(task))
    except ImportError as error:
        raise Unavailable(f"not installed: {error}") from error
