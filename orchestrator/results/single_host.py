"""What would have taken less time than a run that is over: its fastest host alone, with the `orch run` line. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from orchestrator.planning.job_forms import run_line
from orchestrator.planning.launch_plan import Faster, LaunchPlan
from orchestrator.results.summary import NodeSummary
from trainer.shared.config import begun_with, names_of
from trainer.shared.settings import Settings

WORTH = 1.05
"""What is less than 5 % faster is not worth a word: by so much predictions and measurements may be off."""
OF_RANKS = names_of(lambda each: each.is_of_ranks)
"""A single rank takes the experiment's own values of these."""


def measured(plan: LaunchPlan, nodes: Sequence[NodeSummary], samples_per_s: float | None) -> tuple[Faster, ...]:
    """The plan's predictions, with the fastest host alone by what was measured of it in place of what was predicted.

    samples_per_s: of the cluster in this run; None where it is not known. Where a host could not keep its pace nothing
    that was measured counts, and what was predicted stays.
    """
    if samples_per_s is None or len(nodes) < 2:
        return ()
    if not all(node.valid for node in nodes):
        return plan.faster
    speeds = {node.name: node.solo_samples_per_s or node.own_samples_per_s or 0.0 for node in nodes}
    name = max(speeds, key=lambda each: speeds[each])
    others = tuple(one for one in plan.faster if len(one.hosts) > 1)
    if speeds[name] <= WORTH * samples_per_s or not may_leave(plan, (name,)):
        return others
    settings = plan.training and settings_on(plan.training, plan.node(name).ranks, all_hosts=False)
    if plan.kind == "experiment" and settings is None:  # of another version of orch: no line of ours would be the same
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
    return (*(one for one in others if one.of_time * WORTH < alone.of_time), alone)


def may_leave(plan: LaunchPlan, hosts: Collection[str]) -> bool:
    """A checkpoint to go on from lies on the master alone."""
    return plan.training is None or not plan.training.resume or plan.master in hosts


def settings_on(settings: Settings, ranks: int, *, all_hosts: bool) -> Settings:
    """These, less what speaks of ranks that are not there."""
    own = begun_with(settings.exp)
    dropped = OF_RANKS if ranks == 1 else () if all_hosts else ("slow", "shares", "stages")
    return dataclasses.replace(settings, **{name: own[name] for name in dropped})
