"""`chairlift pull`: download a model ahead of its first run."""

from __future__ import annotations

from chairlift.commands.options import with_model


@with_model()
def pull(*, model: str) -> None:
    """Download a model and print the path of its file or folder."""
    from chairlift.models.sources import resolve

    print(resolve(model, progress=True))
