"""The figures of a run as plain tables, for a paper's own plots. Pure.

    for name, table in figure_tables(summary).items():
        table.columns, table.rows           name: hosts, speeds, loss, evaluations, epochs, shares

What is not known is None. Units stand in the names of the columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from orchestrator.results.curves import Curves, Place, placed
from orchestrator.results.summary import NodeSummary, Summary


@dataclass(frozen=True)
class FigureTable:
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


OF_HOST = (
    *("name", "gpu", "ranks", "batch_per_rank", "samples_per_s", "own_samples_per_s", "solo_samples_per_s"),
    *("load_ms", "compute_ms", "sync_ms", "wait_ms", "optim_ms", "peak_memory_bytes", "paced", "valid"),
)


def figure_tables(summary: Summary) -> dict[str, FigureTable]:
    """Those that have a row."""
    curves = summary.curves
    seconds, samples = _clocks(curves)
    columns = (*OF_HOST[:7], "step_p50_ms", "step_p95_ms", *OF_HOST[7:])
    found = {
        "hosts": FigureTable(columns, tuple(map(_host, summary.nodes))),
        "speeds": FigureTable(("step", "seconds", "host", "samples_per_s"), tuple(_speeds(summary, seconds))),
        "loss": FigureTable(
            ("step", "seconds", "samples", "loss"),
            tuple((point.step, seconds(point.step), samples(point.step), point.loss) for point in curves.loss),
        ),
        "evaluations": FigureTable(
            ("step", "seconds", "samples", "accuracy", "loss"),
            tuple(
                (each.step, seconds(each.step), samples(each.step), each.accuracy, each.loss)
                for each in curves.evaluations
            ),
        ),
        "epochs": FigureTable(
            ("epoch", "seconds", "loss"), tuple((each.epoch, each.seconds, each.loss) for each in curves.epochs)
        ),
        "shares": FigureTable(("step", "rank", "samples"), tuple(_shares(summary))),
    }
    return {name: table for name, table in found.items() if table.rows}


def _host(node: NodeSummary) -> tuple[Any, ...]:
    plain = [getattr(node, name) for name in OF_HOST]
    step = (node.step_ms.p50, node.step_ms.p95) if node.step_ms else (None, None)
    return (*plain[:7], *step, *plain[7:])


def _clocks(curves: Curves) -> tuple[Place | _Unknown, Place | _Unknown]:
    """Seconds and samples at a step."""
    if len(curves.course) < 2:
        return _Unknown(), _Unknown()
    seconds, samples = zip(*((moment.seconds, float(moment.samples)) for moment in curves.course), strict=True)
    return placed(curves.course, seconds), placed(curves.course, samples)


class _Unknown:
    """The course of a run of which no rank said when its updates were over."""

    def __call__(self, step: int) -> None:
        return None


def _speeds(summary: Summary, seconds: Place | _Unknown) -> Iterator[tuple[Any, ...]]:
    course = summary.speed_course
    for host in course.hosts:
        for step, speed in zip(course.steps, host.samples_per_s, strict=True):
            yield step, seconds(step), host.name, speed


def _shares(summary: Summary) -> Iterator[tuple[int, int, int]]:
    """Each rank's from the beginning, and from each change on."""
    changes = summary.rebalances
    begin = [(0, changes[0].before)] if changes else []
    for step, shares in [*begin, *((change.step, change.shares) for change in changes)]:
        for rank, samples in enumerate(shares):
            yield step, rank, samples
