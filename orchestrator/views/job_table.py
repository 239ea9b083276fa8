"""Jobs: their table, how one ended, and which of them stand still or are not heard of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from rich.text import Text

from orchestrator.errors import HostError
from orchestrator.hosts.alike import host_set, reasons
from orchestrator.jobs.faults import fault_words
from orchestrator.jobs.queued import Rival
from orchestrator.jobs.record import FirstFailure, JobRecord
from orchestrator.jobs.stall import alarm_words
from orchestrator.text import one_line
from orchestrator.views import console
from orchestrator.views.numbers import clock, local_minute
from orchestrator.views.tables import table

STATE_COLOURS = {"succeeded": "green", "failed": "red", "lost": "red", "cancelled": "yellow", "running": "cyan"}


def print_jobs(jobs: Sequence[JobRecord]) -> None:
    """An id is never broken: it is there to be copied. What a narrow screen has no room for is in `--json`."""
    columns = ["job", "state", "cluster", "started", "took", "exit", "nodes", "exp", "attempt", "note", "first failure"]
    rows = [_job_cells(job) for job in jobs]
    drop = ["note", "attempt", "exp", "nodes", "first failure", "exit", "took", "cluster", "started"]
    idle = {"cluster"} if len({job.cluster for job in jobs}) < 2 else set()
    idle |= {name for index, name in enumerate(columns) if rows and not any(str(row[index]) for row in rows)}
    filled = [index for index, name in enumerate(columns) if name not in idle]
    columns, rows = [columns[index] for index in filled], [tuple(row[index] for index in filled) for row in rows]
    console.out.print(table(None, columns, rows, drop=drop, text=("note", "first failure")))


def print_waiting(waiting: Mapping[str, Sequence[Rival]]) -> None:
    """Runs that wait for their GPUs, in their order; nothing where none does."""
    rows = [
        (
            *(run.job, Text("waiting", style="magenta"), str(place), run.user, cluster),
            *(_long(run.since_s), _long(run.starts_s), ", ".join(run.nodes)),
        )
        for cluster, runs in waiting.items()
        for place, run in enumerate(runs, 1)
    ]
    if rows:
        columns = ["job", "state", "place", "user", "cluster", "waited", "starts within", "nodes"]
        console.out.print(table(None, columns, rows, drop=["nodes", "cluster", "waited", "starts within", "user"]))
        console.put("")


def _long(seconds: float | None) -> str:
    return "" if seconds is None else clock(seconds)


def _job_cells(job: JobRecord) -> tuple[Any, ...]:
    failure = job.first_failure
    return (
        job.id,
        Text(job.state, style=STATE_COLOURS.get(job.state, "default")),
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
    for fault in job.faults:
        console.say(fault_words(fault))
    if job.first_failure:
        console.say(failure_words(job.first_failure))
    if job.exit_code:
        console.err.print(f"exit code {job.exit_code}")


def failure_words(failure: FirstFailure) -> str:
    log = f"\n  its log says: {one_line(failure.log_line)}" if failure.log_line else ""
    return f"first cause: {one_line(failure.node)}: {one_line(failure.reason)}{log}"
