"""`profile`: how fast each host is alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from orchestrator.cli.common import (
    cluster_option,
    json_option,
    names_of,
    nodes_option,
    open_controller,
    settings_option,
)
from orchestrator.cli.complete import experiments

if TYPE_CHECKING:
    from orchestrator.jobs.running import RunningJob
    from orchestrator.planning.profiles import Profile


@click.command()
@click.option(
    "--exp", metavar="NAME", required=True, help="The experiment whose network is timed.", shell_complete=experiments
)
@settings_option("A setting of the experiment; repeatable. profile_s is the time for each host.")
@nodes_option
@click.option("--each", is_flag=True, help="Measure every host, not just one of each kind.")
@click.option("--again", is_flag=True, help="Measure again what is already known.")
@cluster_option
@json_option
def profile(
    exp: str, settings: tuple[str, ...], nodes: str | None, each: bool, again: bool, cluster: str | None, as_json: bool
) -> None:
    """Measure how fast each host computes alone.

    This takes about 15 s for each kind of host; different machines are measured at the same time. A profile is kept
    until the GPU, its driver, torch or the network's settings change. Runs then split a batch by it (`--set
    shares=equal` splits it evenly), and efficiency is reported against it. The exit code is 1 where a paced host kept
    its pace at fewer than two batch sizes: it has no profile.

    \b
    orch profile --exp resnet152_cifar
    orch profile --exp resnet152_cifar --set amp=bf16 --each
    orch run --exp resnet152_cifar
    """
    from orchestrator.measuring.profiling import Profiling
    from orchestrator.views import console, documents, following, launch_plan, profile_table

    only = names_of(nodes)
    with open_controller() as controller:
        one = Profiling(controller, controller.store.cluster(cluster), exp, settings, only=only, each=each)

        if one.left_out:
            console.warn(f"ignored, since they change nothing that a host does alone: {', '.join(one.left_out)}")

        said = set[str]()

        def follow(job: RunningJob) -> None:
            console.say(f"measuring {job.plan.master} alone: {job.id}")
            launch_plan.warn_notes(job.plan, said)
            following.print_events(job.follow(), show=lambda line: False, stream=console.err)

        found = one.run(follow, again=again)
    if as_json:
        console.print_json(documents.profile_json(exp, one.batch, found))
    else:
        profile_table.print_profiles(one.batch, found)
    _judge(exp, list({each.profile.node: each.profile for each in found}.values()))


def _judge(exp: str, measured: Sequence[Profile]) -> None:
    """Says what is to be doubted. Raises OrchError where a profile is not valid."""
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
        raise OrchError(f"not kept: {'; '.join(why)}", RETRY.format(exp=exp))
