"""Several collected runs side by side, on the screen."""

from __future__ import annotations

from orchestrator.results.compare import ComparedRun, Comparison
from orchestrator.units import format_duration
from orchestrator.views import console
from orchestrator.views.figures import UNKNOWN, figure, percent, span
from orchestrator.views.tables import print_table


def print_comparison(comparison: Comparison) -> None:
    rows = [(run.letter, run.job, run.state, str(run.steps), ", ".join(run.hosts)) for run in comparison.runs]
    print_table(("", "job", "state", "steps", "hosts"), rows, right_from=3, left_from=4, drop=("hosts", "steps"))
    console.put("")
    goal = comparison.common_accuracy
    columns = ["", "samples/s", "95 % of it", "of combined*", "accuracy"]
    columns += [f"to {percent(goal, 2)}"] if goal is not None else []
    figures = [_figures(run, has_goal=goal is not None) for run in comparison.runs]
    print_table(columns, figures, right_from=1, drop=("of combined*",))
    for sentence in sentences(comparison):
        console.put(sentence)
    if comparison.differences:
        console.put("")
        names = [run.letter for run in comparison.runs]
        unlike = [(each.what, *each.values) for each in comparison.differences]
        print_table(("what differs", *names), unlike, right_from=99)


def sentences(comparison: Comparison) -> list[str]:
    """What the figures come to, one line a run, and how to read them."""
    said = [f"{run.letter}: {run.verdict}" for run in comparison.runs[1:]]
    said += [
        f"{run.letter}: a paced host kept its pace too seldom; its figures are not valid"
        for run in comparison.runs
        if not run.valid
    ]
    said += [f"{run.letter}: {run.not_finite.words}" for run in comparison.runs if run.not_finite]
    if any(run.of_combined is not None for run in comparison.runs):
        said.append("* of what the run's hosts do alone, together")
    said.append("Ranges are from the steps of each run alone: repeat runs to see how they vary.")
    return said if comparison.differences else [*said, "Settings, hosts and versions are the same."]


def _figures(run: ComparedRun, *, has_goal: bool) -> tuple[str, ...]:
    accuracy = percent(run.accuracy, 2) + (f", loss {run.not_finite.loss}" if run.not_finite else "")
    cells = (run.letter, figure(run.samples_per_s), span(run.speed), percent(run.of_combined), accuracy)
    return (*cells, UNKNOWN if run.seconds_to is None else format_duration(run.seconds_to)) if has_goal else cells
