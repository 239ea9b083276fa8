"""The table of a study: its rows measured, beside published, and which of them differ by no more than noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.studies.figures import FIGURES
from orchestrator.studies.ledger import Outcome, Spread, within_noise
from orchestrator.studies.tables import Study
from orchestrator.views import console, tables
from orchestrator.views.numbers import UNKNOWN, figure

DIGITS = {"efficiency": 3, "train_s": 2, "load_s": 4, "update_s": 4, "total_s": 2, "accuracy": 2}
"""Decimals of the figures that stand beside published ones, which have as many. Speeds are written as everywhere."""


def print_study(study: Study, outcomes: Sequence[Outcome]) -> None:
    """The rows, measured beside published, and what stands in the way of those that were not run."""
    rows = [cells(study, outcome) for outcome in outcomes]
    drop = dispensable(study)
    tables.print_table(titles(study), rows, right_from=len(study.columns), title=study.title, drop=drop)
    measured_on = sorted({outcome.done.hosts for outcome in outcomes if outcome.done})
    console.put(f"measured on: {'; '.join(measured_on) or 'nothing yet'}")
    console.put(f"published: {study.source}")
    for line in _noise(study, outcomes):
        console.put(line)
    if study.note:
        console.out.print(study.note, style="dim")
    for outcome in outcomes:
        if outcome.why_not:
            console.put(f"{outcome.row.name}: not run, {outcome.why_not}")
        elif outcome.done and not outcome.done.valid:
            console.warn(
                f"{outcome.row.name}: the machine was too slow for the paces it stood in for; its figures do not count"
            )


def _noise(study: Study, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """How often the rows were run, and which of them differ by no more than noise."""
    counts = sorted({len(outcome.done.runs) for outcome in outcomes if outcome.done})
    if counts and counts[-1] > 1:
        runs = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        yield f"measured: medians of {runs} runs; in brackets the least and the most"
    if counts and counts[0] == 1:
        yield "a row that was run once has no range (--repeats 3 gives one)"
    for group in within_noise(study, outcomes):
        names = "; ".join(", ".join(row.cells) for row in group)
        yield f"within noise, by {FIGURES[study.figures[0]].title}: {names}"


def cells(study: Study, outcome: Outcome) -> tuple[str, ...]:
    """A line of the table: the study's columns, the medians of what was measured, the first of them with its range, and
    the published figures.
    """
    figures = [UNKNOWN] * len(study.figures)
    if outcome.done:
        spreads = {name: outcome.done.spread(name) for name in study.figures}
        figures = [_shown(name, spread.median if spread else None) for name, spread in spreads.items()]
        figures[0] += _range(study.figures[0], spreads[study.figures[0]])
    return (*outcome.row.cells, *figures, *outcome.row.published)


def titles(study: Study) -> tuple[str, ...]:
    return (*study.columns, *(FIGURES[name].title for name in study.figures), *study.published)


def dispensable(study: Study) -> tuple[str, ...]:
    """The columns that a narrow screen does without, the first ones first: a row keeps what names it, its first figure
    and the published one beside that.
    """
    return (*study.published[:0:-1], *(FIGURES[name].title for name in study.figures[:0:-1]))


def _range(name: str, spread: Spread | None) -> str:
    if spread is None or spread.least == spread.most:
        return ""
    return f" ({_shown(name, spread.least)} to {_shown(name, spread.most)})"


def _shown(name: str, value: float | None) -> str:
    if value is None or name not in DIGITS:
        return figure(value)
    return f"{value * FIGURES[name].scale:.{DIGITS[name]}f}"
