"""A run's figures as files for a paper: each table as CSV, JSON Lines and Parquet, each plot as SVG and PNG.
Pure but for these.

for path in write_figures(run, summary, Path("figures")): ...
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.files import make_folder, write_atomic
from orchestrator.paths import RunFolder
from orchestrator.results.figure_tables import FigureTable, figure_tables
from orchestrator.results.parquet import convert
from orchestrator.results.summary import Summary
from orchestrator.views.charts import (
    PALETTE,
    ChartLine,
    LineChart,
    has_speeds,
    line_figure,
    save,
    throughput_figure,
    title_of,
)

TABLES = ("csv", "jsonl", "parquet")
"""The forms of a table, by the ends of their files' names."""


def write_figures(run: RunFolder, summary: Summary, folder: Path) -> Iterator[Path]:
    """Each file once it is written, whole. Files of the same names are replaced."""
    make_folder(folder)
    tables = figure_tables(summary)
    for name, table in tables.items():
        as_csv, *others = (folder / f"{name}.{suffix}" for suffix in TABLES)
        write_atomic(as_csv, csv_of(table))
        for other in others:
            convert(as_csv, other)
        yield from (as_csv, *others)
    if run.steps.is_file():
        for suffix in TABLES:
            target = folder / f"steps.{suffix}"
            convert(run.steps, target)
            yield target
    for name, draw in plots(summary, tables).items():
        for suffix in ("svg", "png"):
            target = folder / f"{name}.{suffix}"
            save(draw, target)
            yield target


def csv_of(table: FigureTable) -> str:
    """What is not known is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(table.rows)
    return text.getvalue()


LINES = (
    ("speeds", "speeds", "samples_per_s", "samples per second"),
    ("loss", "loss", "loss", "training loss"),
    ("accuracy", "evaluations", "accuracy", "test accuracy"),
)
"""Plot, its table, the column that it draws, and the words on its axis."""


def plots(summary: Summary, tables: Mapping[str, FigureTable]) -> dict[str, Callable[[], Any]]:
    """Name -> the function that draws it."""
    found: dict[str, Callable[[], Any]] = {}
    if has_speeds(summary):
        found["throughput"] = partial(throughput_figure, summary)
    for name, table, column, words in LINES:
        if table not in tables:
            continue
        along = _along(tables[table])
        lines = _lines(tables[table], along, column)
        if any(len(line.points) > 1 for line in lines):
            over = "update" if along == "step" else along
            chart = LineChart(words, over, lines, from_zero=name != "accuracy", percent=name == "accuracy")
            found[name] = partial(line_figure, chart, title_of(summary))
    return found


def _along(table: FigureTable) -> str:
    """Seconds if they are known, else steps."""
    place = table.columns.index("seconds")
    return "seconds" if all(row[place] is not None for row in table.rows) else "step"


def _lines(table: FigureTable, along: str, column: str) -> tuple[ChartLine, ...]:
    """One for each host, if the table names hosts."""
    x, y = table.columns.index(along), table.columns.index(column)
    host = table.columns.index("host") if "host" in table.columns else None
    found: dict[str, list[tuple[float, float]]] = {}
    for row in table.rows:
        if row[y] is not None:
            found.setdefault("" if host is None else row[host], []).append((row[x], row[y]))
    colours = itertools.cycle(PALETTE)
    return tuple(
        ChartLine(name, points, colour) for (name, points), colour in zip(found.items(), colours, strict=False)
    )
