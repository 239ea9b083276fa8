"""`plan`: which way to run an experiment, before it runs; also on clusters that one does not have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.common import (
    Quantity,
    cluster_option,
    given_out,
    json_option,
    open_controller,
    out_option,
)
from orchestrator.cli.complete import node_names
from orchestrator.cli.spec_words import ScriptCommand, script_argument, spec_of
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.planning.job_spec import JobSpec
    from orchestrator.views.plan import Outlook


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
    `orch profile`, links from a collected `--exp collectives` run; what is missing is estimated and marked as such. A
    script of your own has to be profiled before, since nothing else is known of its network.

    \b
    orch plan --exp resnet152_cifar
    orch plan --exp resnet152_cifar --set batch=2048 --bandwidth 10Gbps
    orch plan --exp resnet152_cifar --nodes 50xA2000,50xV100 --bandwidth 2.5Gbps
    orch plan --exp mnist_lenet --json | jq '.best.exact'
    orch plan --set fidelity=local -- train.py --width 512
    """
    from orchestrator.forecast.imagined import is_imagined
    from orchestrator.views import console
    from orchestrator.views.documents import plan_json

    spec = spec_of(ctx, options)
    if nodes and is_imagined(nodes):
        outlook = _imagined(spec, nodes, bandwidth)
    else:
        outlook = _own(spec, nodes, bandwidth, out, cluster)
    console.print_json(plan_json(outlook)) if as_json else _show(outlook)


def _own(spec: JobSpec, nodes: str | None, bandwidth: float | None, out: Path, cluster: str | None) -> Outlook:
    from orchestrator.planning.request import parse_job, refuse_without_trainer
    from orchestrator.views.plan import outlook_of

    job = parse_job(spec)
    refuse_without_trainer(job)
    with open_controller() as controller:
        chosen = controller.store.cluster(cluster)
        made, view = controller.planner.outlook(
            chosen, job.request, job.code, chosen.names(nodes), out=given_out(out), bandwidth_bps=bandwidth
        )
    return outlook_of(made, view, job.request.chosen)


def _imagined(spec: JobSpec, nodes: str, bandwidth: float | None) -> Outlook:
    from orchestrator.forecast.imagined import parse_groups
    from orchestrator.planning.request import parse_job
    from orchestrator.views.plan import imagined_outlook

    groups = parse_groups(nodes)
    if bandwidth is None:
        raise UsageError("the links of hosts that you do not have are unknown", "give --bandwidth 2.5Gbps")
    request = parse_job(spec).request
    if not request.trains:
        raise UsageError("what a script does on hosts that you do not have is unknown", "name hosts, or an experiment")
    if request.training is None:
        raise UsageError(f"{spec.exp} trains nothing whose speed could be predicted", "choose another --exp")
    return imagined_outlook(groups, request.training, bandwidth, request.chosen)


def _show(outlook: Outlook) -> None:
    from orchestrator.views import console, tables
    from orchestrator.views.plan import TITLES, changes, endings, headline, rows

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
