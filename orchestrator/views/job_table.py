"""Jobs: their table, how one ended, and which of them stand still or are not heard of."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from rich.text import Text

from orchestrator.errors import HostError
from orchestrator.hosts.alike import host_set, reasons
from orchestrator.jobs.queued import Rival
from orchestrator.jobs.record import FirstFailure, JobRecord
from orchestrator.jobs.stall import alarm_words
from orchestrator.text import one_line
from orchestrator.views import console
from orchestrator.views.figures import clock, local_minute
from orchestrator.views.tables import has_room, table

COLUMNS = ("job", "state", "cluster", "started", "took", "exit", "nodes", "exp", "attempt", "note", "first failure")
DISPENSABLE = ("note", "attempt", "first failure", "exit", "took", "cluster")
"""These go on a narrow screen, the first ones first."""
FOLDED = ("note", "first failure")
LEAST_WHAT = 24
STATE_COLOURS = {"succeeded": "green", "failed": "red", "lost": "red", "cancelled": "yellow", "running": "cyan"}


def print_jobs(jobs: Sequence[JobRecord]) -> None:
    """An id is never broken: it is there to be copied. On a narrow screen what runs and where stands below it; other
    columns for which there is no room are named, and are in `--json`.
    """
    cells = [dict(zip(COLUMNS, _job_cells(job), strict=True)) for job in jobs]
    idle = {"cluster"} if len({job.cluster for job in jobs}) < 2 else set()
    idle |= {name for name in COLUMNS if cells and not any(str(row[name]) for row in cells)}
    needed = [name for name in COLUMNS if name not in {*idle, *DISPENSABLE}]
    if not has_room(needed, [[row[name] for name in needed] for row in cells]):
        cells = [{**row, "job": _with_what(job)} for job, row in zip(jobs, cells, strict=True)]
        idle |= {"nodes", "exp"}
    columns = [name for name in COLUMNS if name not in idle]
    rows = [[row[name] for name in columns] for row in cells]
    drop = [*DISPENSABLE, "started"]
    shown = table(None, columns, rows, drop=drop, text=FOLDED)
    console.out.print(shown)
    if gone := [name for name in columns if name not in {column.header for column in shown.columns}]:
        console.say(f"no room for {', '.join(gone)}: a wider terminal shows more, --json everything")


def _with_what(job: JobRecord) -> Text:
    """Its id, and below it what it runs and where."""
    what, indent = one_line(f"{job.exp} on {', '.join(job.nodes)}"), "  "
    width = max(len(job.id), LEAST_WHAT)
    below = textwrap.wrap(what, width, initial_indent=indent, subsequent_indent=indent, max_lines=3, placeholder=" …")
    return Text.assemble(one_line(job.id), "\n", ("\n".join(below), "dim"))


def print_waiting(waiting: Mapping[str, Sequence[Rival]]) -> None:
    """Queued runs in the queue's order; nothing without any."""
    rows = [
        (
            *(run.job, Text("waiting", style="magenta"), str(place), run.user, cluster),
            *("" if run.since_s is None else clock(run.since_s), ", ".join(run.nodes)),
        )
        for cluster, runs in waiting.items()
        for place, run in enumerate(runs, 1)
    ]
    if rows:
        columns = ["job", "state", "place", "user", "cluster", "waited", "nodes"]
        console.out.print(table(None, columns, rows, drop=["cluster", "waited", "user", "nodes"]))
        console.put("")


def _job_cells(job: JobRecord) -> tuple[Any, ...]:
    failure = job.first_failure
    return (
        job.id,
        Text.assemble(
            (job.state, STATE_COLOURS.get(job.state, "default")),
            (f"\n{job.not_finite.of} {job.not_finite.loss}" if job.not_finite else "", "red"),
        ),
        job.cluster,
        local_minute(job.started) or "",
        lasted(job),
        "" if job.exit_code is None else str(job.exit_code),
        ", ".join(job.nodes),
        job.exp,
        job.attempt.words if job.attempt else "",
        job.note or "",
        one_line(f"{failure.node}: {failure.reason}", 80) if failure else "",
    )


def lasted(job: JobRecord) -> str:
    """Until its end, or so far."""
    try:
        ended = datetime.fromisoformat(job.ended) if job.ended else datetime.now(timezone.utc)
        return clock((ended - datetime.fromisoformat(job.started or "")).total_seconds())
    except (ValueError, TypeError):
        return ""


def warn_stalls(jobs: Iterable[JobRecord]) -> None:
    """Warns of running jobs whose ranks stand still."""
    for job in jobs:
        if words := alarm_words(job):
            console.warn(f"{job.id}: {words}")


def warn_lost_places(jobs: Iterable[str]) -> None:
    """Warns of runs that waited, and do no more."""
    for job in jobs:
        console.warn(
            f"{job} has lost its place in the queue: the `orch run` that waited has ended; nothing of it has run"
        )


def warn_unheard(unheard: Mapping[str, Mapping[str, HostError]]) -> None:
    """Warns of jobs whose state is not what all their hosts say now."""
    for job, errors in unheard.items():
        names, why = host_set(list(errors)), "; ".join(reasons(errors.values()))
        console.warn(
            f"{job}: no answer from {names} ({why}); its state is what the others say, else what was last known"
        )


def print_end(job: JobRecord) -> None:
    """How a job ended; the failing rank's own code is on the last line."""
    colour = STATE_COLOURS.get(job.state, "default")
    console.err.print(Text.assemble((job.state, colour), " ", console.plain(job.id)))
    if job.not_finite:
        console.warn(job.not_finite.words)
    if job.first_failure:
        console.say(failure_words(job.first_failure))
    if job.exit_code:
        console.err.print(f"exit code {job.exit_code}")


def failure_words(failure: FirstFailure) -> str:
    log = f"\n  its log says: {one_line(failure.log_line)}" if failure.log_line else ""
    return f"first cause: {one_line(failure.node)}: {one_line(failure.reason)}{log}"
