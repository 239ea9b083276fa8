"""Output to the terminal: messages, tables that fit the screen, and formats of figures.

Results go to standard output, the rest (progress, notices, errors) to standard error; colours only on a terminal. All
text passes `plain`, so that text from hosts is neither obeyed by the terminal nor taken for markup.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.errors import OrchError
from orchestrator.hosts.exec import together
from orchestrator.units import clean_lines, format_age, format_figure, format_percent, one_line

if TYPE_CHECKING:
    from orchestrator.results.curves import Interval


class _Out(Console):
    def on_broken_pipe(self) -> None:
        """rich would exit with 1 here; for `cli` a reader who left is no error."""
        raise BrokenPipeError


if isinstance(sys.stdout, io.TextIOWrapper):  # letters that the encoding lacks become `?`
    sys.stdout.reconfigure(errors="replace")
# A pipe has no width: do not fold tables for it.
out = _Out(highlight=False, soft_wrap=True, width=None if sys.stdout and sys.stdout.isatty() else 200)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def plain(text: object, style: str = "") -> Text:
    """Neutralises control sequences and markup; keeps line breaks."""
    return Text(clean_lines(text), style)


def put(text: object) -> None:
    """A result line."""
    out.print(plain(text))


def say(text: str) -> None:
    """To standard error."""
    err.print(plain(text))


def warn(text: str, to: Console | None = None) -> None:
    (to or err).print(Text.assemble(("note:", "yellow"), " ", plain(text)))


def fail(message: str, remedy: str = "") -> None:
    for line in message.split("\n"):
        err.print(Text.assemble(("error:", "red"), " ", plain(line)))
    if remedy:
        err.print(Text.assemble("  ", ("try:", "bold"), " ", plain(remedy)))


def fail_each(errors: Iterable[OrchError]) -> None:
    """Each distinct error once, with its hosts."""
    for error in together(errors):
        fail(error.message, error.remedy)


def print_json(value: Any) -> None:
    """Never coloured or wrapped."""
    print(json.dumps(value, indent=2))  # not `write`: standard output may be closed


def print_json_line(value: Any) -> None:
    """One document of a stream, flushed."""
    print(json.dumps(value), flush=True)


def print_answers(answers: Mapping[str, Any], words: Callable[[Any], str]) -> None:
    """A line per host, then the errors."""
    for node, answer in answers.items():
        if not isinstance(answer, Exception):
            put(f"{node}: {words(answer)}")
    fail_each(answer for answer in answers.values() if isinstance(answer, OrchError))


# Tables that fit the screen: a narrow screen drops whole columns, never cuts figures.

LEAST_TEXT = 24
"""Minimum width of a folded text column."""
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
    """right_from, left_from: columns between them are right-aligned. drop: see `table`."""
    out.print(table(title, columns, rows, right_from, left_from, drop=drop))


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
    """drop: columns to drop first on a narrow screen. text: columns that may fold."""
    heading = None if title is None else plain(title)
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
    """Whether the screen is wide enough for all columns."""
    return _kept(columns, _cells(rows), (), ())[1]


def _as_one(columns: Sequence[str], rows: Sequence[Sequence[Text]]) -> Sequence[Sequence[Text]]:
    """Without folding, one row of long cells looks the same; rich takes 0.2 ms per row."""
    if not rows or any("\n" in cell.plain for row in rows for cell in row) or not _kept(columns, rows, (), ())[1]:
        return rows
    return [[Text("\n").join(cells) for cells in zip(*rows, strict=True)]]


def _cells(rows: Sequence[Sequence[Any]]) -> list[list[Text]]:
    return [[cell if isinstance(cell, Text) else Text(one_line(cell)) for cell in row] for row in rows]


def _kept(
    columns: Sequence[str], rows: Sequence[Sequence[Text]], drop: Sequence[str], text: Sequence[str]
) -> tuple[list[int], bool]:
    """Columns to show, and whether they fit without folding figures."""
    widths = [max(len(name), *(_width(row[index]) for row in rows), 0) for index, name in enumerate(columns)]
    for index, name in enumerate(columns):
        widths[index] = min(widths[index], LEAST_TEXT) if name in text else widths[index]
    kept, left = list(range(len(columns))), list(drop)

    def fits() -> bool:
        return sum(widths[index] for index in kept) + 2 * (len(kept) - 1) <= out.width

    while left and not fits():
        name = left.pop(0)
        kept = [index for index in kept if columns[index] != name]
    return kept, fits()


def _width(cell: Text) -> int:
    return max(map(cell_len, cell.plain.split("\n")))


# Formats of figures, the same on screens and pages. Pure except for the clock and its zone. `units` has formats for
# sentences.

UNKNOWN = "-"


def clock(seconds: float) -> str:
    """`0:42`, `1:02:03`, `2d 01:02:03`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    days, hours = divmod(minutes // 60, 24)
    return (f"{days}d {hours:02d}" if days else str(hours)) + f":{minutes % 60:02d}:{rest:02d}"


def figure(value: float | None) -> str:
    """Without unit."""
    return UNKNOWN if value is None else format_figure(value)


def percent(part: float | None, digits: int = 0) -> str:
    """part: 0..1."""
    return UNKNOWN if part is None else format_percent(part, digits)


def span(of: Interval | None) -> str:
    """`1,110 to 1,131`."""
    return UNKNOWN if of is None else f"{figure(of.low)} to {figure(of.high)}"


def age(iso: str | None) -> str | None:
    try:
        return format_age(time.time() - datetime.fromisoformat(iso).timestamp()) if iso else None
    except ValueError:
        return None


def local_second(wall: float | None) -> str:
    """Seconds since 1970 as local time."""
    return UNKNOWN if wall is None else f"{datetime.fromtimestamp(wall):%Y-%m-%d %H:%M:%S}"


def local_minute(iso: str | None) -> str | None:
    try:
        return f"{datetime.fromisoformat(iso).astimezone():%Y-%m-%d %H:%M}" if iso else None
    except ValueError:
        return None
