"""Line charts of a run: loss and accuracy, hosts' speeds, and GPUs. Pure except for `read_course`.

curve_charts(summary.curves)                    loss and accuracy over updates
[*by_clock(summary.curves)]                     ("seconds", charts), ("samples", charts)
speed_chart(summary)                            samples/s of each host
gpu_charts({name: read_course(path), ...})      use, clock, power, temperature of each host's GPUs
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from orchestrator.jobs.live_stats import Reading
from orchestrator.results.curves import Curves, HostCourse, Place, placed
from orchestrator.results.straggler import readings
from orchestrator.results.summary import Summary, is_slowed
from orchestrator.views.charts import MOST_LINES, PALETTE, ChartLine, LineChart, Upright

_TRAINING, _TEST = PALETTE[0], PALETTE[3]

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
