"""Lines over updates as the report draws them: SVG within the page, in its own colours, as wide as there is room.
Pure.

    chart = line_chart("loss", [Line("training", ((0, 2.3), (100, 0.4)))], of_zero=True)
    chart.lines[0].path, chart.y_ticks[0].text

All places are in percent of the plot, from its left and its top. The words stand beside the drawing and not in it, so
that they keep their size where the page is narrow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Points = Sequence[tuple[float, float]]
MOST_LINES = 9
"""More cannot be distinguished: so many colours the pages' style has, those of Okabe and Ito and two more, which
colour-blind people tell apart, too.
"""
TICKS = 4
"""About so many on each axis."""
LEAST = 1e-9
"""Between two ticks: what differs by less is drawn as equal."""


@dataclass(frozen=True)
class ChartLine:
    """One line of a chart, in the chart's own quantities."""

    name: str
    points: Points
    """(x, y) in the order of x."""
    dots: bool = False
    """Whether each point is marked, too."""
    marked: Sequence[Points] = ()
    """Stretches of it that stand out."""


@dataclass(frozen=True)
class Drawn:
    """One line of a chart as paths of an SVG."""

    name: str
    path: str
    dots: str
    """A path of length 0 for each point."""
    marked: str = ""
    """The stretches that stand out."""


@dataclass(frozen=True)
class Tick:
    place: float
    text: str


@dataclass(frozen=True)
class Upright:
    """Something that happened at one place of the x axis."""

    name: str
    place: float


@dataclass(frozen=True)
class LineChart:
    title: str
    lines: tuple[Drawn, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    uprights: tuple[Upright, ...] = ()

    @property
    def happened(self) -> tuple[str, ...]:
        """The names of its uprights, each once."""
        return tuple(dict.fromkeys(upright.name for upright in self.uprights))


def line_chart(
    title: str,
    lines: Sequence[ChartLine],
    *,
    of_zero: bool = False,
    words: Callable[[float, int], str] | None = None,
    uprights: Sequence[tuple[str, float]] = (),
) -> LineChart:
    """The x axis begins at 0. of_zero: the y axis, too, else a little below the least value. words: of a y value, to so
    many digits after the point. uprights: names and places on the x axis; none beyond the last point is drawn.

    There has to be a point; no x may be negative.
    """
    xs, ys = ([point[axis] for line in lines for point in line.points] for axis in (0, 1))
    x_marks, _ = marks(0, max(xs), whole=True)
    y_marks, y_digits = marks(min(0, *ys) if of_zero else min(ys), max(ys))
    across = _scale(0, max(xs))
    upwards = _scale(y_marks[-1], y_marks[0])  # SVG counts from the top
    return LineChart(
        title=title,
        lines=tuple(_drawn(line, across, upwards) for line in lines if line.points),
        x_ticks=tuple(Tick(across(x), f"{x:,.0f}") for x in x_marks if x <= max(xs)),
        y_ticks=tuple(Tick(upwards(y), (words or _plain)(y, y_digits)) for y in y_marks),
        uprights=tuple(Upright(name, across(x)) for name, x in uprights if x <= max(xs)),
    )


def percent_words(value: float, digits: int) -> str:
    """A part (0..1) in percent."""
    return f"{100 * value:.{max(0, digits - 2)}f} %"


def _plain(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if digits <= 4 and abs(value) < 1e5 else f"{value:.3g}"


def _drawn(line: ChartLine, across: Callable[[float], float], upwards: Callable[[float], float]) -> Drawn:
    def places(points: Points) -> list[str]:
        return [f"{across(x):.2f} {upwards(y):.2f}" for x, y in points]

    own = places(line.points)
    dots = "".join(f"M{place}h0" for place in own) if line.dots or len(own) == 1 else ""
    marked = "".join(f"M{'L'.join(places(run))}h0" for run in line.marked)  # h0: of a single point, a dot
    return Drawn(line.name, "M" + "L".join(own), dots, marked)


def _scale(low: float, high: float) -> Callable[[float], float]:
    """From values to percent; a single value lies in the middle."""
    return (lambda value: 100 * (value - low) / (high - low)) if high != low else (lambda value: 50.0)


def marks(low: float, high: float, *, whole: bool = False) -> tuple[list[float], int]:
    """Round values from at most `low` to at least `high`, 1, 2 or 5 times a power of ten apart; and how many digits
    after the point distinguish them.
    """
    apart = max((high - low or abs(high) or 1.0) / TICKS, LEAST)
    power = 10.0 ** math.floor(math.log10(apart))
    apart = next(times * power for times in (1, 2, 5, 10) if times * power >= apart * (1 - 1e-9))
    apart = max(apart, 1.0) if whole else apart
    first, last = math.floor(low / apart + 1e-9), math.ceil(high / apart - 1e-9)
    if first == last:
        first, last = (first - 1, last) if first > 0 else (first, last + 1)
    digits = max(0, -math.floor(math.log10(apart) + 1e-9))
    return [number * apart for number in range(first, last + 1)], digits
