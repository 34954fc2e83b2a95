"""The engines that a benchmark runs, ours among them, each in a process of its own.

A process of its own keeps memory peaks and thread pools apart and lets each engine have its own interpreter. It loads
once, says that it is ready, and then runs the workload whenever it is told to, so that runs of two engines interleave.
Nothing here may import anything beyond the standard library before an engine is asked for.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any, Protocol, cast


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What an engine needs to get ready."""

    model: str  # what LLM takes for ours, a Hugging Face folder for the others
    scratch: str  # a folder for what an engine makes of the model
    device: str
    threads: int
    longest: int  # prompt and answer of the longest request
    total: int  # prompt and answer tokens of all requests
    # For ours alone.
    settings: dict[str, Any] = field(default_factory=dict)
    temperature: float = 0.0
    profile_steps: bool = False
    # For the others, what ours came to.
    dtype: str = ""
    max_sequences: int = 0
    step_tokens: int = 0


@dataclass(slots=True)
class Finished:
    """One answered request: its tokens, and when they came, in seconds of time.monotonic."""

    tokens: list[int]
    first: float
    last: float


class Unavailable(Exception):  # noqa: N818  # not an error: the table shows the reason
    """Why an engine cannot run here."""


class Peer(Protocol):
    """An engine under test; its constructor loads the model."""

    def __init__(self, task: Task) -> None: ...

    def describe(self) -> dict[str, Any]:
        """What it is and how it was set up."""
        ...

    def run(self, prompts: list[list[int]], outputs: list[int]) -> list[Finished]:
        """Answer all prompts, greedily, each with exactly as many tokens as asked."""
        ...


# Where each engine's class is; its module is imported in its own process alone.
PEERS = {
    "chairlift": "chairlift.bench.peers.ours:Ours",
    "transformers": "chairlift.bench.peers.hf:Continuous",
    "transformers-static": "chairlift.bench.peers.hf:Static",
    "openvino": "chairlift.bench.peers.ov:Continuous",
    "openvino-stateful": "chairlift.bench.peers.ov:Stateful",
}
# What to run instead of an engine that is not available here.
FALLBACKS = {"transformers": "transformers-static", "openvino": "openvino-stateful"}


def load(name: str, task: Task) -> Peer:
    """Import an engine and get it ready."""
    module, _, kind = PEERS[name].partition(":")
    try:
        found = getattr(importlib.import_module(module), kind)
        return cast(Peer, found(task))
    except ImportError as error:
        raise Unavailable(f"not installed: {error}") from error
