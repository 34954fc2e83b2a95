"""Chairlift serves large language models with continuous batching on a paged KV cache.

>>> from chairlift import LLM, SamplingParams  # doctest: +SKIP
>>> LLM().chat([{"role": "user", "content": "Hi!"}], SamplingParams(temperature=0))[0].outputs[0].text  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chairlift.core.errors import ChairliftError
from chairlift.core.params import SamplingParams

if TYPE_CHECKING:
    from chairlift.offline.async_engine import AsyncEngine
    from chairlift.offline.beam_search import BeamSearchParams
    from chairlift.offline.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncEngine", "BeamSearchParams", "ChairliftError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # The core is pure Python: importing it must not import torch.
    if name == "LLM":
        from chairlift.offline.llm import LLM

        return LLM
    if name == "AsyncEngine":
        from chairlift.offline.async_engine import AsyncEngine

        return AsyncEngine
    if name == "BeamSearchParams":
        from chairlift.offline.beam_search import BeamSearchParams

        return BeamSearchParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
