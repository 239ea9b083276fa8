"""Published studies, each a data file of this folder: rows to run again, with the authors' figures as a reference.

study = load_study("bottlenecks")                 # bottlenecks.yaml
published_for(summary)                            # tables for the report of a run
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError
from pydantic_core import ErrorDetails

from orchestrator.errors import InventoryError, Mistake
from orchestrator.hosts import grammar
from orchestrator.hosts.inventory import Written, mistake_of, nearest
from orchestrator.hosts.yamlfile import Document, KeyPath, read_yaml
from orchestrator.planning.request import Starter
from orchestrator.results.summary import Summary
from orchestrator.studies import FOLDER, study_names
from orchestrator.units import format_figure
from trainer.shared.config import parse_settings
from trainer.shared.setting_fields import SettingsError, not_among

# Figures and cells of the tables, from a run's summary. Pure.


@dataclass(frozen=True)
class Figure:
    title: str
    of: Callable[[Summary], float | None]
    digits: int | None = None
    """Decimals, as in published figures; None: the default format."""
    scale: float = 1.0
    """To the title's unit."""

    def shown(self, value: float) -> str:
        return format_figure(value) if self.digits is None else f"{value * self.scale:.{self.digits}f}"


def _largest(summary: Summary, *parts: str) -> float | None:
    """ms; None if no host has all parts."""
    sums = []
    for node in summary.nodes:
        values = [getattr(node, part) for part in parts]
        if None not in values:
            sums.append(sum(values))
    return max(sums) if sums else None


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


def _train_s(summary: Summary) -> float | None:
    step_ms = _step_ms(summary)
    return None if step_ms is None else step_ms * (summary.steps + summary.warmup_steps_left_out) / 1000


def _epoch_s(summary: Summary) -> float | None:
    return statistics.median(epoch.seconds for epoch in summary.curves.epochs) if summary.curves.epochs else None


def _step_ms(summary: Summary) -> float | None:
    return _largest(summary, "load_ms", "compute_ms", "sync_ms", "wait_ms", "optim_ms")


def _update_s(summary: Summary) -> float | None:
    return _seconds(_largest(summary, "compute_ms", "sync_ms", "wait_ms", "optim_ms"))


FIGURES: dict[str, Figure] = {
    "samples_per_s": Figure("samples/s", lambda summary: summary.samples_per_s),
    "step_ms": Figure("step ms", _step_ms),
    "sync_ms": Figure("sync ms", lambda summary: _largest(summary, "sync_ms")),
    "wait_ms": Figure("wait ms", lambda summary: _largest(summary, "wait_ms")),
    "efficiency": Figure("of the sum", lambda summary: summary.efficiency, digits=3),
    "train_s": Figure("train s", _train_s, digits=2),
    "load_s": Figure("load s", lambda summary: _seconds(_largest(summary, "load_ms")), digits=4),
    "update_s": Figure("update s", _update_s, digits=4),
    "epoch_s": Figure("epoch s", _epoch_s, digits=2),
    "total_s": Figure("total s", lambda summary: summary.total_s, digits=2),
    "accuracy": Figure(
        "accuracy %", lambda summary: None if summary.not_finite else summary.accuracy, digits=2, scale=100
    ),
}
"""Measured columns; step times are the largest of all hosts."""


def _num_workers(summary: Summary) -> str:
    number = summary.recorded.num_workers
    return "" if number is None else str(number)


def _method(summary: Summary) -> str:
    ranks = "1 process" if summary.world_size == 1 else f"{summary.world_size} processes"
    workers = _num_workers(summary)
    parts = (summary.recorded.strategy, ranks, f"num_workers {workers}" if workers else "")
    return ", ".join(part for part in parts if part)


_WORDS: dict[str, Callable[[Summary], str]] = {
    "backend": lambda summary: next((node.backend for node in summary.nodes if node.backend), ""),
    "ranks": lambda summary: str(summary.world_size),
    "num_workers": _num_workers,
    "method": _method,
}


def cell_of_run(name: str | None, summary: Summary) -> str:
    """ "" without such a figure."""
    if name is None:
        return ""
    if name in _WORDS:
        return _WORDS[name](summary)
    value = FIGURES[name].of(summary)
    if value is None:
        return ""
    return f"{FIGURES[name].shown(value)} %" if name == "accuracy" else FIGURES[name].shown(value)


def study_figure(name: str) -> str:
    """Raises ValueError."""
    if name not in FIGURES:
        raise ValueError(not_among(name, FIGURES))
    return name


def report_figure(name: str) -> str:
    """Raises ValueError."""
    return name if name in _WORDS else study_figure(name)


_VERBATIM = ("settings", "cells", "published", "in_report")
"""Below these keys 1, 1.10 and false stay text."""
Texts = Annotated[tuple[str, ...], Field(strict=False)]
Need = Literal["horovod", "slurm"]
Host = Annotated[tuple[str, int], Field(strict=False)]


class StudyRow(Written):
    name: str
    cells: Texts = ()
    """For the study's columns."""
    in_report: Texts | None = None
    """For the report's columns, if different."""
    settings: dict[str, str] = Field(default_factory=dict)
    """Override the study's."""
    hosts: Annotated[tuple[Host, ...], Field(strict=False)] = ()
    """Hosts needed; empty if `ranks` suffices."""
    ranks: int = Field(default=0, ge=0)
    """Over all hosts; with a starter, 0 means all ranks of one host."""
    gpus: int = Field(default=0, ge=0)
    """Per rank."""
    starter: Starter | None = None
    """Starts the ranks, all on one host; None: orch."""
    needs: Need | None = None
    """Must be on the hosts."""
    against: str = ""
    """The base row of its speed-up."""
    published: Texts = ()
    """"" if absent."""


class ReportColumns(Written):
    """Published figures in reports of runs with this model and data."""

    model: str
    data: str
    columns: dict[str, Annotated[str, AfterValidator(report_figure)] | None] = Field(default_factory=dict)
    """Title -> the run's figure, null if runs lack it."""


class Study(Written):
    title: str
    source: str
    """Hardware and software of the published figures."""
    note: str = ""
    """For the table and the report."""
    rows_note: str = ""
    """How rows are run here, for the table."""
    columns: Texts
    figures: Annotated[tuple[Annotated[str, AfterValidator(study_figure)], ...], Field(strict=False, min_length=1)]
    """Measured columns; the first compares the rows."""
    published: Texts
    """Columns of the published cells."""
    shows_learning: bool = False
    report: ReportColumns | None = None
    exp: str
    settings: dict[str, str] = Field(default_factory=dict)
    """For all rows."""
    rows: Annotated[tuple[StudyRow, ...], Field(strict=False, min_length=1)]

    @property
    def has_speed_ups(self) -> bool:
        return any(row.against for row in self.rows)

    @property
    def notes(self) -> str:
        return f"{self.rows_note} {self.note}".strip()

    def settings_of(self, row: StudyRow) -> dict[str, str]:
        return {**self.settings, **row.settings}

    def published_of(self, row: StudyRow) -> tuple[str, ...]:
        return row.published or ("",) * len(self.published)


# ---- reading ---------------------------------------------------------------------------------------------------------


@cache
def load_study(name: str) -> Study:
    return read_study(FOLDER / f"{name}.yaml")


def read_study(path: Path) -> Study:
    """Raises InventoryError with all mistakes."""
    document = read_yaml(path, verbatim=_VERBATIM)
    mistakes = list(document.mistakes)
    try:
        study = Study.model_validate(document.values)
    except ValidationError as error:
        raise InventoryError([*mistakes, *(_mistake(details, document) for details in error.errors())]) from error
    mistakes += [Mistake(document.file, document.line(at), words) for at, words in _mistakes_together(study)]
    if mistakes:
        raise InventoryError(mistakes)
    return study


def _mistake(details: ErrorDetails, document: Document) -> Mistake:
    path = details["loc"]
    if details["type"] != "extra_forbidden":
        return mistake_of(details, document)
    models: dict[str, type[Written]] = {"rows": StudyRow, "report": ReportColumns}
    model = models[str(path[0])] if len(path) > 1 else Study
    words = f"unknown key {grammar.show(str(path[-1]))}; {nearest(str(path[-1]), list(model.model_fields))}"
    return Mistake(document.file, document.line(path), words)


def _mistakes_together(study: Study) -> Iterator[tuple[KeyPath, str]]:
    names = [row.name for row in study.rows]
    for index, row in enumerate(study.rows):
        at: KeyPath = ("rows", index)
        if row.name in names[:index]:
            yield (*at, "name"), f"row {row.name}: an earlier row has the same name"
        if row.against and row.against not in names:
            yield (*at, "against"), f"row {row.name}: `against` must name a row, not {grammar.show(row.against)}"
        if not (row.hosts or row.ranks or row.starter):
            yield at, f"row {row.name}: needs `hosts`, `ranks` or a `starter`"
        yield from (((*at, key), f"row {row.name}: {words}") for key, words in _wrong_cells(study, row))
        try:
            parse_settings(study.exp, study.settings_of(row))
        except SettingsError as error:
            yield from (((*at, "settings"), f"row {row.name}: {words}") for words in error.mistakes)


def _wrong_cells(study: Study, row: StudyRow) -> Iterator[tuple[str, str]]:
    if len(row.cells) != len(study.columns):
        yield "cells", f"`cells` has {len(row.cells)} values for {len(study.columns)} `columns`"
    if row.published and len(row.published) != len(study.published):
        yield "published", f"`published` has {len(row.published)} values for {len(study.published)} columns"
    if study.report and study.report.columns and row.published:
        given = len(_report_cells(row))
        if given != len(study.report.columns):
            words = f"has {given} values for the report's {len(study.report.columns)} columns"
            yield "in_report", f"{words}; `in_report` stands in place of `cells` there"


# ---- in the report of a run ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PublishedTable:
    """The run's own figures are the first row."""

    title: str
    source: str
    note: str
    columns: tuple[str, ...]
    this_run: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def published_for(summary: Summary) -> tuple[PublishedTable, ...]:
    if summary.kind != "experiment":
        return ()
    studies = (load_study(name) for name in study_names())
    shown = ((study, study.report) for study in studies)
    run = (summary.recorded.model, summary.recorded.data)
    return tuple(
        _table(study, report.columns, summary)
        for study, report in shown
        if report and (report.model, report.data) == run
    )


def _table(study: Study, columns: Mapping[str, str | None], summary: Summary) -> PublishedTable:
    rows = (_report_cells(row) for row in study.rows if row.published)
    return PublishedTable(
        title=study.title,
        source=study.source,
        note=study.note,
        columns=tuple(columns),
        this_run=tuple(cell_of_run(figure, summary) for figure in columns.values()),
        rows=tuple(rows) if columns else (),
    )


def _report_cells(row: StudyRow) -> tuple[str, ...]:
    return (*(row.cells if row.in_report is None else row.in_report), *row.published)
