"""Charts of a run: parts of a step, loss and accuracy, hosts' speeds, GPUs. Pure except for read and written files.

split_of_run(summary)                           each host's step: load, compute, sync, wait, optimiser
host_speeds(summary)                            samples/s of each host, in the cluster and by itself
curve_charts(summary.curves)                    loss and accuracy over updates
[*by_clock(summary.curves)]                     ("seconds", charts), ("samples", charts)
speed_chart(summary)                            samples/s of each host
gpu_charts({name: read_course(path), ...})      use, clock, power, temperature of each host's GPUs
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.files import make_folder, write_atomic
from orchestrator.jobs.live import CoursePoint
from orchestrator.jobs.live_stats import Reading
from orchestrator.paths import RunFolder
from orchestrator.results.compare import FigureTable, figure_tables
from orchestrator.results.curves import Curves, HostCourse, Place, placed
from orchestrator.results.straggler import readings
from orchestrator.results.summary import NodeSummary, Summary, is_slowed
from orchestrator.results.tables import convert
from orchestrator.units import format_figure
from orchestrator.views.charts import (
    MOST_LINES,
    PALETTE,
    SPEEDS,
    BarChart,
    ChartBar,
    ChartLine,
    LineChart,
    Piece,
    Upright,
    bar_figure,
    has_speeds,
    line_figure,
    save,
    throughput_figure,
    title_of,
)

_TRAINING, _TEST = PALETTE[0], PALETTE[3]

# ---- where a step's time goes ----------------------------------------------------------------------------------------

PARTS = {
    "load": PALETTE[4],
    "compute": PALETTE[0],
    "sync": PALETTE[1],
    "wait": PALETTE[3],
    "optimiser": PALETTE[2],
}
"""A step's parts in their order, and their colours."""
MOST_BARS = 16


class HostStep(NamedTuple):
    """words: at the bar's end, instead of the step's length."""

    name: str
    ms: Mapping[str, float]
    words: str = ""


def split_of_run(summary: Summary) -> BarChart | None:
    """None if a host's parts are unknown. Many hosts: named in the summary, and waiting least or most."""
    if not summary.nodes or any(node.parts_ms is None for node in summary.nodes):
        return None
    shown = _most_telling(summary)
    steps = [HostStep(f"{node.name} · {node.gpu}", node.parts_ms or {}) for node in shown]
    return split_chart(steps, exposed=summary.overlapped)


def split_chart(hosts: Sequence[HostStep], *, exposed: bool = False) -> BarChart | None:
    """exposed: whether exchanges overlap compute, so that only their rest is seen."""
    if not hosts:
        return None
    names = {part: f"exposed {part}" if exposed and part in ("sync", "wait") else part for part in PARTS}
    bars = tuple(
        ChartBar(
            host.name,
            tuple(Piece(names[part], host.ms.get(part, 0.0), colour) for part, colour in PARTS.items()),
            host.words or f"{format_figure(sum(host.ms.values()))} ms",
        )
        for host in hosts
    )
    return BarChart("parts of a step", "ms", bars)


def _most_telling(summary: Summary) -> list[NodeSummary]:
    nodes = sorted(summary.nodes, key=lambda node: node.wait_ms or 0.0)
    half = MOST_BARS // 2
    kept = {node.name for node in (*nodes[:half], *nodes[len(nodes) - half :])} | summary.named
    return [node for node in summary.nodes if len(nodes) <= MOST_BARS or node.name in kept]


def host_speeds(summary: Summary) -> BarChart | None:
    """Bars per host: in the cluster, alone."""
    if not any(node.samples_per_s for node in summary.nodes):
        return None
    bars = []
    for node in _most_telling(summary):
        for field_name, words, colour in SPEEDS:
            if value := getattr(node, field_name):
                bars.append(ChartBar(f"{node.name} {words}", (Piece(words, value, colour),), format_figure(value)))
    return BarChart("samples/s of each host", "samples/s", tuple(bars))


# ---- how it learned --------------------------------------------------------------------------------------------------


def curve_charts(curves: Curves, place: Place = lambda step: step + 1, over: str = "updates") -> tuple[LineChart, ...]:
    """Each with at least two points."""
    training = [(place(point.step), point.loss) for point in curves.loss]
    tested = [(place(each.step), each.loss) for each in curves.evaluations if each.loss is not None]
    right = [(place(each.step), each.accuracy) for each in curves.evaluations if each.accuracy is not None]
    losses = (ChartLine("training", training, _TRAINING), ChartLine("test", tested, _TEST, dots=True))
    charts = []
    if len(training) > 1:
        charts.append(LineChart("loss", over, losses, from_zero=True))
    if len(right) > 1:
        charts.append(LineChart("test accuracy", over, (ChartLine("test", right, _TEST, dots=True),), percent=True))
    return tuple(charts)


def by_clock(curves: Curves) -> Iterator[tuple[str, tuple[LineChart, ...]]]:
    """`curve_charts` over seconds and samples, if recorded."""
    if len(curves.course) < 2:
        return
    for over, values in (
        ("seconds", [moment.seconds for moment in curves.course]),
        ("samples", [float(moment.samples) for moment in curves.course]),
    ):
        if charts := curve_charts(curves, placed(curves.course, values), over):
            yield over, charts


# ---- the hosts' speeds -----------------------------------------------------------------------------------------------

HAPPENED = {
    "rebalance": ("shares changed", "#d55e00"),
    "eval": ("evaluation", "#cc79a7"),
    "checkpoint": ("checkpoint", "#757d87"),
}


def speed_chart(summary: Summary) -> LineChart | None:
    """Over seconds if known, else over updates. None with too few steps. Too many hosts: the most changed."""
    course = summary.speed_course
    if not course.hosts:
        return None
    moments = summary.curves.course
    timed = len(moments) > 1
    place = placed(moments, [moment.seconds for moment in moments]) if timed else float
    xs = [place(step) for step in course.steps]
    shown = zip(_most_changed(course.hosts), PALETTE, strict=False)
    return LineChart(
        "samples/s of each host",
        "seconds" if timed else "updates",
        tuple(ChartLine(host.name, list(zip(xs, host.samples_per_s, strict=True)), colour) for host, colour in shown),
        from_zero=True,
        uprights=tuple(
            Upright(name, place(mark.step), colour) for mark in course.marks for name, colour in (HAPPENED[mark.what],)
        ),
    )


def _most_changed(hosts: Sequence[HostCourse]) -> list[HostCourse]:
    """In order; by the relative difference of slowest and fastest stretch."""

    def change(host: HostCourse) -> float:
        return (max(host.samples_per_s) - min(host.samples_per_s)) / (max(host.samples_per_s) or 1.0)

    kept = sorted(hosts, key=change, reverse=True)[:MOST_LINES]
    return [host for host in hosts if host in kept]


def live_charts(course: Sequence[CoursePoint]) -> list[LineChart]:
    """Speed and loss over updates, as far as a running job has come."""
    speeds = [(float(point.step), point.samples_per_s) for point in course if point.samples_per_s is not None]
    losses = [(float(point.step), point.loss) for point in course if point.loss is not None]
    drawn = (("samples/s together", speeds, PALETTE[0]), ("training loss", losses, _TRAINING))
    return [
        LineChart(title, "updates", (ChartLine(title, points, colour),), from_zero=True)
        for title, points, colour in drawn
        if len(points) > 1
    ]


# ---- the hosts' GPUs -------------------------------------------------------------------------------------------------

POINTS = 150
"""Up to twice as many are drawn."""
FIRST_S, LONGEST_S = 2.0, 1e9
MINUTES_FROM_S = 600.0
QUANTITIES = {
    "utilisation": "GPU use, %",
    "sm_mhz": "SM clock, MHz",
    "watts": "power, W",
    "celsius": "temperature, °C",
}


@dataclass
class Stretch:
    readings: int = 0
    slowed: int = 0
    """Readings of a slowed GPU."""
    by: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Sum and number of readings, by quantity."""

    def add(self, other: Stretch) -> None:
        self.readings += other.readings
        self.slowed += other.slowed
        for name, (total, times) in other.by.items():
            before = self.by.get(name, (0.0, 0))
            self.by[name] = (before[0] + total, before[1] + times)


class GpuCourse:
    """Readings of one host's GPUs in equal stretches, whose length doubles at 2 * POINTS."""

    def __init__(self) -> None:
        self.stretch_s = FIRST_S
        self._stretches: dict[int, Stretch] = {}
        self._began: float | None = None

    def add(self, reading: Reading) -> None:
        if reading.wall is None:
            return
        self._began = reading.wall if self._began is None else self._began
        since_s = reading.wall - self._began
        if not 0 <= since_s < LONGEST_S:  # its clock was set
            return
        values = {name: (value, 1) for name in QUANTITIES if (value := getattr(reading, name)) is not None}
        stretch = Stretch(1, int(is_slowed(reading.slowed_by)), values)
        self._stretches.setdefault(int(since_s // self.stretch_s), Stretch()).add(stretch)
        while max(self._stretches) >= 2 * POINTS:
            self._halve()

    def _halve(self) -> None:
        before, self._stretches = self._stretches, {}
        self.stretch_s *= 2
        for number, stretch in before.items():
            self._stretches.setdefault(number // 2, Stretch()).add(stretch)

    @property
    def lasted_s(self) -> float:
        return max(self._stretches, default=0) * self.stretch_s

    @property
    def slowed(self) -> float:
        """0..1 of its readings."""
        readings = sum(stretch.readings for stretch in self._stretches.values())
        return sum(stretch.slowed for stretch in self._stretches.values()) / max(1, readings)

    def points(self, quantity: str) -> Iterator[tuple[float, float, bool]]:
        """Seconds, mean, and whether mostly slowed."""
        for number, stretch in sorted(self._stretches.items()):
            total, times = stretch.by.get(quantity, (0.0, 0))
            if times:
                yield number * self.stretch_s, total / times, 2 * stretch.slowed > stretch.readings


def read_course(path: Path) -> GpuCourse:
    course = GpuCourse()
    for reading in readings(path):
        course.add(reading)
    return course


@dataclass(frozen=True)
class GpuCharts:
    charts: tuple[LineChart, ...]
    hosts: tuple[str, ...]
    unit: str
    of: int
    """Hosts with readings."""


def gpu_charts(courses: Mapping[str, GpuCourse]) -> GpuCharts:
    """A chart per quantity, a line per host, the mean over its GPUs. Too many hosts: the most slowed. Time counts from
    each host's first reading, since clocks differ.
    """
    known = {name: course for name, course in courses.items() if course.lasted_s}
    most = sorted(known, key=lambda name: -known[name].slowed)[:MOST_LINES]
    drawn = {name: known[name] for name in known if name in most}
    unit, unit_s = "seconds", 1.0
    if max((course.lasted_s for course in drawn.values()), default=0) > MINUTES_FROM_S:
        unit, unit_s = "minutes", 60.0
    charts = []
    for quantity, title in QUANTITIES.items():
        lines = tuple(
            _line(name, list(course.points(quantity)), unit_s, colour)
            for (name, course), colour in zip(drawn.items(), PALETTE, strict=False)
        )
        if max((len(line.points) for line in lines), default=0) > 1:
            charts.append(LineChart(title, unit, lines, from_zero=quantity == "utilisation"))
    return GpuCharts(tuple(charts), tuple(drawn), unit, len(known))


def _line(name: str, points: list[tuple[float, float, bool]], unit_s: float, colour: str) -> ChartLine:
    scaled = [(seconds / unit_s, value, slowed) for seconds, value, slowed in points]
    runs = [list(run) for slowed, run in groupby(scaled, key=lambda point: point[2]) if slowed]
    marked = tuple(tuple((x, y) for x, y, _ in run) for run in runs)
    return ChartLine(name, [(x, y) for x, y, _ in scaled], colour, marked=marked)


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
    if split := split_of_run(summary):
        found["step"] = partial(bar_figure, split, title_of(summary))
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
