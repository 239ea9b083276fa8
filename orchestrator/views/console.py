"""The two streams that a person reads, and the few ways to write on them.

Results go to standard output, everything else (progress, notices, errors) to standard error; colours only on a
terminal. Whatever is printed goes through `plain`: hosts have a say in nearly all of it, and nothing of theirs may
steer the terminal or be taken for markup.
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
from orchestrator.text import clean_lines, one_line
from orchestrator.units import format_age, format_figure, format_percent

if TYPE_CHECKING:
    from orchestrator.results.curves import Interval


class _Out(Console):
    def on_broken_pipe(self) -> None:
        """rich would exit with 1 here; `cli` knows that a reader who has left is no error."""
        raise BrokenPipeError


if isinstance(sys.stdout, io.TextIOWrapper):  # where an encoding lacks a letter that a host printed, show a `?`
    sys.stdout.reconfigure(errors="replace")
# A pipe has no width: a table is not to be folded for it.
out = _Out(highlight=False, soft_wrap=True, width=None if sys.stdout and sys.stdout.isatty() else 200)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def plain(text: object, style: str = "") -> Text:
    """Nothing in it is obeyed by the terminal or taken for markup; line breaks stay."""
    return Text(clean_lines(text), style)


def put(text: object) -> None:
    """A line of the result."""
    out.print(plain(text))


def say(text: str) -> None:
    """A line beside the result."""
    err.print(plain(text))


def warn(text: str, to: Console | None = None) -> None:
    (to or err).print(Text.assemble(("note:", "yellow"), " ", plain(text)))


def fail(message: str, remedy: str = "") -> None:
    """An error: what is wrong, then what to try."""
    for line in message.split("\n"):
        err.print(Text.assemble(("error:", "red"), " ", plain(line)))
    if remedy:
        err.print(Text.assemble("  ", ("try:", "bold"), " ", plain(remedy)))


def fail_each(errors: Iterable[OrchError]) -> None:
    """Each different one once, with the hosts that share it."""
    for error in together(errors):
        fail(error.message, error.remedy)


def print_json(value: Any) -> None:
    """The one document of `--json`, never coloured or wrapped."""
    print(json.dumps(value, indent=2))  # and not `write`: there may be no standard output


def print_json_line(value: Any) -> None:
    """One document of a stream of them, at once."""
    print(json.dumps(value), flush=True)


def print_answers(answers: Mapping[str, Any], words: Callable[[Any], str]) -> None:
    """One line a host with what it answered in words; then the errors."""
    for node, answer in answers.items():
        if not isinstance(answer, Exception):
            put(f"{node}: {words(answer)}")
    fail_each(answer for answer in answers.values() if isinstance(answer, OrchError))


# A table that fits the screen: where it is narrow, whole columns go and figures stay whole.

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
    """drop: columns that a narrow screen does without, the first ones first. text: columns that may be folded."""
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
        return sum(widths[index] for index in kept) + 2 * (len(kept) - 1) <= out.width

    while left and not fits():
        name = left.pop(0)
        kept = [index for index in kept if columns[index] != name]
    return kept, fits()


def _width(cell: Text) -> int:
    return max(map(cell_len, cell.plain.split("\n")))


# How a figure is written for people, the same on every screen and page. Pure but for the clock and its zone.
#
# A figure that is not known is a dash in place of a number. `units` has the plain formats that sentences use, too.

UNKNOWN = "-"


def clock(seconds: float) -> str:
    """`0:42`, `1:02:03`, `2d 01:02:03`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    days, hours = divmod(minutes // 60, 24)
    return (f"{days}d {hours:02d}" if days else str(hours)) + f":{minutes % 60:02d}:{rest:02d}"


def figure(value: float | None) -> str:
    """A speed or a time, its unit beside it."""
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
    """Local time of seconds since 1970, to the second; a dash where it is not known."""
    return UNKNOWN if wall is None else f"{datetime.fromtimestamp(wall):%Y-%m-%d %H:%M:%S}"


def local_minute(iso: str | None) -> str | None:
    """Local time, to the minute."""
    try:
        return f"{datetime.fromisoformat(iso).astimezone():%Y-%m-%d %H:%M}" if iso else None
    except ValueError:
        return None
