"""`chairlift pull`: fetch a model, so that a later run starts at once."""

from __future__ import annotations

from typing import Annotated

import typer


def pull(
    name: Annotated[str, typer.Argument(help="A short name, or org/name or org/name:file.gguf on the hub.")],
) -> None:
    """Fetch a model and print where it lies."""
    from chairlift.models.sources import resolve

    print(resolve(name, progress=True))
