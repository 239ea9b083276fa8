"""How a run learned, as the report draws it: loss and accuracy over updates, over time, and over samples. Pure.

curve_charts(summary.curves)                over updates
[*by_clock(summary.curves)]                 ("seconds", charts), ("samples", charts)
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.results.curves import Curves, Place, placed
from orchestrator.views.linechart import ChartLine, LineChart, line_chart, percent_words


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
        if charts := curve_charts(curves, placed(curves.course, values)):
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
