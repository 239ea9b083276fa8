"""The command `run`: launches a job, follows it, says how it ended."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.common import (
    Called,
    Quantity,
    busy,
    cluster_option,
    json_option,
    nodes_option,
    open_controller,
    settings_option,
)
from orchestrator.cli.complete import experiments, job_ids, node_ranges
from orchestrator.cli.script_words import (
    RunCommand,
    folder_option,
    is_job_file,
    module_option,
    script_argument,
    went_to_script,
)

if TYPE_CHECKING:
    from orchestrator.cli.run_options import RunOptions
    from orchestrator.controller import Controller
    from orchestrator.doctor.judge import Finding
    from orchestrator.hosts.cluster import Cluster
    from orchestrator.jobs.running import RunningJob
    from orchestrator.planning.launch_plan import LaunchPlan
    from orchestrator.planning.request import Wish, Words
    from orchestrator.starting.retries import First, Retries

from orchestrator.cli.jobs import cancel_job
from orchestrator.errors import OrchError

SECOND_CTRL_C_S = 3.0


@click.command(cls=RunCommand)
@click.option(
    "--exp",
    metavar="NAME",
    help="A named experiment: mnist_lenet, resnet152_cifar, resnet50_imagenet, or collectives (how fast the network "
    "is).",
    shell_complete=experiments,
)
@settings_option("A setting of the experiment; repeatable. `python -m trainer --help` lists all.")
@click.option(
    "--resume",
    metavar="JOB",
    help="Start a new job from the last checkpoint of this one; a script that resumes by itself begins with the files "
    "that this one wrote.",
    shell_complete=job_ids,
)
@click.option(
    "--keep",
    type=Called("keep"),
    multiple=True,
    metavar="FOLDER",
    help="Begin with this folder as the script's job before left it (out/); repeatable.",
)
@module_option
@folder_option
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    metavar="N",
    help="Samples of an update, over all ranks; each rank finds its part in ORCH_SHARE.",
)
@click.option(
    "--pass-local-rank", is_flag=True, help="Give the script --local_rank=N, as torch.distributed.launch does."
)
@click.option("--no-metrics", is_flag=True, help="Do not measure the steps of a script: install no hooks in its torch.")
@click.option(
    "--env",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="A variable for the ranks of this job; repeatable. NAME alone takes its value from here.",
)
@click.option(
    "--env-file",
    "env_files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A file of such variables, one NAME=value per line; overrides the inventory's `env:`, --env overrides it.",
)
@nodes_option
@click.option(
    "--hosts",
    metavar="MIN:MAX",
    help="Start on the hosts that can take part, the best MAX of them; start nothing on fewer than MIN. N means N:N.",
    shell_complete=node_ranges,
)
@click.option("--detach", is_flag=True, help="Return as soon as the job runs.")
@click.option("--dry-run", is_flag=True, help="Print the plan and start nothing.")
@click.option("--share", is_flag=True, help="Use GPUs even if another job or other people are on them.")
@click.option("--wait", is_flag=True, help="Queue for GPUs in use, and start when they are free.")
@click.option("--wait-limit", type=Quantity("time"), help="Wait no longer than this: 30m, 12h. Means --wait.")
@click.option(
    "--grace",
    type=Quantity("time"),
    default="3s",
    show_default=True,
    help="How long ranks have after the first signal (SIGTERM if the script handles it, else SIGINT) before SIGTERM, "
    "and after that before SIGKILL.",
)
@click.option(
    "--retries",
    type=click.IntRange(min=1),
    metavar="N",
    help="If hosts make the job fail, start it again on those that remain, from its last checkpoint; at most N times.",
)
@click.option(
    "--retry-on",
    type=click.Choice(["hosts", "any"]),
    default="hosts",
    show_default=True,
    help="With --retries: any also tries again where the script failed by itself.",
)
@click.option("--rejoin", is_flag=True, help="With --retries: take a lost host in again once it answers.")
@click.option(
    "--retry-wait",
    type=Quantity("time"),
    default="10s",
    show_default=True,
    help="With --retries: the pause before the first one; it doubles each time, up to 6m.",
)
@click.option(
    "--time-limit",
    type=Quantity("time"),
    help="End the job after this time: 90s, 30m, 12h. Then it may start before queued jobs that it does not delay.",
)
@click.option("--name", type=Called("name"), metavar="NAME", help="What the job's id begins with.")
@click.option(
    "--note", type=Called("note"), metavar="TEXT", help="A line that `orch jobs` and the report show with it."
)
@click.option(
    "--notify",
    metavar="CMD",
    help="Run this command here when the job has ended; it finds ORCH_JOB, ORCH_STATE, ORCH_EXIT_CODE and ORCH_RUN.",
)
@click.option(
    "--save",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write this job as a file that `orch run FILE` runs; its name ends in .yaml.",
)
@cluster_option
@json_option
@script_argument
@click.pass_context
def run(ctx: click.Context, /, **options: Any) -> None:
    """Launch a job on every host and follow it.

    Ctrl-C leaves the job running and says how to reattach; a second one within 3 s cancels it.

    \b
    orch run --exp mnist_lenet --set epochs=1
    orch run --exp resnet152_cifar --set strategy=auto --nodes a2000,v100 --detach
    orch run --exp mnist_lenet --set checkpoint_every=500
    orch run --exp mnist_lenet --hosts 2:4    does without hosts that are off
    orch run --retries 2 --exp mnist_lenet --set checkpoint_every=500
    orch run --resume latest --set epochs=20  from that job's last checkpoint on
    orch run --resume latest -- train.py      begins with what that job left
    orch run --keep out/ train.py             takes out/ along from job to job
    orch run --nodes v100 train.py --lr 0.1   your own script; ships its folder
    orch run -m mypackage.train --lr 0.1      the same for a module
    orch run --wait train.py                  starts when the GPUs are free
    orch run --env HF_TOKEN --env-file .env train.py
    orch run --name wide-net --note "rate of the paper" train.py --lr 0.1
    orch run --notify 'mail -s "$ORCH_JOB $ORCH_STATE" me </dev/null' train.py
    orch run --save job.yaml train.py         writes the job as a file, runs it
    orch run job.yaml --nodes v100 -- --lr 1  the file's job with other words

    Options of orch stand before the script or module; everything after it is passed to it. Instead of a script you can
    give a whole `python train.py`, `torchrun ... train.py` or `accelerate launch ... train.py`.
    """
    from orchestrator.cli.run_options import RunOptions

    asked = RunOptions(**options)
    if asked.command and is_job_file(asked.command[0]) and not asked.is_module:
        from orchestrator.cli.job_options import with_file

        asked = with_file(ctx, asked)
    _start(ctx, asked)


def _start(ctx: click.Context, options: RunOptions) -> None:
    from dataclasses import replace

    from orchestrator.starting.retries import First

    options.check_notify()
    options.waits()
    attempt = options.first_attempt()
    hosts = options.wanted_hosts()
    variables, words = options.variables(), options.words()
    with open_controller() as controller:
        cluster, wish = _wish_of(controller, options, words)
        if options.save:
            _save(controller, options, options.save)
            cluster, wish = _wish_of(controller, options, words)  # the file may lie in the folder that is shipped
        strays = went_to_script(ctx, wish.request.name, wish.request.command) if words.command else ()
        request = replace(
            wish.request, share_gpus=options.share, grace_s=options.grace, time_limit_s=options.time_limit,
            hosts=hosts, attempt=attempt, env=variables, measures_steps=options.measures_steps(),
            keep=options.kept(),
            notes=(*strays, *wish.request.notes), job_name=options.name, note=options.note,
        )  # fmt: skip
        only = cluster.names(options.nodes)
        if options.dry_run:
            plan = controller.handovers.noted(controller.choice.plan(cluster, request, wish.code, only), wish.blob)
            return _show_plan(plan, wish, options.as_json)
        _run(controller, First(cluster, replace(wish, request=request), only), options)
    return None


def _print_refusal(error: OrchError, findings: Sequence[Finding]) -> None:
    from orchestrator.views import console, documents

    console.print_json({"schema": 1, "error": str(error), "findings": documents.findings_json(findings)})


def _wish_of(controller: Controller, options: RunOptions, words: Words) -> tuple[Cluster, Wish]:
    from orchestrator.planning.request import read_wish

    if options.resume:
        return controller.resume(options.resume, words, options.nodes, named=options.cluster)
    wish = read_wish(words)
    return controller.store.cluster(options.cluster), wish


def _save(controller: Controller, options: RunOptions, file: Path) -> None:
    from dataclasses import replace

    from orchestrator.cli.job_options import save
    from orchestrator.views import console

    if options.resume:  # tomorrow's `latest` is another job
        options = replace(options, resume=controller.store.find_job(options.resume, options.cluster))
    replaced = save(options, file)
    console.say(f"{'replaced' if replaced else 'wrote'} {file}: `orch run {file}` runs this job again")


def _show_plan(plan: LaunchPlan, wish: Wish, as_json: bool) -> None:
    from orchestrator.planning.bundle import names_in
    from orchestrator.views import console, documents, launch_plan

    shown, names = plan.masked(), names_in(wish.blob)
    if as_json:
        return console.print_json(documents.dry_run_json(shown, names))
    return launch_plan.print_plan(shown, names)


def _run(controller: Controller, first: First, options: RunOptions) -> None:
    """To its end, or until it runs."""

    def start(cluster: Cluster, wish: Wish, only: Sequence[str]) -> RunningJob:
        return _launch(controller, cluster, wish, only, options)

    try:
        job = start(first.cluster, first.wish, first.only)
    except OrchError as error:
        if options.as_json:
            _print_refusal(error, controller.checks.findings)
        raise
    if not options.detach:
        retries = controller.retries(first, start, options.retry_wait)
        job = _follow_all(job, retries, options)
        if options.notify:
            from orchestrator.cli.notify import notify

            notify(options.notify, job.record)
    _finish(job, controller.checks.findings if options.as_json else None, detached=options.detach)


def _follow_all(job: RunningJob, retries: Retries, options: RunOptions) -> RunningJob:
    """Attempt after attempt; the last one, which has ended."""
    from orchestrator.views import console

    again: RunningJob | None = job
    while again:
        job = again
        _follow(job, as_json=options.as_json)
        try:
            again = retries.after(job)
        except OrchError as error:
            console.warn(f"{job.id} is not tried again: {error}")
            break
        except KeyboardInterrupt:
            console.say(f"{job.id} is not tried again")
            raise
    return job


def _launch(
    controller: Controller, cluster: Cluster, wish: Wish, only: Sequence[str], options: RunOptions
) -> RunningJob:
    from orchestrator.units import counted
    from orchestrator.views import console, launch_plan

    said, tried = set[str](), list[str]()

    def show(plan: LaunchPlan) -> None:
        launch_plan.warn_notes(plan, said)
        launch_plan.warn_faster(plan.faster if not tried else ())
        tried.append(plan.job)
        now_at(f"starting {plan.job} on {counted(len(plan.nodes), 'host')}")

    with busy(f"planning for {cluster.name}") as now_at:
        try:
            if options.waits():
                job = controller.start_in_turn(cluster, wish, only, show, limit_s=options.wait_limit)
            else:
                job = controller.start(cluster, wish, only, show)
        except KeyboardInterrupt:
            if tried:
                console.say(f"{tried[-1]} was not started; what was begun is undone")
            raise
    plan = job.plan
    where = f"{counted(plan.world_size, 'rank')} on {counted(len(plan.nodes), 'host')}, master {plan.master}"
    console.say(f"job {plan.job}: {where}")
    return job


def _follow(job: RunningJob, *, as_json: bool) -> None:
    """Shows it until the end. The first Ctrl-C detaches, a second within SECOND_CTRL_C_S cancels."""
    import threading

    from orchestrator.views import console, following

    try:
        following.print_events(job.follow(), stream=console.err if as_json else console.out)
    except KeyboardInterrupt:
        try:
            also = ", and is not tried again" if job.plan.attempt else ""
            console.say(f"\nDetached; the job keeps running{also}.\nReattach: orch logs -f --job {job.id}")
            console.say(f"Cancel: orch cancel --job {job.id} (or Ctrl-C again within {SECOND_CTRL_C_S:.0f} s)")
            threading.Event().wait(SECOND_CTRL_C_S)
        except KeyboardInterrupt:
            cancel_job(job)
            console.say(f"cancelled {job.id}")
        raise


def _finish(job: RunningJob, findings: Sequence[Finding] | None, *, detached: bool = False) -> None:
    """findings: for the document, where one is wanted."""
    from orchestrator.views import console, documents, job_table

    record = job.record
    if findings is not None:
        console.print_json({**documents.job_json(record), "findings": documents.findings_json(findings)})
    if detached:
        if findings is None:
            click.echo(job.id)
        return
    job_table.print_end(record)
    if record.state != "succeeded":
        sys.exit(1)
    console.say(f"next: orch collect --job {job.id}")
