"""Tables for the terminal: labels on the left, numbers on the right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

Cells = Sequence[str | Text]
Columns = Sequence[tuple[str, str, str]]  # key of the number, label, format string


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
    """Build a table; its first `labels` columns are text, the others numbers; a row None draws a line.

    Cells are plain text, not markup: the name of a model or a file may contain brackets.
    """
    shown = Table(
        title=Text(title) if title else None,
        title_justify="center" if is_centered else "left",
        caption=Text(caption) if caption else None,
        caption_justify="left",
        show_header=has_header,
    )
    for number, column in enumerate(columns):
        is_number = number >= labels
        shown.add_column(column, justify="right" if is_number else "left", no_wrap=is_number and has_header)
    for row in rows:
        if row is None:
            shown.add_section()
        else:
            shown.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return shown


def number_table(
    title: str,
    columns: Columns,
    rows: Sequence[tuple[Sequence[str], Mapping[str, Any]]],
    caption: str = "",
    *,
    is_centered: bool = False,
) -> Table:
    """Build a table from rows of labels and numbers by key, without the columns that no row has a number for."""
    used = [column for column in columns if any(column[0] in numbers for _, numbers in rows)]
    labels = len(rows[0][0]) if rows else 0
    cells = [
        (*names, *(form.format(numbers[key]) if key in numbers else "" for key, _, form in used))
        for names, numbers in rows
    ]
    heads = [""] * labels + [label for _, label, _ in used]
    return table(title, heads, cells, caption, labels=labels, is_centered=is_centered)
