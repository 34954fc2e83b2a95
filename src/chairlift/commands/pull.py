"""`chairlift pull`: fetch a model, so that a later run starts at once."""

from __future__ import annotations

from chairlift.commands.options import with_model


@with_model()
def pull(*, model: str) -> None:
    """Fetch a model and print the path of its file or folder."""
    from chairlift.models.sources import resolve

    print(resolve(model, progress=True))
