"""`run`: launches a job, follows it, reports how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.common import busy, json_option, open_controller, setup_lines
from orchestrator.cli.jobs import cancel_job, end_with
from orchestrator.cli.spec_words import JOB_FILES, RunCommand, is_job_file, script_argument, spec_of, went_to_script
from orchestrator.errors import OrchError, UsageError
from orchestrator.paths import RUNS, RunFolder

if TYPE_CHECKING:
    from orchestrator.controller import Controller
    from orchestrator.doctor.table import Finding
    from orchestrator.jobs.job_store import JobRecord
    from orchestrator.jobs.running import RunningJob
    from orchestrator.planning.job_spec import JobSpec
    from orchestrator.planning.launch_plan import LaunchPlan
    from orchestrator.starting.retries import Asked


SECOND_CTRL_C_S = 3.0


@dataclass(frozen=True)
class RunMode:
    """Options that are not part of the job."""

    detach: bool
    dry_run: bool
    notify: str | None
    save: Path | None
    as_json: bool


@click.command(cls=RunCommand)
@click.option("--detach", is_flag=True, help="Return as soon as its hosts have it: they queue, retry and notify.")
@click.option("--dry-run", is_flag=True, help="Print the plan and start nothing.")
@click.option(
    "--notify",
    metavar="CMD|URL",
    envvar="ORCH_NOTIFY",
    help="When the job has ended, run this command (with --detach on the master, else here), or post to this webhook "
    "from the master. A command finds ORCH_JOB, ORCH_STATE and ORCH_EXIT_CODE.",
)
@click.option(
    "--save",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write this job as a file that `orch run FILE` runs; its name ends in .yaml.",
)
@json_option
@script_argument
@click.pass_context
def run(
    ctx: click.Context,
    /,
    detach: bool,
    dry_run: bool,
    notify: str | None,
    save: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Launch a job on every host and follow it.

    Ctrl-C leaves the job running and prints how to reattach; a second Ctrl-C within 3 s cancels it.

    \b
    orch run --exp mnist_lenet --set epochs=1
    orch run --exp resnet152_cifar --set strategy=auto --nodes a2000,v100 --detach
    orch run --exp mnist_lenet --hosts 2:4    does without hosts that are off
    orch run --retries 2 --exp mnist_lenet --set checkpoint_every=500
    orch run --resume latest --set epochs=20  from that job's last checkpoint on
    orch run --resume latest -- train.py      begins with what that job left
    orch run --keep out/ train.py             takes out/ along from job to job
    orch run --nodes v100 train.py --lr 0.1   your own script; ships its folder
    orch run -m mypackage.train --lr 0.1      the same for a module
    orch run --wait train.py                  starts when the GPUs are free, also
                                              with your laptop closed
    orch run --env HF_TOKEN --env-file .env train.py
    orch run --name wide-net --note "rate of the paper" train.py --lr 0.1
    orch run --notify 'mail -s "$ORCH_JOB $ORCH_STATE" me </dev/null' train.py
    orch run --save job.yaml train.py         writes the job as a file, runs it
    orch run job.yaml --nodes v100 -- --lr 1  the file's job, new arguments

    Options of orch stand before the script or module; everything after it is passed to it. Instead of a script you can
    give a whole `python train.py`, `torchrun ... train.py` or `accelerate launch ... train.py`.
    """
    spec = spec_of(ctx, options)
    _start(ctx, spec, RunMode(detach, dry_run, notify, save, as_json))


def _start(ctx: click.Context, spec: JobSpec, way: RunMode) -> None:
    with open_controller() as controller:
        asked = controller.read(spec)
        way = _without_unfit(ctx, way, spec, on_slurm=bool(asked.cluster.engine))
        if way.save:
            _save(controller, spec, way.save)
            asked = controller.read(spec)  # the file may lie in the folder that is shipped
        request = asked.request
        strays = tuple(went_to_script(ctx, request.name, request.command)) if spec.command else ()
        notify_there = way.notify if way.detach or is_webhook(way.notify) else None
        request = replace(request, notes=(*strays, *request.notes), detached=way.detach, notify=notify_there)
        asked = replace(asked, job=replace(asked.job, request=request))
        if asked.cluster.engine:
            return _run_on_slurm(controller, asked, way)
        if way.dry_run:
            return _show_plan(controller.plan(asked), asked, way.as_json)
        return run_asked(controller, asked, way)


def _without_unfit(ctx: click.Context, way: RunMode, spec: JobSpec, *, on_slurm: bool) -> RunMode:
    """Without a webhook from the environment that cannot serve this job. Raises UsageError for words of the line."""
    from orchestrator.views import console

    follows, remedy = "works only while `orch run` follows the job", "leave --detach out"
    if way.detach and not on_slurm and spec.rejoin:
        raise UsageError(f"--rejoin {follows}: a host that was down needs a new start", remedy)
    if (on_slurm or not way.detach) and spec.retries and is_webhook(way.notify):
        other = "a command" if on_slurm else "with --detach it"
        why, remedy = "reports each attempt's end", f"{other} reports the end of the last one"
        if ctx.get_parameter_source("notify") is not click.core.ParameterSource.ENVIRONMENT:
            raise UsageError(f"--notify URL {why}", remedy)
        console.warn(f"ORCH_NOTIFY is not used, since a webhook {why}; {remedy}")
        return replace(way, notify=None)
    return way


def is_webhook(notify: str | None) -> bool:
    return bool(notify) and str(notify).lower().startswith(("http://", "https://"))


def _print_refusal(error: OrchError, findings: Sequence[Finding]) -> None:
    from orchestrator.views import console, documents

    console.print_json({"schema": 1, "error": str(error), "findings": documents.findings_json(findings)})


def _save(controller: Controller, spec: JobSpec, file: Path) -> None:
    from orchestrator.planning.job_forms import write_job
    from orchestrator.views import console

    if not is_job_file(file.name):
        raise UsageError(f"{file}: a job file's name ends in {' or '.join(JOB_FILES)}", f"--save {file}.yaml")
    if spec.resume:  # later `latest` may be another job
        spec = spec.updated(resume=controller.store.find_job(spec.resume, spec.cluster))
    replaced = write_job(file, spec)
    console.say(f"{'replaced' if replaced else 'wrote'} {file}: `orch run {file}` runs this job again")


def _show_plan(plan: LaunchPlan, asked: Asked, as_json: bool) -> None:
    from orchestrator.planning.bundle import names_in
    from orchestrator.views import console, documents
    from orchestrator.views import dry_run as launch_plan

    shown, names = plan.masked(), names_in(asked.job.blob)
    if as_json:
        return console.print_json(documents.dry_run_json(shown, names))
    return launch_plan.print_plan(shown, names)


def run_asked(
    controller: Controller, asked: Asked, way: RunMode, noted: Callable[[RunningJob], None] = lambda job: None
) -> None:
    """noted: called with each job that has started: a retry is one of its own."""

    def start(attempt: Asked) -> RunningJob:
        job = _launch(controller, attempt)
        noted(job)
        return job

    try:
        job = start(asked)
    except OrchError as error:
        if way.as_json:
            _print_refusal(error, controller.checks.findings)
        raise
    _follow_to_end(controller, job, controller.retries(asked, start).after, way)


def _run_on_slurm(controller: Controller, asked: Asked, way: RunMode) -> None:
    from orchestrator.views import console, documents

    if way.dry_run:
        script = controller.submissions.prepared(asked).script
        return console.print_json({"schema": 1, "script": script}) if way.as_json else click.echo(script, nl=False)
    with busy(f"asking Slurm on {asked.cluster.nodes[0].host}") as now_at:
        controller.shows_setup = setup_lines(now_at)
        record = controller.submissions.submit(asked)
    if way.detach:
        return console.print_json(documents.job_json(record)) if way.as_json else click.echo(record.id)
    try:
        with busy("waiting for Slurm") as now_at:

            def shown(words: str) -> None:
                now_at(f"{record.id}: {words}")
                console.say(f"{record.id}: {words}")

            job = controller.submissions.started(record, shown)
    except KeyboardInterrupt:
        console.say(f"\nDetached; it stays in Slurm's queue.\nReattach: orch logs -f --job {record.id}")
        console.say(f"Cancel: orch cancel --job {record.id}")
        raise
    return _follow_to_end(controller, job, controller.submissions.after, way)


def _follow_to_end(
    controller: Controller, job: RunningJob, after: Callable[[RunningJob], RunningJob | None], way: RunMode
) -> None:
    """after: waits for the next attempt, if there is one."""
    ended = set[str]()
    if not way.detach:
        job = _follow_all(job, after, way, ended)
        if way.notify and not is_webhook(way.notify):
            notify(way.notify, job.record)
    findings = controller.checks.findings if way.as_json else None
    _finish(job, findings, detached=way.detach, is_printed=job.id in ended)


def _follow_all(
    job: RunningJob, after: Callable[[RunningJob], RunningJob | None], way: RunMode, ended: set[str]
) -> RunningJob:
    """ended: filled with the ids of jobs whose end has been printed."""
    from orchestrator.views import console

    again: RunningJob | None = job
    while again:
        job = again
        _follow(job, ended, as_json=way.as_json)
        try:
            again = after(job)
        except OrchError as error:
            console.warn(f"{job.id} is not tried again: {error}")
            break
        except KeyboardInterrupt:
            console.say(f"{job.id} is not tried again")
            raise
    return job


def _launch(controller: Controller, asked: Asked) -> RunningJob:
    from orchestrator.units import counted
    from orchestrator.views import console
    from orchestrator.views import dry_run as launch_plan

    printed, tried = set[str](), list[str]()

    def show(plan: LaunchPlan) -> None:
        launch_plan.warn_notes(plan, printed)
        launch_plan.warn_faster(plan.faster if not tried else ())
        tried.append(plan.job)
        now_at(f"starting {plan.job} on {counted(len(plan.nodes), 'host')}")

    with busy(f"planning for {asked.cluster.name}") as now_at:
        controller.shows_setup = setup_lines(now_at)
        try:
            job = controller.start(asked, show)
        except KeyboardInterrupt:
            if tried:
                console.say(f"{tried[-1]} was not started; what was begun is undone")
            raise
    plan = job.plan
    where = f"{counted(plan.world_size, 'rank')} on {counted(len(plan.nodes), 'host')}, master {plan.master}"
    console.say(f"job {plan.job}: {where}")
    if len(plan.nodes) > 1 and plan.shares:
        console.say(f"batch: {launch_plan.split_words(plan)}")
    return job


def _follow(job: RunningJob, printed: set[str], *, as_json: bool) -> None:
    """The first Ctrl-C detaches, a second within SECOND_CTRL_C_S cancels."""
    import threading

    from orchestrator.views import console, following, job_table

    def ended(record: JobRecord) -> None:
        printed.add(record.id)
        job_table.print_outcome(record)

    try:
        stream = console.err if as_json else console.out
        following.print_events(job.follow(folds=True), stream=stream, ended=ended)
    except KeyboardInterrupt:
        try:
            goes_on = "it waits on its hosts" if job.record.state == "queued" else "the job keeps running"
            also = ", and is not tried again" if job.plan.attempt else ""
            console.say(f"\nDetached; {goes_on}{also}.\nReattach: orch logs -f --job {job.id}")
            console.say(f"Cancel: orch cancel --job {job.id} (or Ctrl-C again within {SECOND_CTRL_C_S:.0f} s)")
            threading.Event().wait(SECOND_CTRL_C_S)
        except KeyboardInterrupt:
            cancel_job(job)
            console.say(f"cancelled {job.id}")
        raise


def _finish(job: RunningJob, findings: Sequence[Finding] | None, *, detached: bool = False, is_printed: bool) -> None:
    """findings: for the JSON document. is_printed: its end has been printed, without the exit code."""
    from orchestrator.views import console, documents

    record = job.record
    if findings is not None:
        console.print_json({**documents.job_json(record), "findings": documents.findings_json(findings)})
    if detached:
        if job.plan.asked.waits:
            queues = "its hosts start it when its GPUs are free; `orch jobs` shows its place in the queue"
            has_gpus = any(node.gpu_uuids for node in job.plan.nodes)
            runs = "its GPUs were free: it runs" if has_gpus else "it uses no GPUs, for which jobs queue: it runs"
            console.say(queues if record.state == "queued" else runs)
        if findings is None:
            click.echo(job.id)
        return
    end_with(record, is_printed=is_printed)


# `--notify CMD` without --detach: runs the user's shell command on this machine after the job has ended.
#
# It gets no variables of the job's ranks, which may be secrets. Its failure is only a warning.

LIMIT_S = 60.0


def variables(record: JobRecord) -> dict[str, str]:
    """ORCH_RUN is the folder that `orch collect` would write from here."""
    return {
        "ORCH_JOB": record.id,
        "ORCH_STATE": record.state,
        "ORCH_EXIT_CODE": "" if record.exit_code is None else str(record.exit_code),
        "ORCH_RUN": str(RunFolder(RUNS / record.id).root.absolute()),
    }


def notify(command: str, record: JobRecord, limit_s: float = LIMIT_S) -> None:
    from orchestrator.views import console

    console.err.file.flush()
    if why := _notify_run(command, {**os.environ, **variables(record)}, limit_s):
        console.warn(f"--notify: the command {why}; the job itself is {record.state}")


def _notify_run(command: str, environment: Mapping[str, str], limit_s: float) -> str:
    """Why it failed, else ""."""
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", 'eval "unset ORCH_LINE\n$ORCH_LINE"'],  # everybody may read argument lists
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            env={**environment, "ORCH_LINE": command},
            start_new_session=True,
        )
    except OSError as error:
        return f"could not be started ({error.strerror})"
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"took longer than {limit_s:g} s and was ended"
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}" if code else ""
