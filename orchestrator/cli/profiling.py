"""`profile`: how fast each host is alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.common import (
    cluster_option,
    json_option,
    nodes_option,
    open_controller,
)
from orchestrator.cli.spec_words import ScriptCommand, script_argument, spec_of

if TYPE_CHECKING:
    from orchestrator.jobs.running import RunningJob
    from orchestrator.planning.profiles import Profile


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
    by it (`--set shares=equal` splits it evenly), and efficiency is reported against it. The exit code is 1 if a paced
    host kept its pace at fewer than two batch sizes: it has no profile.

    A script of your own is measured if it takes part by `trainer.join`: its loop runs on each host alone, with batches
    of growing sizes, and ends when they are measured.

    \b
    orch profile --exp resnet152_cifar
    orch profile --exp resnet152_cifar --set amp=bf16 --each
    orch profile -- train.py --width 512
    orch run --set shares=measured -- train.py --width 512
    """
    from orchestrator.measuring.profiling import Profiling
    from orchestrator.views import console, documents, profile_table

    spec = spec_of(ctx, options)
    with open_controller() as controller:
        known = controller.store.cluster(cluster)
        one = Profiling(controller, known, spec, only=known.names(nodes), each=each)
        if one.left_out:
            console.warn(f"ignored, since they change nothing that a host does alone: {', '.join(one.left_out)}")
        found = one.run(_follower(), again=again)
    batch = one.batch_of(found)
    if as_json:
        console.print_json(documents.profile_json(one.job.request.name, batch, found))
    else:
        profile_table.print_profiles(batch, found)
    _judge(one.line, list({each.profile.node: each.profile for each in found}.values()))


def _follower() -> Callable[[RunningJob], None]:
    """What shows each measurement's job; a note of several once."""
    from orchestrator.views import console, following, launch_plan

    said = set[str]()

    def follow(job: RunningJob) -> None:
        console.say(f"measuring {job.plan.master} alone: {job.id}")
        launch_plan.warn_notes(job.plan, said)
        following.print_events(job.follow(), show=lambda line: False, stream=console.err)

    return follow


def _judge(line: str, measured: Sequence[Profile]) -> None:
    """Says what is to be doubted; line: the command that measures again. Raises OrchError for what is not valid."""
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
