"""Predicts a planned job, completes its plan, and finds faster ways to run it, each with its `orch run` line.

    faster_ways(plan, view, chosen)         fewer hosts, other shares, another strategy
    without_slow(plan, view)                the same settings on fewer hosts

None loses more than the job's own fidelity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.forecast.advice import Policy, Scene, fewer, preference, splits, ways
from orchestrator.forecast.cut import (
    BASIS,
    mean_words,
    pipeline_for,
    prediction_of_pipeline,
    settled,
    slice_notes,
    stage_notes,
    with_stages,
)
from orchestrator.forecast.inputs import (
    ForecastInputs,
    allowed,
    blocks_in,
    forecast_in,
    inputs_of,
    kept,
    memory_notes,
    parts_needed,
    speeds_of,
    way_of,
    with_rounds,
)
from orchestrator.forecast.layers import layers_in
from orchestrator.forecast.links import read_network
from orchestrator.forecast.step import HostSpeed, Way, alone_samples_per_s
from orchestrator.hosts.election import Candidate
from orchestrator.paths import RUNS
from orchestrator.planning.build import Draft, build_plan
from orchestrator.planning.job_forms import run_line
from orchestrator.planning.launch_plan import Faster, LaunchPlan, Prediction
from orchestrator.planning.placement import Worth
from orchestrator.planning.profiles import Profiles
from orchestrator.planning.request import RunRequest
from orchestrator.results.single_host import WORTH, may_leave, settings_on
from orchestrator.units import format_figure
from trainer.shared.config import OF_PIPELINE, fields_of
from trainer.shared.experiments import OWN
from trainer.shared.setting_fields import SettingsError
from trainer.shared.settings import Settings
from trainer.shared.shares import BY_SPEED, parse_speeds

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
        cut = {"smaller_first": 0.0, **found.settings}  # without the plan's own
        changes = {name: value for name, value in cut.items() if name not in chosen}
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


# Predicts the speed of a plan as it stands; for `strategy=auto`, chooses its strategy first. Pure.


def prediction_of(plan: LaunchPlan, view: ForecastInputs) -> Prediction | None:
    """With the plan's shares and micro-batches. None if its strategy is not predicted."""
    settings = plan.training
    if settings and settings.strategy == "pipeline":
        return prediction_of_pipeline(settings, view)
    way = way_of(settings) if settings else None
    if settings is None or way is None:
        return None
    forecast = forecast_in(view.scene, way, plan.shares, settings.accumulate)
    return Prediction(
        step_ms=forecast.step_ms,
        samples_per_s=forecast.samples_per_s,
        binds=forecast.limited_by,
        is_estimate=view.is_estimate,
        basis=(*view.basis, *_way_words(way)),
    )


def _way_words(way: Way) -> Iterator[str]:
    yield from mean_words(way.exact_part, way.fidelity)
    if way.sync_bn:
        yield "sync_bn: ranks meet in every BatchNorm, forward and backward, so that no sum of gradients is hidden"
    if way.strategy == "tensor":
        yield BASIS


def with_best_way(draft: Draft, settings: Settings, view: ForecastInputs) -> Draft:
    """The fastest strategy that its fidelity and the trainer allow, with a note. settings: the draft's; the user's
    choices stay. Raises UsageError if none fits.
    """
    fidelity, chosen = allowed(settings), draft.request.chosen
    tried = ways(fidelity, kept(settings, chosen))
    forecasts = [
        (forecast_in(view.scene, way, draft.shares, settings.accumulate), changes)
        for way in (tried if view.scene.holds_whole else ())
        if (changes := runnable(settings, way, chosen))
    ]
    cut = pipeline_for(view.scene, settings, chosen)
    speeds = (preference(each.way.strategy, each.samples_per_s) for each, _ in forecasts)
    is_own = settings.model == OWN
    if cut and preference("pipeline", cut.samples_per_s, is_own=is_own) > max(speeds, default=0.0):
        return settled(draft, cut, f"strategy=auto ({fidelity})")
    if not forecasts:
        raise UsageError(f"strategy=auto: no strategy fits fidelity {fidelity} and these settings", "name one")
    forecast, changes = max(forecasts, key=lambda each: preference(each[0].way.strategy, each[0].samples_per_s))
    words = ", ".join(f"{key}={value}" for key, value in changes.items())
    predicted = f"predicted at {format_figure(forecast.samples_per_s)} samples/s"
    return draft.settled(changes, f"strategy=auto: {words} ({fidelity}), {predicted}")


def runnable(settings: Settings, way: Way, chosen: Collection[str]) -> dict[str, Any] | None:
    """Settings for this way, without chosen ones. None if the trainer would refuse them."""
    if way.half_wire and way.fidelity == "local" and settings.wire not in ("bf16", "fp16"):
        return None  # the user chose otherwise
    changes: dict[str, Any] = {"strategy": way.strategy}
    changes |= {"bucket_mib": way.bucket_mib} if way.strategy == "ddp" else {}
    try:
        dataclasses.replace(settings, **changes)
    except SettingsError:
        return None
    return {name: value for name, value in changes.items() if name not in chosen}


# Completes a plan: settings left open, prediction, notes, faster ways; rates hosts for `--hosts`.


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
