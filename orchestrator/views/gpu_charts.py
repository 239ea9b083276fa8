"""Use, clock, power and temperature of each host's GPUs over a run, as the report draws them. Pure but for
`read_course`.

    courses = {node.name: read_course(run.gpu(node.name)) for node in summary.nodes}
    drawn = gpu_charts(courses)         # drawn.charts, drawn.hosts, drawn.unit

A line is a host, the mean over its GPUs; where its clocks were held down (`slowed`) it is marked. Time counts from each
host's own first reading: clocks of different hosts are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from orchestrator.jobs.gpu_reading import Reading
from orchestrator.results.gpu_use import readings
from orchestrator.results.slowed import is_slowed
from orchestrator.views.linechart import MOST_LINES, ChartLine, LineChart, line_chart

POINTS = 150
"""Points of a line; up to twice as many are drawn."""
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
    """Sums over some seconds."""

    readings: int = 0
    slowed: int = 0
    """How many of the readings found it slowed."""
    by: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Each quantity's sum, and how many readings had it."""

    def add(self, other: Stretch) -> None:
        self.readings += other.readings
        self.slowed += other.slowed
        for name, (total, times) in other.by.items():
            before = self.by.get(name, (0.0, 0))
            self.by[name] = (before[0] + total, before[1] + times)


class GpuCourse:
    """What one host's GPUs did, in stretches of equal length: the longer the run, the longer each, so that there are
    never more than 2 * POINTS of them.
    """

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
        """The part of its readings, 0..1."""
        readings = sum(stretch.readings for stretch in self._stretches.values())
        return sum(stretch.slowed for stretch in self._stretches.values()) / max(1, readings)

    def points(self, quantity: str) -> Iterator[tuple[float, float, bool]]:
        """Seconds, the mean, and whether it was slowed for most of that time."""
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
    """The GPUs' course over the run, a chart for each quantity."""

    charts: tuple[LineChart, ...]
    hosts: tuple[str, ...]
    """Those drawn, in the order of their colours."""
    unit: str
    """The unit of time: seconds or minutes."""
    of: int
    """How many hosts there would be to draw."""


def gpu_charts(courses: Mapping[str, GpuCourse]) -> GpuCharts:
    """A chart for each quantity of which a host reported two points. Of too many hosts those that were slowed most."""
    known = {name: course for name, course in courses.items() if course.lasted_s}
    most = sorted(known, key=lambda name: -known[name].slowed)[:MOST_LINES]
    drawn = {name: known[name] for name in known if name in most}
    unit, unit_s = "seconds", 1.0
    if max((course.lasted_s for course in drawn.values()), default=0) > MINUTES_FROM_S:
        unit, unit_s = "minutes", 60.0
    charts = []
    for quantity, title in QUANTITIES.items():
        lines = [_line(name, list(course.points(quantity)), unit_s) for name, course in drawn.items()]
        if max((len(line.points) for line in lines), default=0) > 1:
            charts.append(line_chart(title, lines, of_zero=quantity == "utilisation"))
    return GpuCharts(tuple(charts), tuple(drawn), unit, len(known))


def _line(name: str, points: list[tuple[float, float, bool]], unit_s: float) -> ChartLine:
    scaled = [(seconds / unit_s, value, slowed) for seconds, value, slowed in points]
    runs = [list(run) for slowed, run in groupby(scaled, key=lambda point: point[2]) if slowed]
    marked = tuple(tuple((x, y) for x, y, _ in run) for run in runs)
    return ChartLine(name, [(x, y) for x, y, _ in scaled], marked=marked)
