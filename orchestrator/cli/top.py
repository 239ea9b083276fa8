"""`orch top`: running jobs at this moment."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import click

from orchestrator.cli.common import Quantity, busy, cluster_option, open_controller, shown_cluster
from orchestrator.cli.complete import job_ids
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.controller import Controller
    from orchestrator.jobs.gauge import JobNow
    from orchestrator.jobs.gauging import GaugedJob
    from orchestrator.jobs.running import RunningJob

LEAST_S = 0.2
PIPE_S = 10.0


@click.command()
@click.argument("wanted", nargs=-1, metavar="[JOB]...", shell_complete=job_ids)
@click.option(
    "--every",
    type=Quantity("time"),
    help="Time between two looks.  [default: 1s on a terminal and with --json, else 10s]",
)
@click.option("--once", is_flag=True, help="Show one state and leave.")
@cluster_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line: each job, at each look.")
def top(wanted: tuple[str, ...], every: float | None, once: bool, cluster: str | None, as_json: bool) -> None:
    """Watch running jobs: speed, loss, waiting, GPUs, the slowest host, time left.

    Without a JOB it shows all that run. It reads metrics alone, changes nothing, and ends with the jobs; leave it with
    Ctrl-C, the jobs keep running. Of a host with several GPUs it shows the mean use, the fullest memory, the highest
    temperature and the power of all.

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
            _wait_for_words(looked_at, every_s)
            for found in _looks(looked_at, every_s, once):
                show(found)
        console.fail_each(one.error for one in looked_at if one.error)
        for bug in (one.bug for one in looked_at if one.bug):
            raise bug


def _running(controller: Controller, wanted: Sequence[str], cluster: str | None) -> list[RunningJob]:
    """Names those whose plan is damaged, and leaves them out. Raises UsageError where nothing else runs."""
    from orchestrator.jobs.record import ENDED
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
            f"no job is running{f' on {shown}' if shown else ''}", "`orch jobs` lists those that have ended"
        )
    return running


def _wait_for_words(looked_at: Sequence[GaugedJob], most_s: float) -> None:
    """So that the first look shows something: until each job has been heard, at most as long as between two looks."""
    until_s = time.monotonic() + most_s
    for one in looked_at:
        one.heard.wait(max(0.0, until_s - time.monotonic()))


def _looks(looked_at: Sequence[GaugedJob], every_s: float, once: bool) -> Iterator[list[JobNow]]:
    """One after another, the last when all jobs are over."""
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
