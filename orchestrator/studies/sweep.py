"""Runs a study's rows one after the other and keeps what came of each, so that a sweep goes on where it stopped.

    sweep = Sweep(study_name, controller, cluster, out, overrides={})
    for outcome in sweep.run(follow, only=["3090x2-ddp"], repeats=3):
        outcome.row.name, outcome.done.spread("samples_per_s"), outcome.why_not
    within_noise(study, outcomes)

Rows are repeated in rounds, so that a machine whose speed drifts does so for all of them. A row is remembered before
its job starts. After an interruption its job is found again: followed if it still runs, collected if it has ended well,
started again otherwise. Rows done on other clusters stay in the same table.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from orchestrator.controller import Controller
from orchestrator.errors import OrchError, UsageError
from orchestrator.files import locked, own_folder, write_atomic
from orchestrator.hosts.cluster import Cluster
from orchestrator.jobs.record import FINAL_STATES
from orchestrator.jobs.running import RunningJob
from orchestrator.planning.launch_plan import NodePlan
from orchestrator.planning.request import read_experiment
from orchestrator.record import SCHEMA, Record
from orchestrator.results.summary import Summary
from orchestrator.studies.tables import STUDIES, Study, StudyRow, choose_nodes, hosts_words

Follow = Callable[[StudyRow, RunningJob], None]
"""Shows a job until its end."""

REPEATS, SHORT_S = 3, 60.0
"""How often a row is run where nothing else is asked for, if its first run took less than so many seconds."""


class RowRun(Record):
    """One job of a row."""

    job: str
    figures: dict[str, float | None] = Field(default_factory=dict)
    valid: bool = True
    total_s: float | None = None
    """How long it took; None where that is not known."""


@dataclass(frozen=True)
class Spread:
    """The spread of a figure over a row's runs."""

    least: float
    median: float
    most: float

    def overlaps(self, other: Spread) -> bool:
        return self.least <= other.most and other.least <= self.most


class Done(Record):
    """What is kept of a row: the runs that are collected, and the job that was begun after them."""

    cluster: str
    hosts: str = ""
    """What it ran on, in a few words."""
    overrides: dict[str, str] = Field(default_factory=dict)
    runs: tuple[RowRun, ...] = ()
    begun: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_one_run(cls, value: Any) -> Any:
        """Files of the time when a row was run once."""
        if not isinstance(value, dict) or "job" not in value:
            return value
        run = {key: value[key] for key in ("job", "figures", "valid") if key in value}
        return {**value, "runs": [run]} if value.get("complete") else {**value, "begun": value["job"]}

    @property
    def is_short(self) -> bool:
        """Whether its first run took so little time that others may follow unasked."""
        return bool(self.runs) and self.runs[0].total_s is not None and self.runs[0].total_s < SHORT_S

    @property
    def valid(self) -> bool:
        return all(run.valid for run in self.runs)

    def spread(self, figure: str) -> Spread | None:
        """None where a run lacks it."""
        values = [run.figures.get(figure) for run in self.runs]
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        return Spread(min(known), statistics.median(known), max(known))


class Ledger(Record):
    """`<out>/sweep-<study>.json`."""

    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    rows: dict[str, Done] = Field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """One line of the table: done, or why it is not."""

    row: StudyRow
    done: Done | None
    why_not: str = ""


class Sweep:
    """overrides: settings that go before the rows' own; figures made under others do not count as done."""

    def __init__(
        self, name: str, controller: Controller, cluster: Cluster, out: Path, overrides: Mapping[str, str]
    ) -> None:
        self.study: Study = STUDIES[name]
        self.controller, self.cluster, self.out, self.overrides = controller, cluster, out, dict(overrides)
        self.file = out / f"sweep-{name}.json"

    def run(
        self, follow: Follow, *, only: Sequence[str] = (), again: bool = False, repeats: int | None = None
    ) -> list[Outcome]:
        """Every row, as often as `repeats` says; None: REPEATS times where its first run was short, else once.

        Raises HostsError where the cluster cannot be used at all, OrchError where a row's job fails: what was done
        before is kept.
        """
        own_folder(self.out)
        with locked(self.out / f".{self.file.name}.lock"):
            nodes, rows = self._nodes(), self.study.rows
            asked = {row.name for row in rows if not only or row.name in only}
            done = {row.name: None if again and row.name in asked else self._kept(row) for row in rows}
            chosen = {row.name: choose_nodes(row, nodes) for row in rows}
            for turn in range(repeats or REPEATS):
                for row in rows:
                    here = chosen[row.name]
                    if row.name in asked and not isinstance(here, str) and self._due(done[row.name], turn, repeats):
                        done[row.name] = self._measure(row, here, done[row.name], follow)
        return [self._outcome(row, done[row.name], chosen[row.name], row.name in asked) for row in rows]

    def _due(self, done: Done | None, turn: int, repeats: int | None) -> bool:
        """Whether a row is to be run in this turn. What another cluster has measured is left as it is."""
        if done is None or not done.runs:
            return True
        return done.cluster == self.cluster.name and len(done.runs) <= turn and (repeats is not None or done.is_short)

    def _outcome(self, row: StudyRow, done: Done | None, chosen: tuple[str, ...] | str, asked: bool) -> Outcome:
        done = done if done and done.runs else None
        why_not = "" if done or not isinstance(chosen, str) else chosen
        return Outcome(row, done, why_not if asked else "not asked for")

    def _nodes(self) -> tuple[NodePlan, ...]:
        """The cluster's nodes as a plan sees them, with their ranks and GPUs."""
        first = self.study.rows[0]
        wish = read_experiment(first.exp, {})
        return self.controller.plan(self.cluster, wish.request, wish.code).nodes

    def _measure(self, row: StudyRow, nodes: tuple[str, ...], before: Done | None, follow: Follow) -> Done:
        """One more run of it."""
        runs = before.runs if before else ()
        job = self._find_again(row, before, follow) or self._start(row, nodes, runs, follow)
        if job.record.state != "succeeded":
            raise OrchError(
                f"{row.name}: {job.id} did not succeed",
                f"see `orch logs --job {job.id}`; the same command resumes with this row",
            )
        collected = self.controller.collect(job, self.out)
        for error in collected.errors.values():
            raise error
        done = Done(
            cluster=job.plan.cluster,
            hosts=hosts_words(job.plan.nodes),
            overrides=self.overrides,
            runs=(*runs, self._run_of(job.id, collected.summary)),
        )
        self._keep(row, done)
        return done

    def _run_of(self, job: str, summary: Summary) -> RowRun:
        figures = {name: FIGURES[name].of(summary) for name in self.study.figures}
        valid = all(node.valid for node in summary.nodes)
        return RowRun(job=job, figures=figures, valid=valid, total_s=summary.total_s)

    def _start(self, row: StudyRow, nodes: tuple[str, ...], runs: tuple[RowRun, ...], follow: Follow) -> RunningJob:
        wish = read_experiment(row.exp, {**row.settings, **self.overrides})
        plan = self.controller.plan(self.cluster, wish.request, wish.code, nodes)
        begun = Done(cluster=plan.cluster, hosts=hosts_words(plan.nodes), overrides=self.overrides, runs=runs)
        self._keep(row, begun.model_copy(update={"begun": plan.job}))
        job = self.controller.launch(plan, wish.blob)
        follow(row, job)
        return job

    def _find_again(self, row: StudyRow, before: Done | None, follow: Follow) -> RunningJob | None:
        """The job that an interrupted sweep left for this row, at its end; None where it has to be run again. Raises
        OrchError where it still runs and cannot be followed.
        """
        if before is None or before.begun is None or before.cluster != self.cluster.name:
            return None
        try:
            job = self.controller.job_of(self.controller.store.plan(before.begun))
            record = job.refresh()
        except OrchError:  # forgotten or damaged
            return None
        if record.state not in FINAL_STATES:
            job.reach()
            follow(row, job)  # where this fails, the job runs on: another one beside it would disturb both
            record = job.record
        return None if record.state in FINAL_STATES - {"succeeded"} else job

    def _kept(self, row: StudyRow) -> Done | None:
        done = self._ledger().rows.get(row.name)
        return done if done and done.overrides == self.overrides else None

    def _keep(self, row: StudyRow, done: Done) -> None:
        ledger = self._ledger()
        rows = {**ledger.rows, row.name: done}
        write_atomic(
            self.file, ledger.model_copy(update={"rows": rows}).model_dump_json(by_alias=True, indent=1) + "\n"
        )

    def _ledger(self) -> Ledger:
        try:
            return Ledger.model_validate_json(self.file.read_bytes())
        except FileNotFoundError:
            return Ledger(schema=SCHEMA)
        except (OSError, ValidationError) as error:
            raise UsageError(f"{self.file}: no sweep of ours ({type(error).__name__})", "move it away") from error


@dataclass(frozen=True)
class Figure:
    title: str
    digits: int
    of: Callable[[Summary], float | None]
    scale: float = 1.0


def _largest(summary: Summary, *parts: str) -> float | None:
    """The largest sum, over all hosts, of these parts of a step (ms); None where none is known."""
    sums = []
    for node in summary.nodes:
        values = [getattr(node, part) for part in parts]
        if None not in values:
            sums.append(sum(values))
    return max(sums) if sums else None


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


def _train_s(summary: Summary) -> float | None:
    """All updates at the pace of the measured ones."""
    step_ms = _step_ms(summary)
    return None if step_ms is None else step_ms * (summary.steps + summary.warmup_steps_left_out) / 1000


def _step_ms(summary: Summary) -> float | None:
    return _largest(summary, "load_ms", "compute_ms", "sync_ms", "wait_ms", "optim_ms")


FIGURES: dict[str, Figure] = {
    "samples_per_s": Figure("samples/s", 1, lambda summary: summary.samples_per_s),
    "step_ms": Figure("step ms", 1, _step_ms),
    "sync_ms": Figure("sync ms", 1, lambda summary: _largest(summary, "sync_ms")),
    "wait_ms": Figure("wait ms", 1, lambda summary: _largest(summary, "wait_ms")),
    "efficiency": Figure("of the sum", 3, lambda summary: summary.efficiency),
    "train_s": Figure("train s", 2, _train_s),
    "load_s": Figure("load s", 4, lambda summary: _seconds(_largest(summary, "load_ms"))),
    "update_s": Figure(
        "update s", 4, lambda summary: _seconds(_largest(summary, "compute_ms", "sync_ms", "wait_ms", "optim_ms"))
    ),
    "total_s": Figure("total s", 2, lambda summary: summary.total_s),
    "accuracy": Figure("accuracy %", 2, lambda summary: summary.accuracy, scale=100),
}
"""What a study's table may hold; times of a step are the largest of all hosts."""


def cells(study: Study, outcome: Outcome) -> tuple[str, ...]:
    """A line of the table: the study's columns, the medians of what was measured, the first of them with its range, and
    the published figures.
    """
    figures: list[str] = ["-"] * len(study.figures)
    if outcome.done:
        spreads = [outcome.done.spread(name) for name in study.figures]
        shown = [_shown(FIGURES[name], spread) for name, spread in zip(study.figures, spreads, strict=True)]
        figures = [shown[0] + _range(FIGURES[study.figures[0]], spreads[0]), *shown[1:]]
    return (*outcome.row.cells, *figures, *outcome.row.published)


def titles(study: Study) -> tuple[str, ...]:
    return (*study.columns, *(FIGURES[name].title for name in study.figures), *study.published)


def dispensable(study: Study) -> tuple[str, ...]:
    """The columns that a narrow screen does without, the first ones first: a row keeps what names it, its first figure
    and the published one beside that.
    """
    return (*study.published[:0:-1], *(FIGURES[name].title for name in study.figures[:0:-1]))


def within_noise(study: Study, outcomes: Sequence[Outcome]) -> list[list[StudyRow]]:
    """Rows that the study's first figure does not distinguish: groups in which each range overlaps another one.
    A row that was run once has no range and is in no group.
    """
    found = []
    for outcome in outcomes:
        spread = outcome.done.spread(study.figures[0]) if outcome.done and len(outcome.done.runs) > 1 else None
        if spread:
            found.append((spread, outcome.row))
    groups: list[list[tuple[Spread, StudyRow]]] = []
    for spread, row in sorted(found, key=lambda each: (each[0].least, each[0].most)):
        near = groups and any(spread.overlaps(other) for other, _ in groups[-1])
        groups[-1].append((spread, row)) if near else groups.append([(spread, row)])
    return [[row for _, row in group] for group in groups if len(group) > 1]


def document(name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What `orch sweep --json` prints."""
    study = STUDIES[name]
    rows = [
        {
            "name": outcome.row.name,
            **dict(zip(study.columns, outcome.row.cells, strict=True)),
            "measured": _measured(study, outcome.done) if outcome.done else None,
            "published": dict(zip(study.published, outcome.row.published, strict=True)),
            "why_not": outcome.why_not or None,
        }
        for outcome in outcomes
    ]
    return {
        "schema": SCHEMA,
        "study": name,
        "source": study.source,
        "rows": json.loads(json.dumps(rows)),
        "within_noise": [[row.name for row in group] for group in within_noise(study, outcomes)],
    }


def _measured(study: Study, done: Done) -> dict[str, Any]:
    """figures: medians; least, most: the ends of their ranges."""
    spreads = {name: done.spread(name) for name in study.figures}
    parts = {"figures": "median", "least": "least", "most": "most"}
    ranges = {
        key: {name: spread and getattr(spread, part) for name, spread in spreads.items()} for key, part in parts.items()
    }
    return {**done.model_dump(), **ranges, "valid": done.valid}


def _shown(figure: Figure, spread: Spread | None) -> str:
    return "-" if spread is None else _digits(figure, spread.median)


def _range(figure: Figure, spread: Spread | None) -> str:
    if spread is None or spread.least == spread.most:
        return ""
    return f" ({_digits(figure, spread.least)} to {_digits(figure, spread.most)})"


def _digits(figure: Figure, value: float) -> str:
    return f"{value * figure.scale:.{figure.digits}f}"
