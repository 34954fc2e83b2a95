"""What commands that draw pictures check before they measure anything."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from chairlift.core.errors import ChairliftError

_KINDS = (".svg", ".png")


def check_picture(file: Path) -> None:
    """Refuse a file that cannot become a picture."""
    if file.suffix not in _KINDS:
        raise ChairliftError(f"{file} is no picture: let its name end in {' or '.join(_KINDS)}")
    need_matplotlib("--plot", "leave it out for the numbers alone")


def need_matplotlib(flag: str, without: str) -> None:
    """Refuse to draw where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ChairliftError(
            f"{flag} draws with matplotlib, which is not installed: pip install 'chairlift[plots]'; {without}"
        )
