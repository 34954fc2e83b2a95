"""Tool: a function that the model may call."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """The name of a function and the JSON schema of its arguments; with `strict`, calls always match the schema."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of the arguments by name; empty if the schema has none, or is no schema."""
        properties = self.parameters.get("properties")
        return properties if isinstance(properties, Mapping) else {}
