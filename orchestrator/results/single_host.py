"""Faster ways to repeat a finished run, for example on its fastest host, with the `orch run` line. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from orchestrator.planning.job_forms import run_line
from orchestrator.planning.launch_plan import Faster, LaunchPlan
from orchestrator.results.summary import NodeSummary
from trainer.shared.config import begun_with, names_of
from trainer.shared.settings import Settings

WORTH = 1.05
"""Smaller gains are within the error of predictions and measurements."""
OF_RANKS = names_of(lambda each: each.is_of_ranks)


def measured(plan: LaunchPlan, nodes: Sequence[NodeSummary], samples_per_s: float | None) -> tuple[Faster, ...]:
    """samples_per_s: of the cluster. Measured speeds of the fastest host replace predictions, unless a host did not
    keep its pace.
    """
    if samples_per_s is None or len(nodes) < 2:
        return ()
    if not all(node.valid for node in nodes):
        return plan.faster
    speeds = {node.name: node.solo_samples_per_s or node.own_samples_per_s or 0.0 for node in nodes}
    name = max(speeds, key=lambda each: speeds[each])
    others = tuple(each for each in plan.faster if len(each.hosts) > 1)
    if speeds[name] <= WORTH * samples_per_s or not may_leave(plan, (name,)):
        return others
    settings = plan.training and settings_on(plan.training, plan.node(name).ranks, all_hosts=False)
    if plan.kind == "experiment" and settings is None:  # from another version of orch: our line would differ
        return others
    is_profiled = next(node for node in nodes if node.name == name).solo_samples_per_s is not None
    alone = Faster(
        hosts=(name,),
        what=f"{name} alone",
        samples_per_s=speeds[name],
        of_time=samples_per_s / speeds[name],
        basis="profiled" if is_profiled else "computed",
        command=run_line(plan, [name], settings),
    )
    return (*(each for each in others if each.of_time * WORTH < alone.of_time), alone)


def may_leave(plan: LaunchPlan, hosts: Collection[str]) -> bool:
    """The checkpoint to resume from is only on the master."""
    return plan.training is None or not plan.training.resume or plan.master in hosts


def settings_on(settings: Settings, ranks: int, *, all_hosts: bool) -> Settings:
    """Without settings of missing ranks."""
    own = begun_with(settings.exp)
    dropped = OF_RANKS if ranks == 1 else () if all_hosts else ("slow", "shares", "stages")
    return dataclasses.replace(settings, **{name: own[name] for name in dropped})
