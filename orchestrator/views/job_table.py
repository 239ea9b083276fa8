"""Tables of jobs, command outputs and diagnoses; warnings on stalled and silent jobs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from orchestrator.errors import HostError
from orchestrator.hosts.exec import MOST_BYTES, Ran, host_set, reasons
from orchestrator.jobs.job_store import FirstFailure, JobRecord, Verdict
from orchestrator.jobs.queue_place import Rival
from orchestrator.jobs.stall import HostSnapshot, ProcessSnapshot, StackFrame, alarm_words
from orchestrator.units import clean_lines, format_bytes, format_duration, one_line
from orchestrator.views import console
from orchestrator.views.console import clock, has_room, local_minute, table

if TYPE_CHECKING:
    from orchestrator.jobs.diagnosis import RankActivity

COLUMNS = ("job", "state", "cluster", "started", "took", "exit", "nodes", "exp", "attempt", "note", "first failure")
DISPENSABLE = ("note", "attempt", "first failure", "exit", "took", "cluster")
"""Dropped first on a narrow screen."""
FOLDED = ("note", "first failure")
LEAST_WHAT = 24
MOST_CAUSE = 160
STATE_COLOURS = {"succeeded": "green", "failed": "red", "lost": "red", "cancelled": "yellow", "running": "cyan"}


def print_jobs(jobs: Sequence[JobRecord]) -> None:
    """Ids are never folded, so that they can be copied. A narrow screen shows `exp` and nodes below the id, notes and
    failures below the table, and names other dropped columns.
    """
    cells = [dict(zip(COLUMNS, _job_cells(job), strict=True)) for job in jobs]
    idle = {"cluster"} if len({job.cluster for job in jobs}) < 2 else set()
    idle |= {name for name in COLUMNS if cells and not any(str(row[name]) for row in cells)}
    needed = [name for name in COLUMNS if name not in {*idle, *DISPENSABLE} or (name == "exit" and name not in idle)]
    if not has_room(needed, [[row[name] for name in needed] for row in cells]):
        cells = [{**row, "job": _with_what(job)} for job, row in zip(jobs, cells, strict=True)]
        idle |= {"nodes", "exp"}
    columns = [name for name in COLUMNS if name not in idle]
    rows = [[row[name] for name in columns] for row in cells]
    drop = [*DISPENSABLE, "started"]
    shown = table(None, columns, rows, drop=drop, text=FOLDED)
    console.out.print(shown)
    gone = [name for name in columns if name not in {column.header for column in shown.columns}]
    for job, row in zip(jobs, cells, strict=True):
        if why := "; ".join(str(row[name]) for name in FOLDED if name in gone and row[name]):
            console.put(textwrap.fill(one_line(f"{job.id}: {why}"), console.out.width, subsequent_indent="  "))
    if others := [name for name in gone if name not in FOLDED]:
        console.say(f"no room for {', '.join(others)}: a wider terminal shows more, --json everything")


def _with_what(job: JobRecord) -> Text:
    what, indent = one_line(f"{job.exp} on {', '.join(job.nodes)}"), "  "
    width = max(len(job.id), LEAST_WHAT)
    below = textwrap.wrap(what, width, initial_indent=indent, subsequent_indent=indent, max_lines=3, placeholder=" …")
    return Text.assemble(one_line(job.id), "\n", ("\n".join(below), "dim"))


def print_waiting(waiting: Mapping[str, Sequence[Rival]]) -> None:
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
        one_line(failure.words, MOST_CAUSE) if failure else _why_queued(job),
    )


def _why_queued(job: JobRecord) -> str:
    if job.slurm and job.state == "queued":
        return job.slurm.words
    return one_line(job.waits_for, 80) if job.waits_for and job.state in ("queued", "starting") else ""


def lasted(job: JobRecord) -> str:
    """Until its end, or so far."""
    try:
        ended = datetime.fromisoformat(job.ended) if job.ended else datetime.now(timezone.utc)
        return clock((ended - datetime.fromisoformat(job.started or "")).total_seconds())
    except (ValueError, TypeError):
        return ""


def warn_stalls(jobs: Iterable[JobRecord]) -> None:
    for job in jobs:
        if words := alarm_words(job):
            console.warn(f"{job.id}: {words}")


def warn_unheard(unheard: Mapping[str, Mapping[str, HostError]]) -> None:
    """Jobs with hosts that did not answer."""
    for job, errors in unheard.items():
        names, why = host_set(list(errors)), "; ".join(reasons(errors.values()))
        console.warn(
            f"{job}: no answer from {names} ({why}); its state is as the other hosts report it, else the last known"
        )


def print_end(job: JobRecord) -> None:
    """The exit code is on the last line."""
    print_outcome(job)
    print_exit_code(job)


def print_exit_code(job: JobRecord) -> None:
    if job.exit_code:
        console.err.print(f"exit code {job.exit_code}")


def print_outcome(job: JobRecord) -> None:
    colour = STATE_COLOURS.get(job.state, "default")
    console.err.print(Text.assemble((job.state, colour), " ", console.plain(job.id)))
    if job.not_finite:
        console.warn(job.not_finite.words)
    if job.first_failure:
        console.say(failure_words(job.first_failure))


def failure_words(failure: FirstFailure) -> str:
    log = f"\n  its log: {one_line(failure.log_line)}" if failure.log_line else ""
    return f"first cause: {one_line(failure.node)}: {one_line(failure.reason)}{log}"


# Outputs of a command on many hosts: each distinct output once, with its hosts.


def print_ran(found: Mapping[str, Ran], timeout_s: float) -> None:
    """Standard outputs and exit codes as the result, standard errors to standard error."""
    for (text, _, said), names in _folded(found, lambda ran: (ran.stdout, ran.exit_code, bool(ran.stderr))).items():
        nothing = "no standard output" if said else "no output"
        _put(console.out, names, _ended(found[names[0]], timeout_s), text, nothing)
    for text, names in _folded(found, lambda ran: ran.stderr).items():
        if text:
            _put(console.err, names, ", standard error", text)
    for stream in ("stdout", "stderr"):
        cut = {name: count for name, ran in found.items() if (count := getattr(ran, f"{stream}_cut_bytes"))}
        if cut:
            more = f"cut after {format_bytes(MOST_BYTES)}; up to {format_bytes(max(cut.values()))} more"
            console.warn(f"{host_set(list(cut))}: {stream} is {more}")


def _folded(found: Mapping[str, Ran], key: Callable[[Ran], Any]) -> dict[Any, list[str]]:
    """Hosts by answer, in order of first appearance."""
    groups = dict[Any, list[str]]()
    for name, ran in found.items():
        groups.setdefault(key(ran), []).append(name)
    return groups


def _ended(ran: Ran, timeout_s: float) -> str:
    if ran.exit_code is None:
        return f", ended after {timeout_s:g} s"
    return f", exit code {ran.exit_code}" if ran.exit_code else ""


def _put(to: Console, names: list[str], what: str, text: str, nothing: str = "") -> None:
    """nothing: replaces an empty text."""
    head = f"{host_set(names)} ({len(names)}){what}:"
    to.print(console.plain(head if text else f"{head} {nothing}", "bold"))
    if text:
        print(clean_lines(text).removesuffix("\n"), file=to.file)  # the console would turn tabs into blanks


# `orch why`: the verdict, a line per rank, and optionally all frames.

WHY_COLUMNS = ("node", "rank", "does", "at", "step", "wrote", "stands")
DROP = ("wrote", "step", "at")
DOES = {"waits": "waits", "busy": "uses the CPU", "disk": "waits for a disk", "stopped": "stopped"}


def print_why(verdict: Verdict, outcomes: Mapping[str, HostSnapshot | HostError], *, all_frames: bool) -> None:
    colour = "red" if verdict.is_alarm else "green"
    console.out.print(Text.assemble((verdict.kind.replace("-", " "), colour), ": ", console.plain(verdict.reason)))
    if verdict.place:
        console.put(f"  {verdict.place}{f': {verdict.line}' if verdict.line else ''}")
    if verdict.remedy:
        console.out.print(Text.assemble("  ", ("try:", "bold"), " ", console.plain(verdict.remedy)))
    from orchestrator.jobs.diagnosis import activities_of  # not needed for a list of jobs

    ranks = activities_of(outcomes)
    if ranks:
        rows = [_cells(rank) for rank in ranks]
        console.out.print(table(None, WHY_COLUMNS, rows, drop=DROP, text=("stands",)))
    for rank in ranks if all_frames else ():
        host = outcomes[rank.node]
        if isinstance(host, HostSnapshot):
            _print_frames(host, rank)


def _cells(rank: RankActivity) -> tuple[Any, ...]:
    look = rank.snapshot
    if not rank.is_live:
        how = look.signal or ("" if look.exit_code is None else f"exit code {look.exit_code}")
        return (rank.node, str(rank.rank), "has ended" if look.ended else "has not begun", "", "", "", how)
    step = "" if look.step is None else str(look.step)
    wrote = f"{format_duration(look.quiet_s)} ago"
    return (rank.node, str(rank.rank), DOES[look.does], rank.at, step, wrote, rank.place or _program(look.script))


def _program(process: ProcessSnapshot | None) -> str:
    """For a process without Python frames of ours."""
    if process is None:
        return ""
    return f"({process.name}, state {process.state}{f', {process.wchan}' if process.wchan else ''})"


def _print_frames(host: HostSnapshot, rank: RankActivity) -> None:
    for process in rank.snapshot.processes:
        console.put(f"\n{rank.name}, pid {process.pid} {_program(process)}")
        for thread in process.threads or ():
            console.put("  main thread" if thread.main else "  another thread")
            for frame in thread.frames:
                console.put(f"    {_frame(frame, host.src)}")
    if rank.snapshot.more:
        console.put(f"  and {rank.snapshot.more} more processes")
    for way in rank.snapshot.connections:
        waits = f"{way.unsent:,} bytes not confirmed, {way.unread:,} not read, sent again {way.retransmits} times"
        console.put(f"  to {way.to} port {way.port}: {waits}")


def _frame(frame: StackFrame, src: str) -> str:
    return f"{frame.place(src)}{f': {frame.text}' if frame.text else ''}"
