"""The table of a study: measured and published figures of its rows, and rows within noise of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from orchestrator.studies.ledger import Outcome, Spread, speed_up, within_noise
from orchestrator.studies.study import FIGURES, Study
from orchestrator.views import console
from orchestrator.views import console as tables
from orchestrator.views.console import UNKNOWN

SPEED_UP = "speed-up"


def print_study(study: Study, outcomes: Sequence[Outcome]) -> None:
    """Also prints why rows were not run."""
    rows = [cells(study, outcomes, outcome) for outcome in outcomes]
    drop = dispensable(study)
    tables.print_table(titles(study), rows, right_from=len(study.columns), title=study.title, drop=drop)
    if study.shows_learning:
        _print_learning(outcomes)
    measured_on = sorted({outcome.done.hosts for outcome in outcomes if outcome.done})
    console.put(f"measured on: {'; '.join(measured_on) or 'nothing yet'}")
    console.put(f"published: {study.source}")
    for line in _noise(study, outcomes):
        console.put(line)
    if study.notes:
        console.out.print(study.notes, style="dim")
    for outcome in outcomes:
        if outcome.why_not:
            console.put(f"{outcome.row.name}: not run, {outcome.why_not}")
        elif outcome.done and not outcome.done.valid:
            console.warn(
                f"{outcome.row.name}: the machine was too slow for the paces it stood in for; its figures do not count"
            )


def _noise(study: Study, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Number of runs, and rows within noise."""
    counts = sorted({len(outcome.done.runs) for outcome in outcomes if outcome.done})
    if counts and counts[-1] > 1:
        runs = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        yield f"measured: medians of {runs} runs; in brackets the least and the most"
    if counts and counts[0] == 1:
        yield "a row that was run once has no range (--repeats 3 gives one)"
    for group in within_noise(study, outcomes):
        names = "; ".join(", ".join(row.cells) for row in group)
        yield f"within noise, by {FIGURES[study.figures[0]].title}: {names}"


def cells(study: Study, outcomes: Sequence[Outcome], outcome: Outcome) -> tuple[str, ...]:
    """The study's columns, medians (the first and the accuracy with ranges), published figures. outcomes: all rows, for
    speed-ups.
    """
    figures = [UNKNOWN] * len(_measured_titles(study))
    if outcome.done:
        spreads = {name: outcome.done.spread(name) for name in study.figures}
        figures = [_shown(name, spread.median if spread else None) for name, spread in spreads.items()]
        for place, (name, spread) in enumerate(spreads.items()):
            figures[place] += _range(spread, partial(_shown, name)) if name in (study.figures[0], "accuracy") else ""
        figures += [_speed_up(speed_up(study, outcomes, outcome))] if study.has_speed_ups else []
    return (*outcome.row.cells, *figures, *study.published_of(outcome.row))


def titles(study: Study) -> tuple[str, ...]:
    return (*study.columns, *_measured_titles(study), *study.published)


def _measured_titles(study: Study) -> tuple[str, ...]:
    figures = tuple(FIGURES[name].title for name in study.figures)
    return (*figures, SPEED_UP) if study.has_speed_ups else figures


def _speed_up(spread: Spread | None) -> str:
    if spread is None:
        return UNKNOWN
    return f"{spread.median:.2f}{_range(spread, '{:.2f}'.format)}"


def _print_learning(outcomes: Sequence[Outcome]) -> None:
    """Loss by epoch and accuracy by class, medians of its runs."""
    done = {outcome.row.name: outcome.done for outcome in outcomes if outcome.done}
    losses = {name: [f"{loss:.4f}" for loss in each.losses()] for name, each in done.items()}
    classes = {name: each.per_class() for name, each in done.items()}
    epochs = [str(number + 1) for number in range(max(map(len, losses.values()), default=0))]
    labels = list(dict.fromkeys(label for each in classes.values() for label in each))
    right = {name: [_percent(each.get(label)) for label in labels] for name, each in classes.items()}
    for title, columns, rows in (
        ("training loss by epoch", epochs, losses),
        ("accuracy by class, %", labels, right),
    ):
        if columns:
            console.put("")
            lines = [(name, *row, *[UNKNOWN] * (len(columns) - len(row))) for name, row in rows.items()]
            tables.print_table(("row", *columns), lines, right_from=1, title=title, drop=columns[1:-1])


def _percent(accuracy: float | None) -> str:
    return UNKNOWN if accuracy is None else f"{100 * accuracy:.1f}"


def dispensable(study: Study) -> tuple[str, ...]:
    """Dropped first on a narrow screen. A row keeps its names, its first figure and the first published figure."""
    return (*study.published[:0:-1], *_measured_titles(study)[:0:-1])


def _range(spread: Spread | None, shown: Callable[[float], str]) -> str:
    if spread is None or spread.least == spread.most:
        return ""
    return f" ({shown(spread.least)} to {shown(spread.most)})"


def _shown(name: str, value: float | None) -> str:
    return UNKNOWN if value is None else FIGURES[name].shown(value)
