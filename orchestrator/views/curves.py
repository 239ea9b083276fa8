"""How a run learned, as the report draws it: loss and accuracy over updates, over time, and over samples.

curve_charts(summary.curves)                over updates
[*by_clock(summary.curves)]                 ("seconds", charts), ("samples", charts)
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence

from orchestrator.results.curves import Curves, Moment
from orchestrator.views.linechart import ChartLine, LineChart, line_chart, percent_words

Place = Callable[[int], float]
"""Where an update lies on the x axis, by its number."""


def curve_charts(curves: Curves, place: Place = lambda step: step + 1) -> tuple[LineChart, ...]:
    """Of loss and of accuracy, where two points of one are known."""
    return (*_loss(curves, place), *_accuracy(curves, place))


def by_clock(curves: Curves) -> Iterator[tuple[str, tuple[LineChart, ...]]]:
    """The same over seconds and over samples, where the course of the run is known."""
    if len(curves.course) < 2:
        return
    for name, values in (
        ("seconds", [moment.seconds for moment in curves.course]),
        ("samples", [float(moment.samples) for moment in curves.course]),
    ):
        if charts := curve_charts(curves, _placed(curves.course, values)):
            yield name, charts


def _loss(curves: Curves, place: Place) -> Iterator[LineChart]:
    training = [(place(point.step), point.loss) for point in curves.loss]
    tested = [(place(each.step), each.loss) for each in curves.evaluations if each.loss is not None]
    if len(training) > 1:
        yield line_chart("loss", [ChartLine("training", training), ChartLine("test", tested, dots=True)], of_zero=True)


def _accuracy(curves: Curves, place: Place) -> Iterator[LineChart]:
    accuracies = [(place(each.step), each.accuracy) for each in curves.evaluations if each.accuracy is not None]
    if len(accuracies) > 1:
        yield line_chart("test accuracy", [ChartLine("test", accuracies, dots=True)], words=percent_words)


def _placed(course: Sequence[Moment], values: Sequence[float]) -> Place:
    """Between two moments in proportion to the updates; before the first and behind the last, as these."""
    steps = [moment.step for moment in course]

    def place(step: int) -> float:
        after = bisect.bisect_left(steps, step)
        if after == 0 or after == len(steps):
            return values[min(after, len(steps) - 1)]
        part = (step - steps[after - 1]) / (steps[after] - steps[after - 1])
        return values[after - 1] + part * (values[after] - values[after - 1])

    return place
