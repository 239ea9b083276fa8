"""Faster ways to run a planned job, each with its `orch run` line. Pure.

    faster_ways(plan, view, chosen)         fewer hosts, other shares, another strategy
    without_slow(plan, view)                the same settings on fewer hosts

None loses more than the job's own fidelity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.forecast.advice import Policy, Scene, fewer, preference, splits, ways
from orchestrator.forecast.cut import pipeline_for
from orchestrator.forecast.inputs import ForecastInputs, allowed, forecast_in, kept, parts_needed, way_of
from orchestrator.forecast.outlook import prediction_of, runnable
from orchestrator.forecast.step import Way
from orchestrator.planning.job_forms import run_line
from orchestrator.planning.launch_plan import Faster, LaunchPlan
from orchestrator.results.single_host import WORTH, may_leave, settings_on
from trainer.shared.config import OF_PIPELINE, fields_of
from trainer.shared.experiments import OWN
from trainer.shared.setting_fields import SettingsError
from trainer.shared.settings import Settings
from trainer.shared.shares import BY_SPEED

MOST_CUTS = 4
"""With more hosts, a network is cut over all or not at all."""
FEW_NAMES = 8
"""More hosts are counted, not named."""


@dataclass(frozen=True)
class _Option:
    hosts: tuple[str, ...]
    samples_per_s: float
    settings: Settings
    """Complete settings for this prediction."""


def faster_ways(plan: LaunchPlan, view: ForecastInputs, chosen: Collection[str]) -> tuple[Faster, ...]:
    """The fastest way and, if different, the fastest host alone; () if neither is WORTH it.

    chosen: the user's settings; their bucket size or local steps stay.
    """
    now, settings = prediction_of(plan, view), plan.training
    if now is None or settings is None:
        return ()
    candidates = list(_candidates(settings, chosen))
    scenes = (view.scene, *_fewer(plan, view))
    options = [_best(settings, view, scene, candidates) for scene in scenes if scene.holds_whole]
    options += [_cut(settings, view, scene, chosen) for scene in scenes]
    speeds = sorted((option for option in options if option), key=lambda each: -_preference(each))
    ones = [option for option in speeds if len(option.hosts) == 1 < len(plan.nodes)]
    best, alone = speeds[:1], ones[:1]
    if alone and best[0].samples_per_s < WORTH * alone[0].samples_per_s:
        best = []  # fewer hosts are simpler
    worth = [option for option in (*best, *alone) if _preference(option) > WORTH * now.samples_per_s]
    return tuple(_faster(plan, settings, view, option, now.samples_per_s) for option in worth)


def without_slow(plan: LaunchPlan, view: ForecastInputs) -> Faster | None:
    """The plan's strategy on fewer hosts. None if not faster; lossy fidelities need more than one rank."""
    now, settings = prediction_of(plan, view), plan.training
    if now is None or settings is None:
        return None
    best = _on_fewer(plan, settings, view)
    worth = 1.0 if settings.strategy == "pipeline" else WORTH  # a pipeline's stages train nothing by themselves
    if best is None or best.samples_per_s <= worth * now.samples_per_s:
        return None
    return _faster(plan, settings, view, best, now.samples_per_s)


def _on_fewer(plan: LaunchPlan, settings: Settings, view: ForecastInputs) -> _Option | None:
    if settings.strategy == "pipeline":
        cuts = (
            _cut(settings, view, scene, OF_PIPELINE) if scene.wire.ranks > 1 else _best(settings, view, scene, ())
            for scene in _fewer(plan, view)
            if scene.wire.ranks > 1 or scene.holds_whole
        )
        return max((cut for cut in cuts if cut), key=lambda each: each.samples_per_s, default=None)
    way = way_of(settings)
    if way is None:
        return None
    policy: Policy = "equal" if settings.shares == "equal" else "measured"
    options = (
        _option(settings, view, scene, way, {}, policy)
        for scene in _fewer(plan, view)
        if scene.wire.ranks > 1 or way.fidelity == "exact"
    )
    return max((option for option in options if option), key=lambda each: each.samples_per_s, default=None)


# ---- what there is to choose from -----------------------------------------------------------------------------------


def _candidates(settings: Settings, chosen: Collection[str]) -> Iterator[tuple[Way, Mapping[str, Any]]]:
    """With their settings."""
    for way in ways(allowed(settings), kept(settings, chosen)):
        if pairs := runnable(settings, way, ()):
            yield way, pairs


def _fewer(plan: LaunchPlan, view: ForecastInputs) -> Iterator[Scene]:
    return (scene for scene in fewer(view.scene) if may_leave(plan, [host.name for host in scene.hosts]))


def _best(
    settings: Settings, view: ForecastInputs, scene: Scene, candidates: Sequence[tuple[Way, Mapping[str, Any]]]
) -> _Option | None:
    if scene.wire.ranks == 1:
        return _option(settings, view, scene, Way("ddp"), {}, "equal")
    options = (
        _option(settings, view, scene, way, pairs, policy)
        for way, pairs in candidates
        for policy in splits(scene, way.local_batch)
    )
    return max((option for option in options if option), key=_preference, default=None)


def _preference(option: _Option) -> float:
    return preference(option.settings.strategy, option.samples_per_s, is_own=option.settings.model == OWN)


def _option(
    settings: Settings, view: ForecastInputs, scene: Scene, way: Way, pairs: Mapping[str, Any], policy: Policy
) -> _Option | None:
    """settings: the plan's. pairs: the way's. None if the trainer would refuse them."""
    shares = scene.shares(policy, way.local_batch)
    forecast = forecast_in(scene, way, shares, settings.accumulate)
    changes: dict[str, Any] = {}
    if scene.wire.ranks > 1:
        changes = {**pairs, "shares": _shares_setting(settings.shares, view, scene, policy, shares)}
    try:
        here = settings_on(settings, scene.wire.ranks, all_hosts=len(scene.hosts) == len(view.scene.hosts))
        here = replace(here, **changes)
        parts = parts_needed(scene, shares, view.speeds_from, here)
        if parts > 1 and not here.local_batch:
            here = replace(here, accumulate=parts)
    except SettingsError:
        return None
    return _Option(tuple(host.name for host in scene.hosts), forecast.samples_per_s, here)


def _cut(settings: Settings, view: ForecastInputs, scene: Scene, chosen: Collection[str]) -> _Option | None:
    """As a pipeline cut for these hosts."""
    if scene is not view.scene and len(view.scene.hosts) > MOST_CUTS:
        return None
    try:
        here = settings_on(settings, scene.wire.ranks, all_hosts=scene is view.scene)
        found = pipeline_for(scene, here, chosen)
        if found is None:
            return None
        changes = {name: value for name, value in found.settings.items() if name not in chosen}
        return _Option(tuple(host.name for host in scene.hosts), found.samples_per_s, replace(here, **changes))
    except SettingsError:
        return None


def _shares_setting(asked: str, view: ForecastInputs, scene: Scene, policy: Policy, shares: Sequence[int]) -> str:
    """The setting `shares` for this split. Runs split by speed only if ranks receive their speeds. asked: the
    plan's.
    """
    if policy == "equal":
        return "equal"
    if all(view.speeds_from[host.name] in ("profile", "by hand") for host in scene.hosts):
        return asked if asked in BY_SPEED else "measured"
    left = iter(shares)
    named = [
        (f"{host.name}:{i}" if len(host.speeds) > 1 else host.name, next(left))
        for host in scene.hosts
        for i in range(len(host.speeds))
    ]
    return ",".join(f"{name}={share}" for name, share in named)


# ---- in words -------------------------------------------------------------------------------------------------------


def _faster(
    plan: LaunchPlan, settings: Settings, view: ForecastInputs, option: _Option, now_samples_per_s: float
) -> Faster:
    """settings: the plan's."""
    return Faster(
        hosts=option.hosts,
        what=_what(plan, settings, option),
        samples_per_s=option.samples_per_s,
        of_time=now_samples_per_s / option.samples_per_s,
        basis="estimated" if view.is_estimate else "predicted",
        command=run_line(plan, option.hosts, option.settings),
    )


def _what(plan: LaunchPlan, now: Settings, option: _Option) -> str:
    out = [node.name for node in plan.nodes if node.name not in option.hosts]
    if not out:
        pairs = ((name, getattr(option.settings, name)) for name in fields_of(now.exp))
        words = {name: f"{name}={value}" for name, value in pairs if value != getattr(now, name)}
        if "shares" in words:
            words["shares"] = "equal shares" if option.settings.shares == "equal" else "shares by speed"
        return ", ".join(words.values())
    if len(option.hosts) == 1:
        return f"{option.hosts[0]} alone"
    if len(out) <= FEW_NAMES:
        return f"the cluster without {', '.join(out)}"
    return f"{len(option.hosts)} of the {len(plan.nodes)} hosts"
