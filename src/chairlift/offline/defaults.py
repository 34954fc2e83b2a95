"""Sampling defaults: the values that the model's authors recommend, where they are usable."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from chairlift.core.errors import RequestError
from chairlift.core.params import SamplingParams
from chairlift.models.checkpoint import Checkpoint
from chairlift.models.recommended import recommended_sampling


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values of SamplingParams fields that a request does not set."""

    values: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    warnings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Return the values as text for a log.

        >>> str(SamplingDefaults({"temperature": 0.2, "top_p": 0.9}, "published for SmolLM2-Instruct"))
        'temperature 0.2, top_p 0.9 where a request names none (published for SmolLM2-Instruct)'
        """
        if not self.values:
            return "temperature 1 where a request names none"
        said = ", ".join(f"{name} {value:.6g}" for name, value in self.values.items())
        return f"{said} where a request names none ({self.source})"


def read_defaults(checkpoint: Checkpoint | None, generation_config: str) -> SamplingDefaults:
    """Return the model's own values unless the setting is "none"; skip unusable values with a warning."""
    if checkpoint is None or generation_config == "none":
        return SamplingDefaults()
    found, source = recommended_sampling(checkpoint)
    values, warnings = {}, []
    for name, value in found.items():
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            warnings.append(f"a recommended sampling value is ignored ({source}): {error}")
        else:
            values[name] = value
    return SamplingDefaults(values, source, warnings)
