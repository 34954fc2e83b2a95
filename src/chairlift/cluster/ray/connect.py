"""The connection to a Ray cluster: a running one, or one started here, which ends with this process."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chairlift.core.errors import SettingsError

# `ray start` writes the address of its cluster here. The file of a killed cluster remains, and Ray would wait for that
# cluster.
_CURRENT = Path("/tmp/ray/ray_current_cluster")
_CONNECT_SECONDS = 5.0
_OBJECT_STORE = 80 << 20  # bytes, about the least that Ray accepts: nothing large passes through Ray here


def check_installed() -> None:
    """Raise a SettingsError where ray is not installed."""
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise SettingsError(
            f"--on ray needs the package ray, which cannot be imported ({error}): pip install 'chairlift[ray]'"
        ) from None


def find_cluster() -> str | None:
    """Return the address of RAY_ADDRESS, or else of the cluster that `ray start` has started here; None: none runs."""
    given = os.environ.get("RAY_ADDRESS")
    if given:
        if not _accepts(given):
            raise SettingsError(f"RAY_ADDRESS is {given}, where no Ray cluster answers: correct it or unset it")
        return given
    try:
        current = _CURRENT.read_text().strip()
    except OSError:
        return None
    return current if current and _accepts(current) else None


def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "/" in host:
        return True  # another form of address: Ray checks it
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError):
        return False
    return True


@contextmanager
def connected() -> Iterator[str | None]:
    """Connect to the cluster of RAY_ADDRESS, or the one on this machine that `ray status` shows, or start one.

    Yield its address; None if it was started here.
    """
    check_installed()
    import ray

    quiet: dict[str, Any] = {"configure_logging": False, "log_to_driver": True, "logging_level": logging.WARNING}
    address = find_cluster()
    try:
        if address is not None:
            ray.init(address=address, **quiet)
            yield address
        else:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(address="local", include_dashboard=False, object_store_memory=_OBJECT_STORE, **quiet)
            yield None
    finally:
        ray.shutdown()
