"""Commands about jobs: `jobs`, `logs`, `cancel`, `why`, `top`."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.common import (
    Quantity,
    agrees,
    busy,
    chosen_job,
    cluster_option,
    job_given,
    job_ids,
    json_option,
    node_names,
    open_controller,
    shown_cluster,
)
from orchestrator.errors import HostError, OrchError, UsageError

if TYPE_CHECKING:
    from orchestrator.controller import Controller
    from orchestrator.jobs.gauging import GaugedJob
    from orchestrator.jobs.job_store import JobRecord, QueuedError
    from orchestrator.jobs.lines import LogLine
    from orchestrator.jobs.live_stats import JobNow
    from orchestrator.jobs.running import RunningJob
    from orchestrator.planning.launch_plan import LaunchPlan


SHOWN = 5
SCREEN_JOBS = 20


@click.command()
@click.option("--rescan", is_flag=True, help="First ask the hosts for jobs that are unknown or damaged here.")
@click.option("--adopt", is_flag=True, help="With --rescan: make jobs that another $ORCH_HOME started yours.")
@click.option("--yes", is_flag=True, help="With --adopt: do not ask.")
@click.option(
    *("--limit", "limit"),
    type=click.IntRange(min=0),
    metavar="N",
    help=f"Show only the newest N; 0 shows all.  [default: {SCREEN_JOBS} on a terminal, else all]",
)
@cluster_option
@json_option
def jobs(rescan: bool, adopt: bool, yes: bool, limit: int | None, cluster: str | None, as_json: bool) -> None:
    """List the jobs of all clusters, newest first; running jobs are refreshed from their hosts.

    Queued runs (`orch run --wait`) are listed first, including other people's on the same hosts. Hosts that give no
    answer are named on standard error, and as `unheard` in the JSON. You can look at found jobs that another $ORCH_HOME
    started, but only that one can end or remove them, unless you make them yours with --adopt.

    \b
    orch jobs
    orch jobs --cluster rack --limit 5
    orch jobs --rescan                    after $ORCH_HOME was damaged
    orch jobs --rescan --adopt            after it was lost
    orch jobs --json | jq -r '.jobs[0].id'
    """
    from orchestrator.views import console, job_table

    problems: dict[str, OrchError] = {}
    if adopt and not rescan:
        raise UsageError("--adopt belongs to --rescan", "orch jobs --rescan --adopt")
    with open_controller() as controller:
        cluster = shown_cluster(controller, cluster)
        if rescan:
            problems |= _rescanned(controller, cluster, adopt=adopt, yes=yes)
        found = controller.jobs.all(cluster, why=True)
        waiting = controller.queue.waiting(found.records)
    if as_json:
        from orchestrator.views import documents

        shown = documents.jobs_json(found.records[: limit or None], found.unheard)
        console.print_json({**shown, "waiting": documents.waiting_json(waiting)})
    else:
        queued = {rival.job for rivals in waiting.values() for rival in rivals}  # they have rows of the queue
        records = [job for job in found.records if job.state != "queued" or job.id not in queued]
        job_table.print_waiting(waiting)
        _show_jobs(records, SCREEN_JOBS if limit is None and console.out.is_terminal else limit or 0)
    job_table.warn_stalls(found.records)
    job_table.warn_unheard(found.unheard)
    problems = {**found.problems, **problems}
    console.fail_each(problems.values())
    if any(isinstance(error, HostError) for error in problems.values()):
        sys.exit(HostError.exit_code)


def _rescanned(controller: Controller, cluster: str | None, *, adopt: bool, yes: bool) -> Mapping[str, OrchError]:
    from orchestrator.units import some
    from orchestrator.views import console

    names = [cluster] if cluster else controller.store.cluster_names() or [controller.store.cluster_name()]
    with busy(f"asking the hosts of {', '.join(names)}"):
        rebuilt = controller.lost_jobs.rescan(names)
    console.say(f"rebuilt from the hosts: {some([job.id for job in rebuilt.records], SHOWN) or 'nothing'}")
    for sentence in rebuilt.notices:
        console.warn(sentence)
    return {**rebuilt.problems, **_others(controller, names, adopt, yes)}


def _show_jobs(records: Sequence[JobRecord], limit: int) -> None:
    """records: newest first. limit: 0 for all."""
    from orchestrator.jobs.job_store import ENDED
    from orchestrator.views import console, job_table

    job_table.print_jobs(records[: limit or None])
    older = records[limit:] if limit else ()
    if older:
        running = sum(job.state not in ENDED for job in older)
        some = f", {running} of them not ended" if running else ""
        console.say(f"and {len(older)} older{some}: `orch jobs --limit 0` shows all")


def _others(controller: Controller, clusters: list[str], adopt: bool, yes: bool) -> Mapping[str, OrchError]:
    from orchestrator.units import some
    from orchestrator.views import console

    problems: dict[str, OrchError] = {}
    for owner, found in controller.lost_jobs.not_ours(clusters).items():
        whose = owner.name if owner else "an older orch"
        console.say(f"of {whose}: {some(found, SHOWN)}")
        question = f"Make these yours? {whose} can then neither end nor remove them."
        if adopt and (yes or click.confirm(question, default=False, err=True)):
            problems |= {f"adopt {name}": error for name, error in controller.lost_jobs.adopt(found).items()}
        elif not adopt:
            console.say("you can only look at them; `orch jobs --rescan --adopt` makes them yours")
    return problems


class Regex(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.4
    name = "regex"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> re.Pattern[str]:
        try:
            return value if isinstance(value, re.Pattern) else re.compile(value)
        except re.error as error:
            self.fail(f"{value!r} is not a regular expression: {error}", param, ctx)


class When(click.ParamType):  # type: ignore[type-arg]  # as above
    """A duration ago, like `30m`, or a local time, as seconds since 1970."""

    name = "when"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from orchestrator.units import parse_moment

        try:
            return value if isinstance(value, float) else parse_moment(value, time.time())
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@job_given
@click.option("-f", "--follow", is_flag=True, help="Follow until the job has ended.")
@click.option("--node", "only_node", metavar="N", help="Only this node.", shell_complete=node_names)
@click.option("--rank", "only_rank", type=int, metavar="R", help="Only this rank.")
@click.option("-n", "--lines", type=click.IntRange(min=1), metavar="N", help="Only the last N lines of each log.")
@click.option("--since", type=When(), metavar="WHEN", help="Only lines printed since then: 30m ago, or at 14:05.")
@click.option("-t", "--timestamps", is_flag=True, help="Begin each line with the time at which it was printed.")
@click.option("--grep", type=Regex(), metavar="REGEX", help="Only the lines in which this matches.")
@cluster_option
def logs(
    wanted: str | None,
    follow: bool,
    only_node: str | None,
    only_rank: int | None,
    lines: int | None,
    since: float | None,
    timestamps: bool,
    grep: re.Pattern[str] | None,
    cluster: str | None,
) -> None:
    """Show what the ranks printed, each line with its node and rank.

    A rank has two logs, of its output and its errors. With -n and --since the earlier lines stay on the hosts. Times
    are from the host's clock, to a second. -f ends as `orch run` does, with 1 if the job failed. After `orch down` it
    shows what was collected, without times.

    \b
    orch logs -f
    orch logs --job resnet152 --node v100 --rank 0
    orch logs -n 20
    orch logs -t --since 10m
    orch logs -f -n 5 --grep 'loss|error'
    """
    from orchestrator.jobs.collect import is_removed, last_of
    from orchestrator.views import console, following, job_table

    def chosen(line: LogLine) -> bool:
        is_of = only_node in (None, line.node) and only_rank in (None, line.rank)
        return is_of and (grep is None or bool(grep.search(line.text)))

    with open_controller() as controller:
        job = _started_job(controller, wanted, cluster, waits=follow)
        plan = job.plan
        if only_node:
            controller.store.cluster(plan.cluster).node(only_node)
        if only_rank is not None and not 0 <= only_rank < plan.world_size:
            raise UsageError(f"{plan.job} has no rank {only_rank}", f"its ranks: 0 to {plan.world_size - 1}")
        if is_removed(controller.store, plan):
            copied = _collected(controller, plan, has_times=timestamps or since is not None)
            following.print_events(last_of(copied, lines) if lines else copied, chosen)
            return
        away = job.reach()
        console.fail_each(away.values())
        ranks = [rank for node in plan.nodes if only_node in (None, node.name) for rank in node.rank_numbers]
        last = {rank: lines for rank in ranks if only_rank in (None, rank)} if lines or since is not None else None
        chooses = only_node or only_rank is not None or grep
        events = job.follow(
            until_end=follow, last_lines=last, since_wall=since, times=timestamps, folds=follow and not chooses
        )
        if lines and not follow:  # a running job may have printed more in the meantime
            events = last_of(events, lines)
        ended = list[str]()

        def print_outcome(record: JobRecord) -> None:
            ended.append(record.id)
            job_table.print_outcome(record)

        if not following.print_events(events, chosen, times=timestamps, ended=print_outcome) and not away:
            fits = chooses or lines or since is not None
            console.say("no line fits what you asked for" if fits else "its ranks have printed nothing")
            if not fits and not follow and job.record.state == "failed":
                job_table.print_end(job.record)
        if follow:
            end_with(job.record, is_printed=bool(ended))
        if away:
            sys.exit(3)


def _collected(controller: Controller, plan: LaunchPlan, *, has_times: bool) -> Iterator[tuple[LogLine, ...]]:
    """The lines of a job that `orch down` has removed. has_times: times are asked for, which no copy has."""
    from orchestrator.jobs.collect import copied_lines, newest_copy, nothing_left
    from orchestrator.views import console

    why, copy = nothing_left(controller.store, plan), newest_copy(controller.store, plan.job)
    if copy is None:
        raise why
    if has_times:
        raise OrchError(f"{why.message}, and with them when its lines were printed", "leave --since and -t out")
    console.say(f"{why.message}; these are the lines that were collected into {copy.root}")
    return copied_lines(plan, copy)


def end_with(record: JobRecord, *, is_printed: bool) -> None:
    """The last lines about a followed job, and its exit code. is_printed: all but the exit code."""
    from orchestrator.views import console, job_table

    if not is_printed:
        job_table.print_outcome(record)
    job_table.print_exit_code(record)
    if record.state != "succeeded":
        sys.exit(3 if record.first_failure and record.first_failure.kind == "queue" else 1)
    console.say(f"next: orch collect --job {record.id}")


def _started_job(controller: Controller, wanted: str | None, cluster: str | None, *, waits: bool) -> RunningJob:
    """waits: until Slurm has started it."""
    from orchestrator.jobs.job_store import QueuedError
    from orchestrator.views import console

    try:
        return chosen_job(controller, wanted, cluster)
    except QueuedError as queued:
        if not waits:
            raise
        record = queued.record
    return controller.submissions.started(record, lambda words: console.say(f"{record.id}: {words}"))


@click.command()
@job_given
@click.option("--yes", is_flag=True, help="Do not ask whether the latest job is meant.")
@cluster_option
@json_option
def cancel(wanted: str | None, yes: bool, cluster: str | None, as_json: bool) -> None:
    """End a job on all its hosts, then check that nothing is left.

    Without --job it ends the cluster's latest job, or the only running job, after asking; --yes is about the latest
    only. A queued job leaves the queue.

    \b
    orch cancel --job mnist_lenet-20261121-0912-k3f
    orch cancel
    """
    from orchestrator.jobs.job_store import ENDED, QueuedError
    from orchestrator.views import console, documents, job_table

    with open_controller() as controller:
        try:
            job = controller.jobs.find(wanted, cluster) if wanted else _meant(controller, cluster, yes)
        except QueuedError as queued:
            if not wanted and queued.record.state not in ENDED:
                _insist(queued.record, yes)
            return _take_out(controller, queued, as_json)
        if job.record.state in ENDED:
            console.say(f"{job.id} has ended already; looking for what it may have left")
        cancel_job(job)
        record = job.record
        if as_json:
            console.print_json(documents.job_json(record))
        else:
            job_table.print_end(record)
    return None


def _take_out(controller: Controller, queued: QueuedError, as_json: bool) -> None:
    """Takes it out of Slurm's queue."""
    from orchestrator.jobs.job_store import ENDED
    from orchestrator.views import console, documents, job_table

    if queued.record.state in ENDED:
        raise queued
    with busy(f"taking {queued.record.id} out of Slurm's queue"):
        record = controller.jobs.slurm.cancel(queued.record)
    if not record.was_queued:  # it has started meanwhile
        job = controller.jobs.find(record.id)
        record = job.refresh()
    if as_json:
        return console.print_json(documents.job_json(record))
    return job_table.print_end(record)


def _meant(controller: Controller, cluster: str | None, yes: bool) -> RunningJob:
    """The latest job, after confirmation. Raises UsageError without it."""
    from orchestrator.jobs.job_store import ENDED
    from orchestrator.views import console

    job = chosen_job(controller, None, cluster)
    known = job.refresh()
    open_jobs = [other for other in controller.store.jobs() if other.state not in ENDED]
    runs = [other.id for other in open_jobs if other.cluster == known.cluster and other.state != "queued"]
    if known.state in ENDED and len(runs) == 1 and not yes:
        console.say(f"it has ended ({known.state}); only {runs[0]} runs")
        job = controller.jobs.find(runs[0])
        known = job.refresh()
    if known.state in ENDED:
        others = [other.id for other in open_jobs if other.id != known.id]
        remedy = (
            f"still running: {', '.join(others)}: `orch cancel --job {others[0] if len(others) == 1 else 'JOB'}`"
            if others
            else "no other job runs; `orch jobs` lists all"
        )
        raise UsageError(f"{known.id} has ended already ({known.state})", remedy)
    _insist(known, yes)
    return job


def _insist(record: JobRecord, yes: bool) -> None:
    question = f"Cancel {record.id} ({record.state}) on {', '.join(record.nodes)}?"
    if not yes and not agrees(question):
        raise UsageError("no job was cancelled", f"orch cancel --job {record.id}")


def cancel_job(job: RunningJob) -> None:
    from orchestrator.views import console

    with busy(f"ending {job.id}"):
        _, stayed = job.cancel()
    for line in stayed:
        console.fail(line)
    if stayed:
        raise OrchError(f"{job.id} may still be running", "`orch reap` lists what is left on the hosts")
    console.say("ended on every host; none of its processes is left")
    if (newest := job.successor()) and newest.slurm and not newest.slurm.is_over:
        console.say(f"Slurm's job {newest.slurm.job} goes on with {newest.id}: `orch cancel --job {newest.id}`")


# `why`: the cause of a stall.


@click.command()
@job_given
@click.option("--stacks", "all_frames", is_flag=True, help="Show the threads of every process, with all frames.")
@cluster_option
@json_option
def why(wanted: str | None, all_frames: bool, cluster: str | None, as_json: bool) -> None:
    """Name the host, rank, Python line and reason where a job stands still.

    Each host looks twice within two seconds at what its ranks do: threads, processes, pipes, connections. It works for
    any script, without root, and changes nothing. A job that is only slow is no stall. The reason is inferred, not
    proved.

    \b
    orch why
    orch why resnet152 --stacks
    orch why --json | jq .verdict
    """
    from orchestrator.jobs.diagnosis import diagnose
    from orchestrator.jobs.job_store import ENDED
    from orchestrator.views import console, documents
    from orchestrator.views import job_table as views

    with open_controller() as controller:
        job = chosen_job(controller, wanted, cluster)
        job.refuse_if_removed()
        if job.record.state in ENDED:
            console.say(f"{job.id} has ended already ({job.record.state}); for more: `orch report --job {job.id}`")
        with busy(f"asking the hosts of {job.id}"):
            if job.record.state in ("starting", "queued") and (waits_for := job.refresh().waits_for):
                console.say(f"{job.id} waits: {waits_for}")
            outcomes = job.snapshots()
    silent = {name: found for name, found in outcomes.items() if isinstance(found, HostError)}
    if len(silent) < len(outcomes):
        verdict = diagnose(job.plan, outcomes)
        job.remember_why(verdict)
        if as_json:
            console.print_json(documents.why_json(job.id, verdict, outcomes))
        else:
            views.print_why(verdict, outcomes, all_frames=all_frames)
    console.fail_each(silent.values())
    if len(silent) == len(outcomes):
        sys.exit(HostError.exit_code)


# `top`: live figures of running jobs.

LEAST_S = 0.2
PIPE_S = 10.0


@click.command()
@click.argument("wanted", nargs=-1, metavar="[JOB]...", shell_complete=job_ids)
@click.option(
    "--every",
    type=Quantity("time"),
    help="Time between two refreshes.  [default: 1s on a terminal and with --json, else 10s]",
)
@click.option("--once", is_flag=True, help="Print one snapshot and exit.")
@cluster_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line: every job, at every refresh.")
def top(wanted: tuple[str, ...], every: float | None, once: bool, cluster: str | None, as_json: bool) -> None:
    """Watch running jobs: speed, loss, waiting, GPUs, the slowest host, time left.

    Without JOB it shows every running job. It only reads metrics, and ends with the jobs; quit with Ctrl-C, the jobs
    keep running. For a host with several GPUs it shows mean utilisation, the fullest memory, the highest temperature
    and the total power.

    \b
    orch top
    orch top resnet152 --every 5s
    orch top --json | jq -c '[.job, .samples_per_s, .slowest]'
    """
    from orchestrator.jobs.gauging import gauging
    from orchestrator.views import console

    is_screen = console.out.is_terminal and not as_json
    every_s = max(LEAST_S, every if every is not None else 1.0 if is_screen or as_json else PIPE_S)
    with open_controller() as controller:
        jobs = _running(controller, wanted, cluster)
        with gauging(jobs) as looked_at, contextlib.suppress(KeyboardInterrupt), _shown(is_screen, as_json) as show:
            _wait_for_first(looked_at, every_s)
            for found in _looks(looked_at, every_s, once):
                show(found)
        console.fail_each(one.error for one in looked_at if one.error)
        for bug in (one.bug for one in looked_at if one.bug):
            raise bug


def _running(controller: Controller, wanted: Sequence[str], cluster: str | None) -> list[RunningJob]:
    """Prints and leaves out jobs with a damaged plan. Raises UsageError if no other job runs."""
    from orchestrator.jobs.job_store import ENDED
    from orchestrator.views import console

    if wanted:
        ids = dict.fromkeys(controller.store.find_job(job, cluster) for job in wanted)
        return [controller.jobs.find(job) for job in ids]
    shown = shown_cluster(controller, cluster)
    with busy("asking the hosts"):
        found = controller.jobs.all(shown)
    records = [record for record in found.records if record.state not in ENDED]
    running = controller.jobs.sound(records)
    damaged = {record.id for record in records} - {job.id for job in running}
    console.fail_each(problem for job, problem in found.problems.items() if job in damaged)
    if not running:
        raise UsageError(
            f"no job is running{f' on {shown}' if shown else ''}", "`orch jobs` lists jobs that have ended"
        )
    return running


def _wait_for_first(looked_at: Sequence[GaugedJob], most_s: float) -> None:
    until_s = time.monotonic() + most_s
    for one in looked_at:
        one.heard.wait(max(0.0, until_s - time.monotonic()))


def _looks(looked_at: Sequence[GaugedJob], every_s: float, once: bool) -> Iterator[list[JobNow]]:
    """Ends when all jobs have ended."""
    due_s = time.monotonic()
    while True:
        is_last = once or all(one.is_over for one in looked_at)
        yield [one.now() for one in looked_at]
        if is_last:
            return
        due_s = max(due_s + every_s, time.monotonic())
        for one in looked_at:
            one.over.wait(max(0.0, due_s - time.monotonic()))


@contextlib.contextmanager
def _shown(is_screen: bool, as_json: bool) -> Iterator[Callable[[list[JobNow]], None]]:
    from rich.live import Live

    from orchestrator.views import console, documents
    from orchestrator.views import top as views

    def lines(found: list[JobNow]) -> None:
        for job in found:
            console.print_json_line(documents.top_json(job)) if as_json else console.put(views.line(job))

    if not is_screen:
        yield lines
        return
    with Live(console=console.out, auto_refresh=False, vertical_overflow="ellipsis") as live:
        yield lambda found: live.update(views.board(found, *console.out.size), refresh=True)
