"""Completes a plan: settings left open, prediction, notes, faster ways; rates hosts for `--hosts`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.errors import UsageError
from orchestrator.forecast.cut import slice_notes, stage_notes, with_stages
from orchestrator.forecast.inputs import blocks_in, inputs_of, memory_notes, speeds_of, with_rounds
from orchestrator.forecast.layers import layers_in
from orchestrator.forecast.links import read_network
from orchestrator.forecast.outlook import prediction_of, with_best_way
from orchestrator.forecast.step import HostSpeed, alone_samples_per_s
from orchestrator.forecast.what_if import faster_ways, without_slow
from orchestrator.hosts.election import Candidate
from orchestrator.paths import RUNS
from orchestrator.planning.build import Draft, build_plan
from orchestrator.planning.launch_plan import Faster, LaunchPlan
from orchestrator.planning.placement import Worth
from orchestrator.planning.profiles import Profiles
from orchestrator.planning.request import RunRequest
from trainer.shared.shares import parse_speeds


def predicted_plan(draft: Draft, profiles: Profiles, measured: Sequence[Path]) -> tuple[LaunchPlan, Faster | None]:
    """Resolves strategy=auto, stages and local steps, and predicts the plan if speeds and links are known. Also returns
    a faster plan on fewer hosts, if any. measured: more run folders of collectives. Raises UsageError if strategy=auto
    lacks known speeds or links.
    """
    request, settings, plan = draft.request, draft.training, build_plan(draft)
    if (request.kind != "experiment" and not settings) or (settings and settings.profile_s):
        return plan, None
    try:
        may_cut = request.best_way or bool(settings and settings.strategy == "pipeline")
        view = inputs_of(plan, profiles, read_network(RUNS, plan, measured), may_cut=may_cut)
    except UsageError as error:
        if request.best_way:
            raise
        return build_plan(with_rounds(draft, error)), None
    if settings and request.best_way:
        draft = with_best_way(draft, settings, view)
    plan = build_plan(with_rounds(with_stages(draft, view), view))
    notes = (*plan.notes, *stage_notes(plan.training, view), *slice_notes(plan, view), *memory_notes(plan, view))
    outlook = {"prediction": prediction_of(plan, view), "faster": faster_ways(plan, view, request.chosen)}
    return plan.model_copy(update={**outlook, "notes": notes}), without_slow(plan, view)


def left_out_words(plan: LaunchPlan, better: Faster, request: RunRequest) -> str:
    out = ", ".join(node.name for node in plan.nodes if node.name not in better.hosts)
    why = "strategy=auto" if request.best_way else "shares=measured"
    every = ",".join(node.name for node in plan.nodes)
    return f"{why} leaves out {out}: {better.words}; --nodes {every} keeps them"


# Value of hosts for a job that takes only some: by speed, else by GPU memory. Pure.
#
#     by_speed(plan, profiles)         Worth({"v100": 763.0, "a2000": 288.0}, "the fastest by profile")

SOURCES = {
    "profile": "profile",
    "pace": "the inventory's pace",
    "by hand": "the setting `speeds`",
    "catalogue": "the hardware catalogue",
}
"""`inputs.speeds_of` in words."""


def by_speed(plan: LaunchPlan, profiles: Profiles) -> Worth | None:
    """samples/s with the whole batch; None if a speed is unknown. plan: with all hosts."""
    settings = plan.training
    if settings is None:
        return None
    by_hand = parse_speeds(settings.speeds)
    try:
        layers = layers_in(blocks_in(plan, settings, profiles))
        known = {node.name: speeds_of(node, settings, by_hand, profiles, layers) for node in plan.nodes}
    except UsageError:
        return None
    if any(speed.cap == 0 for speeds, _ in known.values() for speed in speeds):  # a host with too little memory
        return None
    figures = {name: alone_samples_per_s(HostSpeed(name, own), settings.batch) for name, (own, _) in known.items()}
    sources = sorted({SOURCES[source] for _, source in known.values()})
    return Worth(figures, f"the fastest alone by {' and '.join(sources)}")


def by_memory(candidates: Sequence[Candidate]) -> Worth:
    """All GPUs of a host; without GPUs the inventory's order."""
    figures = {host.name: float(host.gpu_memory_bytes * host.gpus) for host in candidates}
    return Worth(figures, "those with the most GPU memory" if any(figures.values()) else "the first in order")
