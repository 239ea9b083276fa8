"""A table that fits the screen: where it is narrow, whole columns go and figures stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from orchestrator.text import one_line
from orchestrator.views import console

LEAST_TEXT = 24
"""A column of words is at least this wide, so that it can be read where it is folded."""
LEAST_NAME = 4


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    right_from: int,
    title: str | None = None,
    *,
    left_from: int = 99,
    drop: Sequence[str] = (),
) -> None:
    """right_from, left_from: figures stand at the right, and words after them at the left. drop: as for `table`."""
    console.out.print(table(title, columns, rows, right_from, left_from, drop=drop))


def table(
    title: str | None,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    right_from: int = 99,
    left_from: int = 99,
    *,
    drop: Sequence[str] = (),
    text: Sequence[str] = (),
) -> Table:
    """drop: columns that a narrow screen does without, the first ones first. text: columns that may be folded."""
    heading = None if title is None else console.plain(title)
    made = Table(title=heading, title_justify="left", header_style="bold", box=None, pad_edge=False)
    cells = _cells(rows)
    shown, fits = _kept(columns, cells, drop, text)
    for index in shown:
        name, justify = columns[index], "right" if right_from <= index < left_from else "left"
        whole = fits and name not in text
        made.add_column(name, justify=justify, overflow="fold", no_wrap=whole)  # type: ignore[arg-type]
    rows_shown = [[row[index] for index in shown] for row in cells]
    for row in _as_one([columns[index] for index in shown], rows_shown):
        made.add_row(*row)
    return made


def has_room(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> bool:
    """Whether this screen has room for all of these columns."""
    return _kept(columns, _cells(rows), (), ())[1]


def _as_one(columns: Sequence[str], rows: Sequence[Sequence[Text]]) -> Sequence[Sequence[Text]]:
    """If nothing is folded, one row of long cells, which looks the same: rich takes 0.2 ms for the layout of a row."""
    if not rows or any("\n" in cell.plain for row in rows for cell in row) or not _kept(columns, rows, (), ())[1]:
        return rows
    return [[Text("\n").join(cells) for cells in zip(*rows, strict=True)]]


def _cells(rows: Sequence[Sequence[Any]]) -> list[list[Text]]:
    return [[cell if isinstance(cell, Text) else Text(one_line(cell)) for cell in row] for row in rows]


def _kept(
    columns: Sequence[str], rows: Sequence[Sequence[Text]], drop: Sequence[str], text: Sequence[str]
) -> tuple[list[int], bool]:
    """The columns for which this screen has room, and whether it has room for them without folding figures."""
    widths = [max(len(name), *(_width(row[index]) for row in rows), 0) for index, name in enumerate(columns)]
    for index, name in enumerate(columns):
        widths[index] = min(widths[index], LEAST_TEXT) if name in text else widths[index]
    kept, left = list(range(len(columns))), list(drop)

    def fits() -> bool:
        return sum(widths[index] for index in kept) + 2 * (len(kept) - 1) <= console.out.width

    while left and not fits():
        name = left.pop(0)
        kept = [index for index in kept if columns[index] != name]
    return kept, fits()


def _width(cell: Text) -> int:
    return max(map(cell_len, cell.plain.split("\n")))
