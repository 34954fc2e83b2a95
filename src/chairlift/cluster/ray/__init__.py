"""Replicas on a Ray cluster: actors that each run a server process, behind the gateway.

Ray places the actors and notices their end; requests do not pass through it. Everything here but connect.py needs
`pip install 'chairlift[ray]'`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def app(arguments: Mapping[str, Any]) -> Any:
    """Return the Ray Serve application: `serve run chairlift.cluster.ray:app model=NAME replicas=1..4`."""
    from chairlift.cluster.ray.ingress import build

    return build(arguments)
