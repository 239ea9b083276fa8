"""Comparison of collected runs: speeds with confidence intervals, and the differences between the runs. Needs no host.

    comparison = compare([RunFolder(Path("runs/a")), RunFolder(Path("runs/b"))])
    comparison.runs[1].of_first         Interval(value=3.9, low=3.8, high=4.0): 3.9 times as fast as the first
    comparison.runs[1].verdict          "3.90 times as fast as A (3.80 to 4.00)"

The first run is the reference. Intervals come from the steps within a run (`curves`), so they miss variation between
runs; differences below LEAST are reported as "no difference".
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from orchestrator.jobs.job_store import NotFinite
from orchestrator.paths import RunFolder
from orchestrator.record import SCHEMA, Record
from orchestrator.results.curves import LEAST_STEPS, Curves, Interval, Place, interval, placed, ratio
from orchestrator.results.summary import NodeSummary, Summary
from orchestrator.results.tables import read_steps
from orchestrator.units import format_bandwidth, one_line

LETTERS = string.ascii_uppercase
LEAST = 0.02
"""Repeated runs differ by this much: clocks, caches, placement of threads."""
ABSENT = "-"


class ComparedRun(Record):
    letter: str
    job: str
    experiment: str
    state: str
    hosts: tuple[str, ...]
    slow_words: str = ""
    parts_ms: dict[str, dict[str, float]] = Field(default_factory=dict)
    """A step's parts by host."""
    samples_per_s: float | None = None
    speed: Interval | None = None
    """samples_per_s with its interval; None with too few steps."""
    of_first: Interval | None = None
    """Relative to the first run."""
    of_combined: float | None = None
    """Relative to the sum of its hosts' own speeds, 0..1."""
    valid: bool = True
    """Every paced host kept its pace."""
    not_finite: NotFinite | None = None
    accuracy: float | None = None
    seconds_to: float | None = None
    """Until `Comparison.common_accuracy`."""
    steps: int = 0
    total_s: float | None = None
    curves: Curves = Field(default_factory=Curves)

    @property
    def verdict(self) -> str:
        """Compared to the first run."""
        found = self.of_first
        if found is None:
            return f"not compared: it takes {LEAST_STEPS} measured steps with known samples in both"
        inside = f"({found.low:.2f} to {found.high:.2f})"
        if found.low <= 1 <= found.high or abs(found.value - 1) < LEAST:
            return f"no difference from A: {found.value:.2f} {inside}"
        return f"{found.value:.2f} times as fast as A {inside}"


class Difference(Record):
    """A setting, host or version that differs between runs."""

    what: str
    values: tuple[str, ...]
    """By run."""


class Comparison(Record):
    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    runs: tuple[ComparedRun, ...]
    common_accuracy: float | None = None
    """The highest accuracy that every run reached, 0..1; None if a run has no evaluation."""
    differences: tuple[Difference, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """With each run's verdict."""
        document = self.model_dump(mode="json", by_alias=True)
        for run, entry in zip(self.runs, document["runs"], strict=True):
            entry["verdict"] = None if run is self.runs[0] else run.verdict
        return document


def compare(folders: Sequence[RunFolder]) -> Comparison:
    """At most 26 analysed runs. Raises OrchError if one cannot be read."""
    summaries = [Summary.load(folder) for folder in folders]
    steps = [read_steps(folder) for folder in folders]
    common = common_accuracy([summary.curves for summary in summaries])
    runs = tuple(
        ComparedRun(
            letter=letter,
            job=summary.job,
            experiment=summary.experiment,
            state=summary.state,
            hosts=tuple(node.name for node in summary.nodes),
            slow_words=summary.slow_words,
            parts_ms={node.name: parts for node in summary.nodes if (parts := node.parts_ms)},
            samples_per_s=summary.samples_per_s,
            speed=interval(own),
            of_first=ratio(steps[0], own) if letter != LETTERS[0] else None,
            of_combined=summary.efficiency,
            valid=all(node.valid for node in summary.nodes),
            not_finite=summary.not_finite,
            accuracy=summary.accuracy,
            seconds_to=None if common is None else seconds_to(summary.curves, common),
            steps=summary.steps,
            total_s=summary.total_s,
            curves=summary.curves,
        )
        for letter, summary, own in zip(LETTERS, summaries, steps, strict=False)
    )
    return Comparison(schema=SCHEMA, runs=runs, common_accuracy=common, differences=tuple(differences(summaries)))


def common_accuracy(curves: Sequence[Curves]) -> float | None:
    best = [max((each.accuracy for each in of.evaluations if each.accuracy is not None), default=None) for of in curves]
    known = [accuracy for accuracy in best if accuracy is not None]
    return min(known) if known and len(known) == len(best) else None


def seconds_to(curves: Curves, accuracy: float) -> float | None:
    """From the first update to the first evaluation that reached it; None if unknown."""
    if len(curves.course) < 2:
        return None
    place = placed(curves.course, [moment.seconds for moment in curves.course])
    reached = (each.step for each in curves.evaluations if each.accuracy is not None and each.accuracy >= accuracy)
    return next((place(step) for step in reached), None)


def differences(summaries: Sequence[Summary]) -> Iterator[Difference]:
    """Settings, then hosts, then versions."""
    yield from _unlike("", [_as_words(summary.settings) for summary in summaries])
    yield from _unlike("", [_of_run(summary) for summary in summaries])
    names = dict.fromkeys(node.name for summary in summaries for node in summary.nodes)
    nodes = [{node.name: node for node in summary.nodes} for summary in summaries]
    for name in names:
        found = [_of_host(by_name[name]) if name in by_name else {} for by_name in nodes]
        if all(found):  # else `hosts` reports it already
            yield from _unlike(f"{name}: ", found)


def _unlike(before: str, rows: Sequence[Mapping[str, str]]) -> Iterator[Difference]:
    for key in dict.fromkeys(key for row in rows for key in row):
        values = tuple(row.get(key, ABSENT) for row in rows)
        if len({*values}) > 1:
            yield Difference(what=f"{before}{key}", values=values)


def _as_words(settings: Mapping[str, Any]) -> dict[str, str]:
    return {one_line(key, 40): one_line(str(value), 60) for key, value in settings.items()}


def _of_run(summary: Summary) -> dict[str, str]:
    code = summary.code
    return {
        "experiment": one_line(summary.experiment, 60),
        "command": one_line(summary.command or ABSENT, 60) if summary.kind != "experiment" else ABSENT,
        "hosts": ", ".join(node.name for node in summary.nodes),
        "ranks": str(summary.world_size),
        "code": (code.commit.words if code.commit else code.sha256[:12]) if code else ABSENT,
    }


def _of_host(node: NodeSummary) -> dict[str, str]:
    system = node.system
    known = {
        "GPU": node.gpu,
        "ranks": str(node.ranks),
        "batch of a rank": node.batch_per_rank,
        "bandwidth": None if node.bandwidth_bps is None else format_bandwidth(node.bandwidth_bps),
        "torch": node.torch,
        "NCCL": node.nccl,
        "back end": node.backend,
        "driver": system and system.driver,
        "CUDA of torch": system and system.cuda,
        "Python": system and system.python,
        "kernel": system and system.kernel,
        "slowed": node.slowed.words if node.slowed else None,
    }
    return {key: one_line(str(value), 60) for key, value in known.items() if value is not None}


# Figures of a run as plain tables, for a user's own plots. Pure. Unknown values are None; column names have units.
#
#     for name, table in figure_tables(summary).items():
#         table.columns, table.rows           name: hosts, speeds, loss, evaluations, epochs, shares


@dataclass(frozen=True)
class FigureTable:
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


OF_HOST = (
    *("name", "gpu", "ranks", "batch_per_rank", "samples_per_s", "own_samples_per_s", "solo_samples_per_s"),
    *("load_ms", "compute_ms", "sync_ms", "wait_ms", "optim_ms", "peak_memory_bytes", "paced", "valid"),
)


def figure_tables(summary: Summary) -> dict[str, FigureTable]:
    """Without empty tables."""
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
    """Functions from step to seconds and samples."""
    if len(curves.course) < 2:
        return _Unknown(), _Unknown()
    seconds, samples = zip(*((moment.seconds, float(moment.samples)) for moment in curves.course), strict=True)
    return placed(curves.course, seconds), placed(curves.course, samples)


class _Unknown:
    """No rank reported when its updates ended."""

    def __call__(self, step: int) -> None:
        return None


def _speeds(summary: Summary, seconds: Place | _Unknown) -> Iterator[tuple[Any, ...]]:
    course = summary.speed_course
    for host in course.hosts:
        for step, speed in zip(course.steps, host.samples_per_s, strict=True):
            yield step, seconds(step), host.name, speed


def _shares(summary: Summary) -> Iterator[tuple[int, int, int]]:
    """Each rank's shares, initial and after each change."""
    changes = summary.rebalances
    begin = [(0, changes[0].before)] if changes else []
    for step, shares in [*begin, *((change.step, change.shares) for change in changes)]:
        for rank, samples in enumerate(shares):
            yield step, rank, samples
