"""Commands about jobs: `run`, `jobs`, `logs`, `cancel`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.common import (
    Quantity,
    agrees,
    busy,
    chosen_job,
    cluster_option,
    job_option,
    json_option,
    nodes_option,
    open_controller,
    settings_option,
)
from orchestrator.cli.complete import experiments, job_ids, node_names, node_ranges
from orchestrator.cli.script_words import ScriptCommand, files, went_to_script
from orchestrator.errors import HostError, OrchError, UsageError

if TYPE_CHECKING:
    from orchestrator.cli.run_options import RunOptions
    from orchestrator.controller import Controller
    from orchestrator.hosts.cluster import Cluster
    from orchestrator.jobs.record import JobRecord
    from orchestrator.jobs.running import RunningJob
    from orchestrator.planning.launch_plan import LaunchPlan
    from orchestrator.planning.request import Wish, Words

SECOND_CTRL_C_S = 3.0
SHOWN = 5
"""So many jobs are named on one line."""
SCREEN_JOBS = 20
"""So many `orch jobs` shows on a terminal by default."""


@click.command(cls=ScriptCommand)
@click.option(
    "--exp",
    metavar="NAME",
    help="A named experiment: mnist_lenet, resnet152_cifar, or collectives (how fast the network is).",
    shell_complete=experiments,
)
@settings_option("A setting of the experiment; repeatable. `python -m trainer --help` lists all.")
@click.option(
    "--resume", metavar="JOB", help="Start a new job from the last checkpoint of this one.", shell_complete=job_ids
)
@click.option("-m", "--module", "is_module", is_flag=True, help="Run a Python module of your folder, not a script.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="The folder to ship. [default: the script's folder, or the current one]",
)
@click.option(
    "--batch", type=click.IntRange(min=1), metavar="N", help="Split N samples an update: each rank's is in ORCH_SHARE."
)
@click.option(
    "--pass-local-rank", is_flag=True, help="Give the script --local_rank=N, as torch.distributed.launch does."
)
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
@click.option("--detach", is_flag=True, help="Return as soon as the job runs.")
@click.option("--dry-run", is_flag=True, help="Print the plan and start nothing.")
@click.option("--share", is_flag=True, help="Use GPUs even if another job or other people are on them.")
@click.option(
    "--grace",
    type=Quantity("time"),
    default="3s",
    show_default=True,
    help="The time that ranks get between INT, TERM and KILL.",
)
@click.option(
    "--elastic",
    metavar="MIN:MAX",
    help="Continue with MIN to MAX nodes when ranks die, or when hosts other than the master are lost.",
    shell_complete=node_ranges,
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    metavar="N",
    help="With --elastic: restart a host's ranks at most N times after one of them died. [default: 3]",
)
@click.option("--time-limit", type=Quantity("time"), help="End the job after this time: 90s, 30m, 12h.")
@cluster_option
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT [ARGS]...]", shell_complete=files)
@click.pass_context
def run(ctx: click.Context, /, **options: Any) -> None:
    """Launch a job on every host and follow it.

    Ctrl-C leaves the job running and says how to reattach; a second one within 3 s cancels it.

    \b
    orch run --exp mnist_lenet --set epochs=1
    orch run --exp resnet152_cifar --set strategy=allreduce --nodes a2000,v100 --detach
    orch run --exp mnist_lenet --set checkpoint_every=500
    orch run --exp mnist_lenet --set checkpoint_every=500 --elastic 2:3  continues when a third node is lost
    orch run --resume latest --set epochs=20  resumes from that job's last checkpoint
    orch run --nodes v100 train.py --lr 0.1   your own torchrun script; its folder is shipped
    orch run -m mypackage.train --lr 0.1      the same for a module
    orch run --env HF_TOKEN --env-file .env train.py  with variables of this machine and of a file

    Options of orch stand before the script or module; everything after it is passed to it. Instead of a script you can
    give a whole `python train.py`, `torchrun ... train.py` or `accelerate launch ... train.py`.
    """
    from orchestrator.cli.run_options import RunOptions

    _start(ctx, RunOptions(**options))


def _start(ctx: click.Context, options: RunOptions) -> None:
    from dataclasses import replace

    elastic, variables, words = options.wanted_nodes(), options.variables(), options.words()
    with open_controller() as controller:
        cluster, wish = _wish_of(controller, options, words)
        strays = went_to_script(ctx, wish.request.name, wish.request.command) if words.command else ()
        request = replace(
            wish.request, share_gpus=options.share, grace_s=options.grace, time_limit_s=options.time_limit,
            elastic=elastic, env=variables, notes=(*strays, *wish.request.notes),
        )  # fmt: skip
        plan = controller.plan(cluster, request, wish.code, options.only)
        if options.dry_run:
            return _show_plan(plan, wish, options.as_json)
        _run(controller, plan, wish.blob, options.as_json, detach=options.detach)
    return None


def _wish_of(controller: Controller, options: RunOptions, words: Words) -> tuple[Cluster, Wish]:
    from orchestrator.planning.request import read_wish

    if options.resume:
        return controller.resume(options.resume, options.settings, options.only, named=options.cluster)
    wish = read_wish(words)
    return controller.store.cluster(options.cluster), wish


def _show_plan(plan: LaunchPlan, wish: Wish, as_json: bool) -> None:
    from orchestrator.planning.bundle import names_in
    from orchestrator.views import console, documents, launch_plan

    shown, names = plan.masked(), names_in(wish.blob)
    if as_json:
        return console.print_json(documents.dry_run_json(shown, names))
    return launch_plan.print_plan(shown, names)


def _run(controller: Controller, plan: LaunchPlan, blob: bytes, as_json: bool, *, detach: bool) -> None:
    """To its end, or until it runs."""
    from orchestrator.views import console, following

    job = _launch(controller, plan, blob)
    if not detach:
        stream = console.err if as_json else console.out
        _follow(job, lambda: following.print_events(job.follow(), stream=stream))
    _finish(job, as_json, detached=detach)


def _launch(controller: Controller, plan: LaunchPlan, blob: bytes) -> RunningJob:
    from orchestrator.units import counted
    from orchestrator.views import console, launch_plan

    launch_plan.warn_notes(plan)
    launch_plan.warn_faster(plan.faster)
    with busy(f"starting {plan.job} on {counted(len(plan.nodes), 'host')}"):
        try:
            job = controller.launch(plan, blob)
        except KeyboardInterrupt:
            console.say(f"{plan.job} was not started; what was begun is undone")
            raise
    where = f"{counted(plan.world_size, 'rank')} on {counted(len(plan.nodes), 'host')}, master {plan.master}"
    console.say(f"job {plan.job}: {where}")
    return job


def _follow(job: RunningJob, show: Callable[[], None]) -> None:
    """Shows until the end. The first Ctrl-C detaches, a second within SECOND_CTRL_C_S cancels."""
    import threading

    from orchestrator.views import console

    try:
        show()
    except KeyboardInterrupt:
        try:
            console.say(f"\nDetached; the job keeps running.\nReattach: orch logs -f --job {job.id}")
            console.say(f"Cancel: orch cancel --job {job.id} (or Ctrl-C again within {SECOND_CTRL_C_S:.0f} s)")
            threading.Event().wait(SECOND_CTRL_C_S)
        except KeyboardInterrupt:
            _cancel(job)
            console.say(f"cancelled {job.id}")
        raise


def _finish(job: RunningJob, as_json: bool, *, detached: bool = False) -> None:
    from orchestrator.views import console, documents, job_table

    record = job.record
    if as_json:
        console.print_json(documents.job_json(record))
    if detached:
        if not as_json:
            click.echo(job.id)
        return
    job_table.print_end(record)
    if record.state != "succeeded":
        sys.exit(1)
    console.say(f"next: orch collect --job {job.id}")


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

    Hosts that give no answer are named on standard error, and as `unheard` in the JSON. You can look at found jobs that
    another $ORCH_HOME started, but only that one can end or remove them, unless you make them yours with --adopt.

    \b
    orch jobs
    orch jobs --cluster rack --limit 5
    orch jobs --rescan                    after $ORCH_HOME was damaged
    orch jobs --rescan --adopt            after it was lost
    orch jobs --json | jq -r '.jobs[0].id'
    """
    from orchestrator.views import console, documents, job_table

    problems: dict[str, OrchError] = {}
    if adopt and not rescan:
        raise UsageError("--adopt belongs to --rescan", "orch jobs --rescan --adopt")
    with open_controller() as controller:
        cluster = _shown_cluster(controller, cluster)
        if rescan:
            problems |= _rescanned(controller, cluster, adopt=adopt, yes=yes)
        found = controller.jobs.all(cluster)
    if as_json:
        console.print_json(documents.jobs_json(found.records[: limit or None], found.unheard))
    else:
        _show_jobs(found.records, SCREEN_JOBS if limit is None and console.out.is_terminal else limit or 0)
    job_table.warn_stalls(found.records)
    job_table.warn_unheard(found.unheard)
    problems = {**found.problems, **problems}
    console.fail_each(problems.values())
    if any(isinstance(error, HostError) for error in problems.values()):
        sys.exit(HostError.exit_code)


def _rescanned(controller: Controller, cluster: str | None, *, adopt: bool, yes: bool) -> Mapping[str, OrchError]:
    """Asks the hosts for jobs that are unknown or damaged here, and says what came of it; gives what went wrong."""
    from orchestrator.text import some
    from orchestrator.views import console

    names = [cluster] if cluster else controller.store.cluster_names() or [controller.store.cluster_name()]
    with busy(f"asking the hosts of {', '.join(names)}"):
        rebuilt = controller.lost_jobs.rescan(names)
    console.say(f"rebuilt from the hosts: {some([job.id for job in rebuilt.records], SHOWN) or 'nothing'}")
    for sentence in rebuilt.notices:
        console.warn(sentence)
    return {**rebuilt.problems, **_others(controller, names, adopt, yes)}


def _show_jobs(records: Sequence[JobRecord], limit: int) -> None:
    """records: newest first. limit: 0 means all."""
    from orchestrator.jobs.record import ENDED
    from orchestrator.views import console, job_table

    job_table.print_jobs(records[: limit or None])
    older = records[limit:] if limit else ()
    if older:
        running = sum(job.state not in ENDED for job in older)
        some = f", {running} of them not ended" if running else ""
        console.say(f"and {len(older)} older{some}: `orch jobs --limit 0` shows all")


def _shown_cluster(controller: Controller, named: str | None) -> str | None:
    """None means all of them: only a person's own word leaves jobs out."""
    from orchestrator.views import console

    terminals = controller.store.terminals()
    if not named and not terminals:
        return None
    chosen = controller.store.cluster_name(named)
    if not named and terminals:
        console.say(f"jobs of cluster {chosen} ({terminals.by}); `{terminals.by}= orch jobs` shows all")
    return chosen


def _others(controller: Controller, clusters: list[str], adopt: bool, yes: bool) -> Mapping[str, OrchError]:
    """Says whose the jobs are that another home started, and makes them ours where that is wanted."""
    from orchestrator.text import some
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


@click.command()
@job_option
@click.option("-f", "--follow", is_flag=True, help="Follow until the job has ended.")
@click.option("--node", "only_node", metavar="N", help="Only this node.", shell_complete=node_names)
@click.option("--rank", "only_rank", type=int, metavar="R", help="Only this rank.")
@cluster_option
def logs(wanted: str | None, follow: bool, only_node: str | None, only_rank: int | None, cluster: str | None) -> None:
    """Show what the ranks printed, each line with its node and rank.

    After `orch down` it shows what was collected.

    \b
    orch logs -f
    orch logs --job resnet152 --node v100 --rank 0
    """
    from orchestrator.jobs.copies import copied_lines, is_removed, newest_copy, nothing_left
    from orchestrator.jobs.lines import LogLine
    from orchestrator.views import console, following

    def chosen(line: LogLine) -> bool:
        return only_node in (None, line.node) and only_rank in (None, line.rank)

    with open_controller() as controller:
        job = chosen_job(controller, wanted, cluster)
        plan = job.plan
        if only_node:
            controller.store.cluster(plan.cluster).node(only_node)
        if only_rank is not None and not 0 <= only_rank < plan.world_size:
            raise UsageError(f"{plan.job} has no rank {only_rank}", f"its ranks: 0 to {plan.world_size - 1}")
        if is_removed(controller.store, plan):
            why, copy = nothing_left(controller.store, plan), newest_copy(controller.store, plan.job)
            if copy is None:
                raise why
            console.say(f"{why.message}; these are the lines that were collected into {copy.root}")
            return following.print_events(copied_lines(plan, copy), chosen)
        away = job.reach()
        console.fail_each(away.values())
        following.print_events(job.follow(until_end=follow), chosen)
        if away:
            sys.exit(3)
    return None


@click.command()
@job_option
@click.option("--yes", is_flag=True, help="Do not ask whether the latest job is meant.")
@cluster_option
@json_option
def cancel(wanted: str | None, yes: bool, cluster: str | None, as_json: bool) -> None:
    """End a job on all its hosts, then check that nothing is left.

    Without --job it is the latest job of the cluster, and you are asked to confirm.

    \b
    orch cancel --job mnist_lenet-20261121-0912-k3f
    orch cancel
    """
    from orchestrator.jobs.record import ENDED
    from orchestrator.views import console, documents, job_table

    with open_controller() as controller:
        job = controller.jobs.find(wanted, cluster) if wanted else _meant(controller, cluster, yes)
        if job.record.state in ENDED:
            console.say(f"{job.id} has ended already; looking for what it may have left")
        _cancel(job)
        record = job.record
        if as_json:
            console.print_json(documents.job_json(record))
        else:
            job_table.print_end(record)


def _meant(controller: Controller, cluster: str | None, yes: bool) -> RunningJob:
    """The latest job, once its person has said that it is the one to end. Raises UsageError where nobody does."""
    from orchestrator.jobs.record import ENDED

    job = chosen_job(controller, None, cluster)
    known = job.refresh()
    if known.state in ENDED:
        others = [other.id for other in controller.store.jobs() if other.state not in ENDED]
        remedy = f"still running: {', '.join(others)}: name one with --job" if others else "no other job runs, either"
        raise UsageError(f"{known.id} has ended already ({known.state})", remedy)
    question = f"Cancel {known.id} ({known.state}) on {', '.join(known.nodes)}?"
    if not yes and not agrees(question):
        raise UsageError("no job was cancelled", f"orch cancel --job {known.id}")
    return job


def _cancel(job: RunningJob) -> None:
    from orchestrator.views import console

    with busy(f"ending {job.id}"):
        _, stayed = job.cancel()
    for line in stayed:
        console.fail(line)
    if stayed:
        raise OrchError(f"{job.id} may still be running", "`orch reap` lists what is left on the hosts")
    console.say("ended on every host; none of its processes is left")
