"""Commands about speed: `plan`, `profile`, `study`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.common import (
    Quantity,
    cluster_option,
    given_out,
    json_option,
    names_of,
    node_names,
    nodes_option,
    open_controller,
    out_option,
    settings_option,
    studies,
)
from orchestrator.cli.spec_words import ScriptCommand, script_argument, spec_of
from orchestrator.errors import UsageError
from orchestrator.studies import study_names

if TYPE_CHECKING:
    from orchestrator.controller import Controller
    from orchestrator.forecast.imagined import HostGroup
    from orchestrator.hosts.cluster import Cluster
    from orchestrator.jobs.running import RunningJob
    from orchestrator.measuring.profiling import ProfileRequest
    from orchestrator.measuring.study_run import Follow
    from orchestrator.planning.job_spec import JobSpec
    from orchestrator.planning.profiles import Profile, RankProfile
    from orchestrator.studies.study import StudyRow
    from orchestrator.views.plan_rows import Outlook


@click.command(cls=ScriptCommand)
@click.option(
    "--nodes",
    metavar="A,B",
    help="Use only these nodes (names, ranges like 'gpu[01-16]', patterns like 'v100*'), or imagine hosts that you do "
    "not have: HOSTSxGPU or HOSTSxGPUSxGPU.",
    shell_complete=node_names,
)
@click.option(
    "--bandwidth",
    type=Quantity("bandwidth"),
    help="The bandwidth of every host's link; replaces what is declared or measured.",
)
@out_option
@cluster_option
@json_option
@script_argument
@click.pass_context
def plan(
    ctx: click.Context,
    /,
    nodes: str | None,
    bandwidth: float | None,
    out: Path,
    cluster: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Predict the step time and samples/s of the ways to run an experiment or a script.

    It starts nothing and asks no host. It shows the fastest strategy of each fidelity, what limits it, hosts that cost
    more than they contribute, and what a faster link, another host or a larger batch would change. Speeds come from
    `orch profile`, links from a collected `--exp collectives` run; missing figures are estimated and marked. Profile a
    script of your own, and hosts without a known GPU, first.

    \b
    orch plan --exp resnet152_cifar
    orch plan --exp resnet152_cifar --set batch=2048 --bandwidth 10Gbps
    orch plan --exp resnet152_cifar --nodes 50xA2000,50xV100 --bandwidth 2.5Gbps
    orch plan --exp resnet152_cifar --json | jq '.best.exact'
    orch plan --set fidelity=local -- train.py    one with `import trainer`
    """
    from orchestrator.forecast.imagined import is_imagined, parse_groups
    from orchestrator.views import console
    from orchestrator.views.documents import plan_json

    spec = spec_of(ctx, options)
    outlook = _on_slurm(spec, nodes, bandwidth, out, cluster)
    if outlook is None and nodes and is_imagined(nodes):
        outlook = _imagined(spec, parse_groups(nodes), bandwidth)
    elif outlook is None:
        outlook = _own(spec, nodes, bandwidth, out, cluster)
    console.print_json(plan_json(outlook)) if as_json else _show(outlook)


def _own(spec: JobSpec, nodes: str | None, bandwidth: float | None, out: Path, cluster: str | None) -> Outlook:
    from orchestrator.planning.request import parse_job, refuse_without_trainer
    from orchestrator.views.plan_rows import outlook_of

    job = parse_job(spec)
    refuse_without_trainer(job)
    with open_controller() as controller:
        chosen = controller.store.cluster(cluster)
        made, view = controller.planner.outlook(
            chosen, job.request, job.code, chosen.names(nodes), out=given_out(out), bandwidth_bps=bandwidth
        )
    return outlook_of(made, view, job.request.chosen)


def _on_slurm(
    spec: JobSpec, nodes: str | None, bandwidth: float | None, out: Path, cluster: str | None
) -> Outlook | None:
    """On hosts of a Slurm cluster's types: as a job has examined them, else as the inventory declares them. None for
    other clusters, and for hosts that one does not have.
    """
    from orchestrator.forecast.imagined import groups_of_types, is_imagined
    from orchestrator.hosts.inventory_file import load_inventory
    from orchestrator.planning.request import parse_job
    from orchestrator.starting.submission import wanted_types
    from orchestrator.views.plan_rows import outlook_of

    with open_controller() as controller:
        known = controller.store.cluster(cluster) if cluster or controller.store.cluster_names() else None
        if known is None or known.engine is None:
            return None
        inventory = load_inventory(Path(known.file))
        try:
            counts = wanted_types(inventory, names_of(nodes))
        except UsageError:
            if nodes and is_imagined(nodes):
                return None
            raise
        examined = known.of_types(counts)
        if examined is None:
            groups, declared_bps = groups_of_types(inventory, counts)
            return _imagined(spec, groups, bandwidth or declared_bps)
        job = parse_job(spec)
        made, view = controller.planner.outlook(
            examined, job.request, job.code, out=given_out(out), bandwidth_bps=bandwidth
        )
    return outlook_of(made, view, job.request.chosen)


def _imagined(spec: JobSpec, groups: Sequence[HostGroup], bandwidth: float | None) -> Outlook:
    from orchestrator.planning.request import parse_job
    from orchestrator.views.plan_rows import imagined_outlook

    if bandwidth is None:
        raise UsageError("the links of hosts that you do not have are unknown", "give --bandwidth 2.5Gbps")
    request = parse_job(spec).request
    if not request.trains:
        raise UsageError("what a script does on hosts that you do not have is unknown", "name hosts, or an experiment")
    if request.training is None:
        raise UsageError(f"{spec.exp} trains nothing whose speed could be predicted", "choose another --exp")
    return imagined_outlook(groups, request.training, bandwidth, request.chosen)


def _show(outlook: Outlook) -> None:
    from orchestrator.views import console
    from orchestrator.views import console as tables
    from orchestrator.views.plan_rows import TITLES, changes, endings, headline, rows

    for sentence in headline(outlook):
        console.put(sentence)
    drop = ("network", "of sum", "shares")
    tables.print_table(TITLES, rows(outlook), right_from=3, left_from=7, drop=drop)
    for sentence in changes(outlook):
        console.put(sentence)
    for sentence in outlook.basis:
        console.out.print(console.plain(sentence, "dim"))
    for sentence in endings(outlook):
        console.put(sentence)


# `profile`.


@click.command(cls=ScriptCommand)
@nodes_option
@click.option("--each", is_flag=True, help="Measure every host, not just one of each kind.")
@click.option("--again", is_flag=True, help="Measure again what is already known.")
@cluster_option
@json_option
@script_argument
@click.pass_context
def profile(
    ctx: click.Context,
    /,
    nodes: str | None,
    each: bool,
    again: bool,
    cluster: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure how fast each host computes by itself.

    This takes about 15 s for each kind of host (`--set profile_s=15`); different machines are measured at the same
    time. A profile is kept until the GPU, its driver, torch or the network's settings change. Runs then split a batch
    by it (`--set shares=equal` splits it evenly), and efficiency is reported against it.

    A script of your own is measured if it uses `trainer.join`: its loop runs on each host alone, with growing batches.

    \b
    orch profile --exp resnet152_cifar
    orch profile --exp resnet152_cifar --set amp=bf16 --each
    orch profile -- train.py --width 512
    orch run --set shares=measured -- train.py --width 512
    """
    from orchestrator.measuring.profiling import ProfileRequest, Profiling
    from orchestrator.views import console, documents, host_tables

    wanted = ProfileRequest.of(spec_of(ctx, options))
    if wanted.left_out:
        console.warn(f"ignored, since they change nothing that a host does alone: {', '.join(wanted.left_out)}")
    with open_controller() as controller:
        known = controller.store.cluster(cluster)
        if known.engine:
            found = _profile_on_slurm(controller, known, wanted, nodes, each=each, again=again)
        else:
            profiling = Profiling(controller, known, wanted, only=known.names(nodes), each=each)
            found = profiling.run(follow_measurement(), again=again)
    batch = wanted.batch_of(found)
    if as_json:
        console.print_json(documents.profile_json(wanted.job.request.name, batch, found))
    else:
        host_tables.print_profiles(batch, found)
    _judge(wanted.line, list({each.profile.node: each.profile for each in found}.values()))


def _profile_on_slurm(
    controller: Controller, cluster: Cluster, wanted: ProfileRequest, nodes: str | None, *, each: bool, again: bool
) -> list[RankProfile]:
    from orchestrator.measuring.slurm_profile import SlurmProfiling
    from orchestrator.views import console

    if each:
        raise UsageError("--each does not work on Slurm", "a profile holds for all hosts of a type")
    types = names_of(nodes) or list(cluster.types)
    return SlurmProfiling(controller, cluster, wanted.on(types)).run(console.say, again=again)


def follow_measurement() -> Callable[[RunningJob], None]:
    from orchestrator.views import console, dry_run, following

    printed = set[str]()

    def follow(job: RunningJob) -> None:
        console.say(f"measuring {job.plan.master} alone: {job.id}")
        dry_run.warn_notes(job.plan, printed)
        following.print_events(job.follow(), show=lambda line: False, stream=console.err)

    return follow


def _judge(line: str, measured: Sequence[Profile]) -> None:
    """line: the command to measure again. Raises OrchError for invalid profiles."""
    from orchestrator.errors import OrchError
    from orchestrator.planning.profiles import RETRY
    from orchestrator.views import console

    for profile in measured:
        if words := profile.drift_words():
            console.warn(words)
        if profile.valid and profile.late_sizes:
            sizes = ", ".join(map(str, profile.late_sizes))
            console.warn(f"{profile.node}: could not keep its pace at batches of {sizes}; its profile leaves them out")
    if why := [profile.why_not_valid() for profile in measured if not profile.valid]:
        raise OrchError(f"not kept: {'; '.join(why)}", RETRY.format(profile=line))


# `study`.

_HELP = f"""Run the rows of a published study that this cluster can run.

The studies are {", ".join(study_names())}. Rows that are done are not run again, even after a Ctrl-C; rows of other
clusters stay in the same table. The table shows medians, and names rows whose ranges overlap as within noise. Each run
of a row uses a different seed.

\b
orch study bottlenecks --set data_dir=/data
orch study mixed_clusters --cluster a16-v100 --repeats 5
orch study mnist_methods --set epochs=1 --repeats 3
orch study input --set epochs=1 --json | jq '.rows[].measured.figures'
"""


@click.command(help=_HELP)
@click.argument("name", metavar="STUDY", shell_complete=studies)
@settings_option("A setting for all rows, before their own; repeatable.")
@click.option("--rows", metavar="A,B", help="Run only these rows (--json lists their names).")
@click.option(
    "--repeats",
    type=click.IntRange(1, 100),
    metavar="N",
    help="Runs of each row. Default: 3 if the first takes less than a minute, else 1.",
)
@click.option("--again", is_flag=True, help="Run rows again that are done.")
@out_option
@cluster_option
@json_option
def study(
    name: str,
    settings: tuple[str, ...],
    rows: str | None,
    repeats: int | None,
    again: bool,
    out: Path,
    cluster: str | None,
    as_json: bool,
) -> None:
    from orchestrator.measuring.study_run import StudyRun
    from orchestrator.planning.request import parse_pairs
    from orchestrator.studies.study import load_study
    from orchestrator.views import console, documents, study_table

    if name not in study_names():
        raise UsageError(f"{name!r} is not a study", f"choose one of {', '.join(study_names())}")
    published = load_study(name)
    only = names_of(rows)
    known = [row.name for row in published.rows]
    for row in only:
        if row not in known:
            raise UsageError(f"{name} has no row {row!r}", f"its rows: {', '.join(known)}")
    overrides = parse_pairs(settings, "--set KEY=VALUE")
    with open_controller() as controller:
        hosts = controller.store.own_cluster(cluster, "`orch run` for each row")
        one = StudyRun(name, published, controller, hosts, out, overrides)
        outcomes = one.run(_study_follower(), only=only, again=again, repeats=repeats)
    if as_json:
        return console.print_json(documents.study_json(name, published, outcomes))
    return study_table.print_study(published, outcomes)


def _study_follower() -> Follow:
    from orchestrator.views import console, dry_run, following

    printed = set[str]()

    def follow(row: StudyRow, job: RunningJob) -> None:
        console.say(f"{row.name}: {job.id} on {', '.join(node.name for node in job.plan.nodes)}")
        dry_run.warn_notes(job.plan, printed)
        try:
            following.print_events(job.follow(), show=lambda line: False, stream=console.err)
        except KeyboardInterrupt:
            console.say(f"\nstopped watching; {job.id} keeps running, and the same command resumes it")
            console.say(f"cancel: orch cancel --job {job.id}")
            raise

    return follow
