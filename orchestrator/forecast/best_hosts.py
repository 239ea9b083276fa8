"""Which hosts are worth the most to a job that takes some of them: by speed, else by the memory of their GPUs. Pure.

by_speed(plan, profiles)         Worth({"v100": 763.0, "a2000": 288.0}, "the fastest by profile")
by_memory(candidates)            the same, where not every host's speed is known
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.errors import UsageError
from orchestrator.forecast.inputs import blocks_in, speeds_of
from orchestrator.forecast.layers import layers_in
from orchestrator.forecast.step import HostSpeed, alone_samples_per_s
from orchestrator.hosts.election import Candidate
from orchestrator.planning.host_choice import Worth
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.planning.profiles import Profiles
from trainer.shared.shares import parse_speeds

SOURCES = {
    "profile": "profile",
    "pace": "the inventory's pace",
    "by hand": "the setting `speeds`",
    "catalogue": "the hardware catalogue",
}
"""Where speeds come from, as `inputs.speeds_of` calls it, in words for people."""


def by_speed(plan: LaunchPlan, profiles: Profiles) -> Worth | None:
    """What each host does by itself with the whole batch; None where a speed is not known. plan: with all hosts."""
    settings = plan.training
    if settings is None:
        return None
    by_hand = parse_speeds(settings.speeds)
    try:
        layers = layers_in(blocks_in(plan, settings, profiles))
        known = {node.name: speeds_of(node, settings, by_hand, profiles, layers) for node in plan.nodes}
    except UsageError:
        return None
    if any(speed.cap == 0 for speeds, _ in known.values() for speed in speeds):  # a host that no sample fits into
        return None
    figures = {name: alone_samples_per_s(HostSpeed(name, own), settings.batch) for name, (own, _) in known.items()}
    sources = sorted({SOURCES[source] for _, source in known.values()})
    return Worth(figures, f"the fastest alone by {' and '.join(sources)}")


def by_memory(candidates: Sequence[Candidate]) -> Worth:
    """The memory of all GPUs of a host; the order of the inventory where there is none."""
    figures = {one.name: float(one.gpu_memory_bytes * one.gpus) for one in candidates}
    return Worth(figures, "those with the most GPU memory" if any(figures.values()) else "the first in order")
