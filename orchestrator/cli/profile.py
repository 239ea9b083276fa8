"""`profile`: how fast each host is alone."""

from __future__ import annotations

from collections.abc import Mapping
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
    from orchestrator.call import Host
    from orchestrator.records import LaunchPlan


@click.command()
@click.option(
    "--exp", metavar="NAME", required=True, help="The experiment whose network is timed.", shell_complete=experiments
)
@settings_option("One setting of the experiment; repeatable. profile_s is the time for each host.")
@nodes_option
@click.option("--each", is_flag=True, help="Measure every host by itself, not one of each kind.")
@click.option("--again", is_flag=True, help="Measure anew what is known.")
@cluster_option
@json_option
def profile(
    exp: str, settings: tuple[str, ...], nodes: str | None, each: bool, again: bool, cluster: str | None, as_json: bool
) -> None:
    """Measure how fast each host computes alone: about 15 s for each kind of host, different machines at once.

    What is measured is remembered until the GPU, its driver, torch or the network's settings change. `--set
    shares=measured` splits a batch by it, `shares=auto` begins with it, and efficiency is told against it.

    \b
    orch profile --exp resnet152_cifar
    orch profile --exp resnet152_cifar --set amp=bf16 --each
    orch run --exp resnet152_cifar --set shares=measured
    """
    from orchestrator import console
    from orchestrator.profiling import Profiling, cells, document, measured_shares, titles

    only = names_of(nodes)
    with open_controller() as controller:
        one = Profiling(controller, controller.store.cluster(cluster), exp, settings, only=only, each=each)

        if one.left_out:
            console.warn(f"left out, since a host alone does nothing with it: {', '.join(one.left_out)}")

        def follow(plan: LaunchPlan, hosts: Mapping[str, Host]) -> None:
            console.say(f"measuring {plan.master} alone: {plan.job}")
            console.print_events(controller.follow(plan, hosts), show=lambda line: False, stream=console.err)

        found = one.run(follow, again=again)
    shares = measured_shares(one.batch, found)
    if as_json:
        return console.print_json(document(exp, one.batch, found, shares))
    lines = [cells(one.batch, each, shares.get(each.rank)) for each in found]
    console.print_table(titles(one.batch), lines, right_from=2)
    for node in sorted({each.profile.node for each in found if not each.profile.valid}):
        console.warn(f"{node}: this machine was too slow for the pace that it stood in for; its profile does not count")
    return None
