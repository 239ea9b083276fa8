"""Each host's speed in the course of a run, as the report draws it, with what happened meanwhile. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.results.curves import placed
from orchestrator.results.speed_course import HostCourse
from orchestrator.results.summary import Summary
from orchestrator.views.linechart import MOST_LINES, ChartLine, LineChart, line_chart

HAPPENED = {"rebalance": "shares changed", "eval": "evaluation", "checkpoint": "checkpoint"}
STYLES = {"shares changed": "rebalance", "evaluation": "evaluation", "checkpoint": "checkpoint"}


@dataclass(frozen=True)
class SpeedChart:
    chart: LineChart
    over: str
    """What its x axis counts: seconds where a rank says when its updates were over, else updates."""
    styles: dict[str, str]
    of: int
    """How many hosts there would be to draw."""


def speed_chart(summary: Summary) -> SpeedChart | None:
    """None where too few steps were measured."""
    course = summary.speed_course
    if not course.hosts:
        return None
    moments = summary.curves.course
    timed = len(moments) > 1
    place = placed(moments, [moment.seconds for moment in moments]) if timed else float
    xs = [place(step) for step in course.steps]
    drawn = _most_changed(course.hosts)
    chart = line_chart(
        "samples/s of each host",
        [ChartLine(host.name, list(zip(xs, host.samples_per_s, strict=True))) for host in drawn],
        of_zero=True,
        uprights=[(HAPPENED[mark.what], place(mark.step)) for mark in course.marks],
    )
    styles = {host.name: f"host{number}" for number, host in enumerate(drawn)} | STYLES
    return SpeedChart(chart, "seconds" if timed else "updates", styles, len(course.hosts))


def _most_changed(hosts: Sequence[HostCourse]) -> list[HostCourse]:
    """In their order; of too many those with the largest part between their slowest and their fastest stretch."""

    def change(host: HostCourse) -> float:
        return (max(host.samples_per_s) - min(host.samples_per_s)) / (max(host.samples_per_s) or 1.0)

    kept = sorted(hosts, key=change, reverse=True)[:MOST_LINES]
    return [host for host in hosts if host in kept]
