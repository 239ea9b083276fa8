"""Charts of a run, drawn with matplotlib: as SVG inside a page, or as a file. Pure except for the written files.

    svg(LineChart("loss", "updates", (ChartLine("training", [(0, 2.3), (100, 0.4)], PALETTE[0]),), from_zero=True))
    draw_throughput(summary, run.chart)         # PNG

matplotlib takes half a second to import, so functions import it.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from orchestrator.files import write_atomic
from orchestrator.results.network import Collectives
from orchestrator.results.summary import NodeSummary, Summary
from orchestrator.units import counted, format_bytes, format_figure, one_line

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#999999", "#8c564b", "#b8a800")
"""Okabe and Ito's colours and two more, distinct for every common form of colour vision."""
MOST_LINES = len(PALETTE)
MARKED = "#c8372d"
INK = "#757d87"
"""A grey readable on white and dark pages: the background is transparent."""
_MARKERS = ("o", "s", "^", "v", "D", "P", "X", "*", "<")
SPEEDS = (
    ("samples_per_s", "in the cluster", PALETTE[0]),
    ("own_samples_per_s", "own speed in this run", PALETTE[1]),
    ("solo_samples_per_s", "measured alone", PALETTE[2]),
)
"""Field of a host, label, colour."""
_HATCHES = ("", "//", "..")
"""For print."""
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


@dataclass(frozen=True)
class Piece:
    """A part of a bar."""

    name: str
    value: float
    colour: str


@dataclass(frozen=True)
class ChartBar:
    """label: above it. pieces: side by side. words: at its end."""

    label: str
    pieces: tuple[Piece, ...]
    words: str


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars from 0, one below the other."""

    title: str
    unit: str
    bars: tuple[ChartBar, ...]

    @property
    def over(self) -> str:
        return self.unit

    @property
    def key(self) -> dict[str, str]:
        """Name -> colour."""
        return {piece.name: piece.colour for bar in self.bars for piece in bar.pieces}


# ---- a chart in a page -----------------------------------------------------------------------------------------------

HOVERED = 60
"""Points of a line whose values show on hover, at most."""


def svg(chart: LineChart | BarChart) -> Markup:
    """Part of an HTML page, without ids, styles and namespaces that could conflict with the page's. Values show on
    hover.
    """
    with _plain_settings(fonttype="none"):
        figure = line_figure(chart) if isinstance(chart, LineChart) else bar_figure(chart)
        text = _saved(figure, "svg").decode()
        hovered = "".join(
            _hovered_points(figure, chart) if isinstance(chart, LineChart) else _hovered_bars(figure, chart)
        )
    width, height = (round(72 * inch) for inch in figure.get_size_inches())
    body = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    body = re.sub(r"<metadata>.*?</metadata>|<defs>.*?</defs>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r' (id|clip-path)="[^"]*"|font[-a-z]*: [^;"]*;? ?|<g/>', "", body).replace(INK, "var(--soft)")
    body = re.sub(r' style="([^"]*)"', _as_attributes, body)  # a page may allow no styles
    body = re.sub(r"(\.\d\d)\d+", r"\1", re.sub(r"\s*\n\s*", "\n", body))
    label = escape(f"{chart.title} over {chart.over}" if isinstance(chart, LineChart) else chart.title)
    whole = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{body}{hovered}</svg>'
    return Markup(whole)  # noqa: S704 - our own


def _as_attributes(style: re.Match[str]) -> str:
    pairs = (pair.split(":", 1) for pair in style[1].split(";") if ":" in pair)
    return "".join(f' {name.strip()}="{value.strip()}"' for name, value in pairs)


def _hovered_points(figure: Any, chart: LineChart) -> Iterator[str]:
    place = _places(figure)
    for line in chart.lines:
        every = max(1, math.ceil(len(line.points) / HOVERED))
        for x, y in dict.fromkeys([*line.points[::every], *line.points[-1:]]):
            across, down = place(x, y)
            value = f"{format_figure(100 * y)} %" if chart.percent else format_figure(y)
            words = escape(f"{_short(line.name)}, {chart.over} {format_figure(x)}: {value}")
            yield f'<circle class="hover" cx="{across:.1f}" cy="{down:.1f}" r="7"><title>{words}</title></circle>\n'


def _hovered_bars(figure: Any, chart: BarChart) -> Iterator[str]:
    place = _places(figure)
    for row, bar in enumerate(chart.bars):
        begin = 0.0
        for piece in bar.pieces:
            left, top = place(begin, row - _BAR / 2)
            right, bottom = place(begin := begin + piece.value, row + _BAR / 2)
            words = escape(f"{_short(bar.label)}: {piece.name} {format_figure(piece.value)} {chart.unit}")
            box = f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}"'
            yield f'<rect class="hover" {box}><title>{words}</title></rect>\n'


def _places(figure: Any) -> Callable[[float, float], tuple[float, float]]:
    """From data to the SVG's units."""
    axes, unit = figure.axes[0], 72 / figure.dpi
    height = 72 * figure.get_size_inches()[1]

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = axes.transData.transform((x, y))
        return float(across) * unit, float(height - up * unit)

    return place


# ---- bars ------------------------------------------------------------------------------------------------------------

_ROW, _BAR, _AXIS = 42, 0.38, 26
"""SVG units from bar to bar; a bar's part of it; the space for the axis."""


def bar_figure(chart: BarChart, title: str = "") -> Any:
    """title: for a file; a page has title and key in its text."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    height = _ROW * len(chart.bars) + _AXIS
    figure, axes = (
        _empty(8.6, 1.2 + 0.6 * len(chart.bars), "constrained") if title else _empty(_WIDTH / 72, height / 72, None)
    )
    most = max((sum(piece.value for piece in bar.pieces) for bar in chart.bars), default=0.0) or 1.0
    named: set[str] = set()
    for row, bar in enumerate(chart.bars):
        begin = 0.0
        for piece in bar.pieces:
            label = None if piece.name in named else piece.name
            named.add(piece.name)
            axes.barh(row, piece.value, _BAR, left=begin, color=piece.colour, label=label)
            begin += piece.value
        above = row - _BAR / 2 - 0.08
        axes.text(0, above, _short(bar.label), ha="left", va="bottom", color=INK, parse_math=False)
        axes.text(most, above, _short(bar.words), ha="right", va="bottom", color=INK, parse_math=False)
    axes.set_xlim(0, most)
    axes.set_ylim(len(chart.bars) - 0.5 + 0.1, -0.75)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    _plain(axes, "x")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0, labelsize=13)
    if not title:
        figure.subplots_adjust(left=0.01, right=0.97, top=1.0, bottom=_AXIS / height)
        return figure
    axes.set_xlabel(chart.unit)
    axes.set_title(title, loc="left", fontsize=11, parse_math=False)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure


# ---- lines -----------------------------------------------------------------------------------------------------------


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

    series = [
        item for item in zip(SPEEDS, _HATCHES, strict=True) if any(getattr(node, item[0][0]) for node in summary.nodes)
    ]
    height_inch = 1.7 + 0.32 * (len(series) + 0.8) * len(summary.nodes)
    figure, axes = _empty(8.6, min(height_inch, 60), ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.1))
    bar_height = 0.8 / len(series)
    for index, ((name, label, colour), hatch) in enumerate(series):
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
    """A host's words, for any file or page."""
    return one_line(text, 32)


# ---- any chart -------------------------------------------------------------------------------------------------------


def save(draw: Callable[[], Any], path: Path) -> None:
    """path's suffix chooses the form; equal figures give equal bytes."""
    write_atomic(path, _drawn(draw, path.suffix.removeprefix(".")))


def _drawn(draw: Callable[[], Any], form: str) -> bytes:
    with _plain_settings():
        return _saved(draw(), form)


def _saved(figure: Any, form: str) -> bytes:
    content = io.BytesIO()
    with warnings.catch_warnings():
        # A host's name may have characters that the font lacks: boxes are fine.
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        without_date = {"Date": None} if form == "svg" else None
        figure.savefig(content, format=form, dpi=144, transparent=True, metadata=without_date)
    return content.getvalue()


@contextlib.contextmanager
def _plain_settings(fonttype: str = "path") -> Iterator[None]:
    """fonttype: `none` keeps text, `path` needs no font. Ignores a `matplotlibrc` of the current folder."""
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
