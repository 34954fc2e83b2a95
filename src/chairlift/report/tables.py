"""Tables for a reader: labels at the left, numbers at the right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

Cells = Sequence[str | Text]


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Cells | None],
    caption: str = "",
    *,
    labels: int = 1,
    is_centered: bool = False,
    has_header: bool = True,
) -> Table:
    """Rows under their columns, of which the first `labels` hold text; None draws a line between two rows.

    What a user has named, such as a file or a model, is shown as it is: nothing in it is markup.
    """
    shown = Table(
        title=Text(title) if title else None,
        title_justify="center" if is_centered else "left",
        caption=Text(caption) if caption else None,
        caption_justify="left",
        show_header=has_header,
    )
    for number, column in enumerate(columns):
        is_label = number < labels
        shown.add_column(column, justify="left" if is_label else "right", no_wrap=not is_label)
    for row in rows:
        if row is None:
            shown.add_section()
        else:
            shown.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return shown
