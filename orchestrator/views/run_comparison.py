"""Comparison of runs on the screen and as a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from orchestrator.results.compare import ComparedRun, Comparison
from orchestrator.results.curves import Curves, Interval, placed
from orchestrator.units import format_duration
from orchestrator.views import console
from orchestrator.views.charts import PALETTE, BarChart, ChartLine, LineChart
from orchestrator.views.console import UNKNOWN, figure, percent, print_table, span
from orchestrator.views.report import environment, or_nothing
from orchestrator.views.run_charts import MOST_BARS, HostStep, split_chart


def print_comparison(comparison: Comparison) -> None:
    rows = [(run.letter, run.job, run.state, str(run.steps), ", ".join(run.hosts)) for run in comparison.runs]
    print_table(("", "job", "state", "steps", "hosts"), rows, right_from=3, left_from=4, drop=("hosts", "steps"))
    console.put("")
    goal = comparison.common_accuracy
    columns = ["", "samples/s", "95 % interval", "efficiency*", "accuracy"]
    columns += [f"to {percent(goal, 2)}"] if goal is not None else []
    figures = [_figures(run, has_goal=goal is not None) for run in comparison.runs]
    print_table(columns, figures, right_from=1, drop=("efficiency*",))
    for sentence in sentences(comparison):
        console.put(sentence)
    if comparison.differences:
        console.put("")
        names = [run.letter for run in comparison.runs]
        unlike = [(each.what, *each.values) for each in comparison.differences]
        print_table(("what differs", *names), unlike, right_from=99)


def sentences(comparison: Comparison) -> list[str]:
    """Verdicts by run, and notes."""
    lines = [headline(comparison)] if _are_different(comparison) else []
    lines += [f"{run.letter}: {run.verdict}" for run in comparison.runs[1:]]
    lines += [
        f"{run.letter}: a paced host kept its pace too seldom; its figures are not valid"
        for run in comparison.runs
        if not run.valid
    ]
    lines += [f"{run.letter}: {run.not_finite.words}" for run in comparison.runs if run.not_finite]
    if any(run.of_combined is not None for run in comparison.runs):
        lines.append("* the speed over the sum of its hosts' standalone speeds")
    lines.append("Ranges are from the steps within each run: repeat runs to see how they vary.")
    return lines if comparison.differences else [*lines, "Settings, hosts and versions are the same."]


def _figures(run: ComparedRun, *, has_goal: bool) -> tuple[str, ...]:
    accuracy = percent(run.accuracy, 2) + (f", loss {run.not_finite.loss}" if run.not_finite else "")
    cells = (run.letter, figure(run.samples_per_s), span(run.speed), percent(run.of_combined), accuracy)
    return (*cells, UNKNOWN if run.seconds_to is None else format_duration(run.seconds_to)) if has_goal else cells


# Comparison as a page: speeds with ranges, curves, differences. Pure.


def render_comparison(comparison: Comparison) -> str:
    """At most MOST_LINES runs."""
    runs = comparison.runs
    return (
        environment(span=or_nothing(span))
        .get_template("compare.html.j2")
        .render(
            comparison=comparison,
            headline=headline(comparison),
            most=_most(runs),
            bars=[_bar(run.speed, _most(runs)) for run in runs],
            split=_split(runs),
            has_accuracy=any(run.accuracy is not None for run in runs),
            charts_by_clock=[
                ("seconds", [*_charts(runs, "seconds", _seconds)]),
                ("samples", [*_charts(runs, "samples", _samples)]),
            ],
        )
    )


def headline(comparison: Comparison) -> str:
    """One sentence."""
    if kinds := _are_different(comparison):
        return f"{len(comparison.runs)} runs of {kinds} experiments: their samples are different work"
    known = [run for run in comparison.runs if run.samples_per_s is not None]
    if len(known) < 2:
        return f"{len(comparison.runs)} runs; at most one has a known speed"
    if len(comparison.runs) == 2:
        return f"B: {comparison.runs[1].verdict}"
    best = max(known, key=lambda run: run.samples_per_s or 0.0)
    return f"{len(comparison.runs)} runs; {best.letter} was the fastest, {figure(best.samples_per_s)} samples/s"


def _are_different(comparison: Comparison) -> int:
    """The number of experiments; 0 if there is only one."""
    kinds = {run.experiment for run in comparison.runs}
    return len(kinds) if len(kinds) > 1 else 0


def _split(runs: tuple[ComparedRun, ...]) -> BarChart | None:
    """Each run's hosts, below each other; of many, each run's slowest to wait for."""
    each = max(1, MOST_BARS // len(runs))
    steps = []
    for run in runs:
        hosts = sorted(run.parts_ms, key=lambda name: run.parts_ms[name].get("wait", 0.0))[:each]
        steps += [HostStep(f"{run.letter} · {name}", run.parts_ms[name]) for name in run.parts_ms if name in hosts]
    return split_chart(steps)


def _most(runs: tuple[ComparedRun, ...]) -> float | None:
    return max((run.speed.high for run in runs if run.speed), default=None)


def _bar(speed: Interval | None, most: float | None) -> Interval | None:
    """In percent of the fastest."""
    if speed is None or not most:
        return None
    return Interval(value=100 * speed.value / most, low=100 * speed.low / most, high=100 * speed.high / most)


def _seconds(curves: Curves) -> list[float]:
    return [moment.seconds for moment in curves.course]


def _samples(curves: Curves) -> list[float]:
    return [float(moment.samples) for moment in curves.course]


def _charts(runs: tuple[ComparedRun, ...], over: str, along: Callable[[Curves], list[float]]) -> Iterator[LineChart]:
    """Runs with a known course."""
    losses, accuracies = [], []
    for run, colour in zip(runs, PALETTE, strict=False):
        curves = run.curves
        if len(curves.course) < 2:
            continue
        place = placed(curves.course, along(curves))
        losses.append(ChartLine(run.letter, [(place(point.step), point.loss) for point in curves.loss], colour))
        tested = [(place(each.step), each.accuracy) for each in curves.evaluations if each.accuracy is not None]
        accuracies.append(ChartLine(run.letter, tested, colour, dots=True))
    if any(len(line.points) > 1 for line in losses):
        yield LineChart("training loss", over, tuple(losses), from_zero=True)
    if any(len(line.points) > 1 for line in accuracies):
        yield LineChart("test accuracy", over, tuple(accuracies), percent=True)
