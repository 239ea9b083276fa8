"""Ways to run a job that take less time than the one at hand, each with the `orch run` line that takes it. Pure.

    predicted(plan, view, chosen)           before it runs: fewer hosts, other shares, another strategy
    without_slow(plan, view)                the same settings on fewer hosts, where that is the fastest
    measured(plan, nodes, samples_per_s)    after it ran: its fastest host alone, by profile or by its compute time

Nothing here loses more than the job's own fidelity does; a rank by itself exchanges nothing, so it is exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.advice import Policy, Scene, fewer, splits, ways
from orchestrator.command_line import run_line
from orchestrator.forecast import Forecast, Way
from orchestrator.outlook import (
    View,
    allowed,
    forecast_in,
    foreseen,
    kept,
    parts_needed,
    runnable,
    way_of,
)
from orchestrator.records import Faster, LaunchPlan
from orchestrator.summary import NodeSummary
from trainer.config import OF_FIDELITY, parse_settings
from trainer.shares import BY_SPEED

WORTH = 1.05
"""What is less than 5 % faster is not worth a word: by so much predictions and measurements may be off."""
FEW_NAMES = 8
"""More hosts than this are counted, not named."""
OF_ONE_RANK = ("fidelity", "wire", "strategy", "bucket_mib", "shares", "slow", *sum(OF_FIDELITY.values(), ()))
"""Settings that say how ranks stay together: one rank takes the experiment's own."""


@dataclass(frozen=True)
class _Option:
    """settings: all of them, with which these hosts do what is predicted."""

    hosts: tuple[str, ...]
    forecast: Forecast
    settings: Mapping[str, Any]


def predicted(plan: LaunchPlan, view: View, chosen: Collection[str]) -> tuple[Faster, ...]:
    """The fastest way of all and, where it is another, the fastest host alone; none where both are not WORTH it.

    chosen: settings that the person made; how large a bucket is, or how many local steps there are, stays if so.
    """
    now = foreseen(plan, view)
    if now is None:
        return ()
    candidates = list(_candidates(plan, chosen))
    options = [_best(plan, view, scene, candidates) for scene in (view.scene, *_fewer(plan, view))]
    speeds = sorted((option for option in options if option), key=lambda each: -each.forecast.samples_per_s)
    ones = [option for option in speeds if len(option.hosts) == 1 < len(plan.nodes)]
    best, alone = speeds[:1], ones[:1]
    if alone and best[0].forecast.samples_per_s < WORTH * alone[0].forecast.samples_per_s:
        best = []  # fewer hosts are simpler
    worth = [option for option in (*best, *alone) if option.forecast.samples_per_s > WORTH * now.samples_per_s]
    return tuple(_told(plan, view, option, now.samples_per_s) for option in worth)


def without_slow(plan: LaunchPlan, view: View) -> Faster | None:
    """The same strategy on fewer hosts, with equal shares or those by speed, whichever the plan has. None where none
    of these is faster, or one rank alone would lose by its fidelity what only an exchange needs.
    """
    now, way = foreseen(plan, view), way_of(plan.settings)
    policy: Policy = "equal" if plan.settings["shares"] == "equal" else "measured"
    if now is None or way is None:
        return None
    options = [
        _option(plan, view, scene, way, {}, policy)
        for scene in _fewer(plan, view)
        if scene.wire.ranks > 1 or way.fidelity == "exact"
    ]
    best = max(options, key=lambda each: each.forecast.samples_per_s, default=None)
    if best is None or best.forecast.samples_per_s <= WORTH * now.samples_per_s:
        return None
    return _told(plan, view, best, now.samples_per_s)


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
    if speeds[name] <= WORTH * samples_per_s or not _may_leave(plan, (name,)):
        return others
    is_profiled = next(node for node in nodes if node.name == name).solo_samples_per_s is not None
    alone = Faster(
        hosts=(name,),
        what=f"{name} alone",
        samples_per_s=speeds[name],
        of_time=samples_per_s / speeds[name],
        basis="profiled" if is_profiled else "computed",
        command=run_line(plan, [name], _settings(plan, plan.node(name).ranks, all_hosts=False)),
    )
    return (*(one for one in others if one.of_time * WORTH < alone.of_time), alone)


# ---- what there is to choose from -----------------------------------------------------------------------------------


def _candidates(plan: LaunchPlan, chosen: Collection[str]) -> Iterator[tuple[Way, Mapping[str, Any]]]:
    """With the settings that each of them takes."""
    for way in ways(allowed(plan.settings), **kept(plan.settings, chosen)):
        if pairs := runnable(plan, way, frozenset()):
            yield way, pairs


def _fewer(plan: LaunchPlan, view: View) -> Iterator[Scene]:
    return (scene for scene in fewer(view.scene) if _may_leave(plan, [host.name for host in scene.hosts]))


def _may_leave(plan: LaunchPlan, hosts: Collection[str]) -> bool:
    """A checkpoint to go on from lies on the master alone."""
    return not plan.settings.get("resume") or plan.master in hosts


def _best(
    plan: LaunchPlan, view: View, scene: Scene, candidates: Sequence[tuple[Way, Mapping[str, Any]]]
) -> _Option | None:
    if scene.wire.ranks == 1:
        return _option(plan, view, scene, Way("ddp"), {}, "equal")
    options = (
        _option(plan, view, scene, way, pairs, policy)
        for way, pairs in candidates
        for policy in splits(scene, way.local_batch)
    )
    return max(options, key=lambda each: each.forecast.samples_per_s, default=None)


def _option(plan: LaunchPlan, view: View, scene: Scene, way: Way, pairs: Mapping[str, Any], policy: Policy) -> _Option:
    shares = scene.shares(policy, way.local_batch)
    forecast = forecast_in(scene, way, shares, int(plan.settings.get("accumulate", 0)))
    names = tuple(host.name for host in scene.hosts)
    settings = _settings(plan, scene.wire.ranks, all_hosts=len(names) == len(plan.nodes))
    if scene.wire.ranks > 1:
        settings |= {**pairs, "shares": _shares_setting(plan, view, scene, policy, shares)}
    parts = parts_needed(scene, shares, view.speeds_from, settings)
    if parts > 1 and not settings.get("local_batch"):
        settings["accumulate"] = parts
    return _Option(names, forecast, settings)


def _settings(plan: LaunchPlan, ranks: int, *, all_hosts: bool) -> dict[str, Any]:
    """The plan's, less what speaks of ranks that are not there."""
    if plan.kind != "experiment":
        return dict(plan.settings)
    own = dataclasses.asdict(parse_settings(plan.exp, {}))
    dropped = OF_ONE_RANK if ranks == 1 else () if all_hosts else ("slow", "shares")
    return {**plan.settings, **{name: own[name] for name in dropped if name in plan.settings}}


def _shares_setting(plan: LaunchPlan, view: View, scene: Scene, policy: Policy, shares: Sequence[int]) -> str:
    """With which a run splits its batch like this. By speed it does so only where ranks are told their speeds."""
    if policy == "equal":
        return "equal"
    if all(view.speeds_from[host.name] in ("profile", "by hand") for host in scene.hosts):
        return str(plan.settings["shares"]) if plan.settings["shares"] in BY_SPEED else "measured"
    left = iter(shares)
    named = [
        (f"{host.name}:{i}" if len(host.speeds) > 1 else host.name, next(left))
        for host in scene.hosts
        for i in range(len(host.speeds))
    ]
    return ",".join(f"{name}={share}" for name, share in named)


# ---- in words -------------------------------------------------------------------------------------------------------


def _told(plan: LaunchPlan, view: View, option: _Option, now_samples_per_s: float) -> Faster:
    return Faster(
        hosts=option.hosts,
        what=_what(plan, option),
        samples_per_s=option.forecast.samples_per_s,
        of_time=now_samples_per_s / option.forecast.samples_per_s,
        basis="estimated" if view.is_estimate else "predicted",
        command=run_line(plan, option.hosts, option.settings),
    )


def _what(plan: LaunchPlan, option: _Option) -> str:
    out = [node.name for node in plan.nodes if node.name not in option.hosts]
    if not out:
        changed = {key: value for key, value in option.settings.items() if value != plan.settings.get(key)}
        words = {key: f"{key}={value}" for key, value in changed.items()}
        if "shares" in words:
            words["shares"] = "equal shares" if changed["shares"] == "equal" else "shares by speed"
        return ", ".join(words.values())
    if len(option.hosts) == 1:
        return f"{option.hosts[0]} alone"
    if len(out) <= FEW_NAMES:
        return f"the cluster without {', '.join(out)}"
    return f"{len(option.hosts)} of the {len(plan.nodes)} hosts"
