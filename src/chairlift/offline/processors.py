"""Logits processors: a caller's functions, wrapped so that an error in one ends only its own request."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch


class SafeProcessor:
    """One request's processor: an error in it ends that request and no other.

    After an error it returns the logits unchanged and calls `on_error`, which ends the request.
    """

    def __init__(self, function: Callable[..., Any], on_error: Callable[[str], None]) -> None:
        self._function = function
        self._reads_prompt = _takes_prompt(function)
        self._on_error = on_error
        self._has_failed = False

    def __call__(self, prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Return the logits to sample from."""
        if self._has_failed:
            return logits
        try:
            before = (list(prompt), list(output)) if self._reads_prompt else (list(output),)
            changed = self._function(*before, logits.clone())
            problem = _problem(changed, logits)
        except Exception as error:  # the caller's code may raise anything
            problem = f"{type(error).__name__}: {error}"
        if not problem:
            return changed  # type: ignore[no-any-return]
        self._has_failed = True
        self._on_error(f"logits processor {_name(self._function)} failed: {problem}")
        return logits


def _problem(changed: Any, logits: torch.Tensor) -> str:
    """Return why the result cannot be used; empty if it can."""
    if not isinstance(changed, torch.Tensor) or changed.shape != logits.shape:
        shape = tuple(changed.shape) if isinstance(changed, torch.Tensor) else type(changed).__name__
        return f"it returned {shape}, not a tensor of shape {tuple(logits.shape)}"
    if bool(changed.isnan().any()):
        return "it returned NaN"
    if not bool((changed > -torch.inf).any()):
        return "it left no token to choose: all logits are -inf"
    return ""


def _takes_prompt(function: Callable[..., Any]) -> bool:
    """Whether a processor takes the prompt's ids before those of the output: with three arguments, as in vLLM."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in positional and each.default is each.empty for each in parameters) == 3


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
