"""Charts of a run, drawn with matplotlib: as SVG inside a page, or as a file. Pure except for the written files.

    svg(LineChart("loss", "updates", (ChartLine("training", [(0, 2.3), (100, 0.4)], PALETTE[0]),), from_zero=True))
    draw_throughput(summary, run.chart)         # PNG

matplotlib takes half a second to import, so functions import it.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from orchestrator.files import make_folder, write_atomic
from orchestrator.paths import RunFolder
from orchestrator.results.compare import FigureTable, figure_tables
from orchestrator.results.network import Collectives
from orchestrator.results.summary import NodeSummary, Summary
from orchestrator.results.tables import convert
from orchestrator.units import counted, format_bytes, format_figure

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#999999", "#8c564b", "#b8a800")
"""Okabe and Ito's colours and two more, distinct for every common form of colour vision."""
MOST_LINES = len(PALETTE)
MARKED = "#c8372d"
INK = "#757d87"
"""A grey readable on white and dark pages: the background is transparent."""
_MARKERS = ("o", "s", "^", "v", "D", "P", "X", "*", "<")
_BARS = (
    ("samples_per_s", "in the cluster", PALETTE[0], ""),
    ("own_samples_per_s", "own speed (estimated, without other hosts)", PALETTE[1], "//"),
    ("solo_samples_per_s", "measured alone", PALETTE[2], ".."),
)
"""Field of a host, label, colour, and hatch for print."""
_WIDTH, _HEIGHT = 420, 200
"""A chart's size in a page, in SVG units; style.css has the text size."""

Points = Sequence[tuple[float, float]]
"""By x, which is never negative."""


@dataclass(frozen=True)
class ChartLine:
    name: str
    points: Points
    colour: str
    dots: bool = False
    marked: Sequence[Points] = ()
    """Highlighted stretches."""


@dataclass(frozen=True)
class Upright:
    """An event at one x."""

    name: str
    x: float
    colour: str


@dataclass(frozen=True)
class LineChart:
    """x begins at 0. At least one line has a point."""

    title: str
    over: str
    """The quantity of the x axis."""
    lines: tuple[ChartLine, ...]
    from_zero: bool = False
    """Whether the y axis begins at 0."""
    percent: bool = False
    """Whether y values are 0..1."""
    uprights: tuple[Upright, ...] = ()

    @property
    def key(self) -> dict[str, str]:
        """Name -> colour, without a single line."""
        lines = {line.name: line.colour for line in self.lines if line.points and len(self.lines) > 1}
        return lines | {each.name: each.colour for each in self.uprights}


# ---- lines -----------------------------------------------------------------------------------------------------------


def svg(chart: LineChart) -> Markup:
    """Part of an HTML page, without ids, styles and namespaces that could conflict with the page's."""
    text = _drawn(partial(line_figure, chart), "svg", fonttype="none").decode()
    body = text[text.index(">", text.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<defs>.*?</defs>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r' (id|clip-path)="[^"]*"|font[-a-z]*: [^;"]*;? ?|<g/>', "", body).replace(INK, "var(--soft)")
    body = re.sub(r"(\.\d\d)\d+", r"\1", re.sub(r"\s*\n\s*", "\n", body))
    label = escape(f"{chart.title} over {chart.over}")
    return Markup(f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{body}')  # noqa: S704 - our own


def line_figure(chart: LineChart, title: str = "") -> Any:
    """title: for a file; a page has title and key in its text."""
    figure, axes = _empty(8.6, 4.2, "constrained") if title else _empty(_WIDTH / 72, _HEIGHT / 72, None)
    for line, marker in zip(chart.lines, itertools.cycle(_MARKERS), strict=False):
        _draw_line(axes, line, marker if title and len(line.points) <= 30 else None)
    _set_axes(axes, chart)
    for each in chart.uprights:
        if each.x <= axes.get_xlim()[1]:
            axes.axvline(each.x, color=each.colour, linewidth=1.4, linestyle=(0, (3, 3)), clip_on=False)
    _plain(axes, "both" if title else "y")
    if not title:
        figure.subplots_adjust(left=0.15, right=0.97, top=0.95, bottom=0.15)
        axes.tick_params(length=0, labelsize=13, pad=7)
        axes.spines[["left", "bottom"]].set_visible(False)
        return figure
    axes.set_xlabel(chart.over)
    axes.set_ylabel(chart.title)
    axes.set_title(title, loc="left", fontsize=11, parse_math=False)
    if chart.key:
        figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure


def _draw_line(axes: Any, line: ChartLine, marker: str | None) -> None:
    from matplotlib.collections import LineCollection

    if not line.points:
        return
    xs, ys = zip(*line.points, strict=True)
    dots = [[point, point] for point in line.points] if line.dots or len(xs) == 1 else []
    for paths, colour, width, alpha in ((line.marked, MARKED, 8, 0.45), ([] if marker else dots, line.colour, 7, 1)):
        if paths:  # a path without length is a dot
            whole = [[*path, path[-1]] for path in paths]
            axes.add_collection(
                LineCollection(whole, colors=colour, linewidths=width, alpha=alpha, capstyle="round", clip_on=False)
            )
    axes.plot(
        xs, ys, label=_short(line.name), color=line.colour, marker=marker, markersize=5, linewidth=2, clip_on=False
    )


def _set_axes(axes: Any, chart: LineChart) -> None:
    """Round ticks; the y axis spans them."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

    xs, ys = ([point[axis] for line in chart.lines for point in line.points] for axis in (0, 1))
    axes.set_xlim(0, max(xs) or 1)
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    with_zero = chart.from_zero or min(ys) == max(ys)
    low, high = (min(0, *ys), max(0, *ys)) if with_zero else (min(ys), max(ys))
    ticks = MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(low, high if high != low else low + 1)
    axes.set_yticks(ticks)
    axes.set_ylim(ticks[0], ticks[-1])
    scale = 100 if chart.percent else 1
    digits = max(0, -math.floor(math.log10(scale * (ticks[1] - ticks[0])) + 1e-9))
    plain = f"{{x:,.{digits}f}}" if digits <= 4 and max(map(abs, ticks)) < 1e6 else "{x:.3g}"
    axes.yaxis.set_major_formatter(
        PercentFormatter(1.0, digits, symbol=" %") if chart.percent else StrMethodFormatter(plain)
    )


# ---- a host's speed, the network's speed -----------------------------------------------------------------------------


def draw_throughput(summary: Summary, path: Path) -> bool:
    """Without a speed to show, removes an older chart and returns False."""
    if not has_speeds(summary):
        path.unlink(missing_ok=True)
        return False
    save(partial(throughput_figure, summary), path)
    return True


def has_speeds(summary: Summary) -> bool:
    measured = (summary.collectives or Collectives()).operations
    return bool(measured) or any(node.samples_per_s for node in summary.nodes)


def throughput_figure(summary: Summary) -> Any:
    """Hosts' speeds, or network bandwidths."""
    return _figure_of_network(summary) if summary.collectives else _figure_of_hosts(summary)


def _figure_of_hosts(summary: Summary) -> Any:
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    series = [item for item in _BARS if any(getattr(node, item[0]) for node in summary.nodes)]
    height_inch = 1.7 + 0.32 * (len(series) + 0.8) * len(summary.nodes)
    figure, axes = _empty(8.6, min(height_inch, 60), ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.1))
    bar_height = 0.8 / len(series)
    for index, (name, label, colour, hatch) in enumerate(series):
        places = [row + (index - (len(series) - 1) / 2) * bar_height for row in range(len(summary.nodes))]
        values = [getattr(node, name) or 0.0 for node in summary.nodes]
        bars = axes.barh(
            places, values, bar_height * 0.92, label=label, color=colour, hatch=hatch, edgecolor="white", linewidth=0
        )
        axes.bar_label(
            bars, [format_figure(value) if value else "" for value in values], padding=4, color=INK, fontsize=9
        )
    axes.set_yticks(range(len(summary.nodes)), [_label(node) for node in summary.nodes], parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("samples per second")
    axes.set_title(title_of(summary), loc="left", fontsize=11, parse_math=False)
    axes.margins(x=0.14)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _plain(axes, "x")
    figure.legend(loc="outside lower center", ncols=len(series), frameon=False, fontsize=9)
    return figure


def _figure_of_network(summary: Summary) -> Any:
    """Bus bandwidth over size, a line per operation."""
    found = summary.collectives or Collectives()
    figure, axes = _empty(8.6, 5.2, "constrained")
    for index, operation in enumerate(found.operations):
        times = [each for each in found.times if each.operation == operation.operation and each.busbw_gbps]
        axes.plot(
            [each.bytes for each in times],
            [each.busbw_gbps or 0.0 for each in times],
            label=operation.operation,
            color=PALETTE[index % len(PALETTE)],
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=5,
            linewidth=1.4,
        )
    if found.declared_gbps:
        axes.axhline(found.declared_gbps, color=INK, linestyle="--", linewidth=1.2, label="declared")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({each.bytes for each in found.times})[:: max(1, len(found.times) // 100)]
    axes.set_xticks(sizes, [format_bytes(size) for size in sizes], rotation=30, ha="right", fontsize=9)
    axes.minorticks_off()
    axes.set_xlabel("bytes of the whole array")
    axes.set_ylabel("bus bandwidth, Gbit/s")
    axes.set_title(f"{_short(summary.experiment)} · {counted(summary.world_size, 'rank')}", loc="left", fontsize=11)
    _plain(axes)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure


def title_of(summary: Summary) -> str:
    settings = summary.recorded
    named = {"strategy": settings.strategy, "fidelity": settings.fidelity, "batch": settings.batch}
    known = [f"{name} {value}" for name, value in named.items() if value is not None]
    paced = ["paced, not real GPUs"] if summary.paced else []
    return " · ".join([_short(summary.experiment), *(_short(text) for text in known), *paced])


def _label(node: NodeSummary) -> str:
    count = f"{node.ranks} × " if node.ranks > 1 else ""
    return f"{_short(node.name)}\n{count}{_short(node.gpu)}"


def _short(text: str) -> str:
    return text if len(text) <= 32 else text[:31] + "…"


# ---- any chart -------------------------------------------------------------------------------------------------------


def save(draw: Callable[[], Any], path: Path) -> None:
    """path's suffix chooses the form; equal figures give equal bytes."""
    write_atomic(path, _drawn(draw, path.suffix.removeprefix(".")))


def _drawn(draw: Callable[[], Any], form: str, fonttype: str = "path") -> bytes:
    """fonttype: `none` keeps text, `path` needs no font."""
    content = io.BytesIO()
    with warnings.catch_warnings():
        # A host's name may have characters that the font lacks: boxes are fine.
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        with _plain_settings(fonttype):
            without_date = {"Date": None} if form == "svg" else None
            draw().savefig(content, format=form, dpi=144, transparent=True, metadata=without_date)
    return content.getvalue()


@contextlib.contextmanager
def _plain_settings(fonttype: str = "path") -> Iterator[None]:
    """matplotlib reads a `matplotlibrc` of the current folder, which may be untrusted; we ignore it."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"text.color": INK, "xtick.color": INK, "ytick.color": INK})
        matplotlib.rcParams.update({"axes.labelcolor": INK, "axes.edgecolor": INK})
        matplotlib.rcParams.update({"svg.hashsalt": "orch", "svg.fonttype": fonttype})
        yield


def _empty(width_inch: float, height_inch: float, layout: Any) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inch, height_inch), layout=layout)
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _plain(axes: Any, grid: str = "both") -> None:
    """grid: the axis with grid lines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color=INK, alpha=0.25, linewidth=0.8)
    axes.set_axisbelow(True)


# Figures of a run as files: tables as CSV, JSON Lines and Parquet, plots as SVG and PNG.

TABLES = ("csv", "jsonl", "parquet")


def write_figures(run: RunFolder, summary: Summary, folder: Path) -> Iterator[Path]:
    """Yields each written file. Existing files are replaced."""
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
    """Unknown values are empty cells."""
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
"""Plot, table, column, axis label."""


def plots(summary: Summary, tables: Mapping[str, FigureTable]) -> dict[str, Callable[[], Any]]:
    """Functions that draw, by name."""
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
    """Seconds if known, else steps."""
    place = table.columns.index("seconds")
    return "seconds" if all(row[place] is not None for row in table.rows) else "step"


def _lines(table: FigureTable, along: str, column: str) -> tuple[ChartLine, ...]:
    """One per host if the table has hosts."""
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
