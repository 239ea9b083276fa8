"""Rows and sentences of `orch plan`; `documents` has its JSON. Pure.

found = outlook_of(plan, view, chosen=frozenset())
rows(found)            the best strategy of each fidelity
changes(found)         hosts to leave out, the effect of a faster link, ...
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from orchestrator.forecast.advice import GAIN, Advice, Choice, Scene, WhatIf, advise, changed
from orchestrator.forecast.cut import pipeline_for
from orchestrator.forecast.gpu_catalogue import HOST_DAYS, RESTART_S, FailureCosts, error_words, estimate, failures
from orchestrator.forecast.imagined import HostGroup, imagine
from orchestrator.forecast.inputs import ForecastInputs, allowed, by_catalogue, kept, memory_words
from orchestrator.forecast.layers import gradient_bytes, layers_in, network_of
from orchestrator.forecast.links import GOODPUT
from orchestrator.forecast.pipeline.choice import PipelineChoice
from orchestrator.forecast.step import PREDICTED, HostSpeed
from orchestrator.forecast.what_if import MOST_CUTS, faster_ways
from orchestrator.hosts.cards import Card
from orchestrator.planning.job_forms import run_line
from orchestrator.planning.launch_plan import LIMITS, Faster, LaunchPlan
from orchestrator.planning.profiles import GPU_SETTINGS
from orchestrator.units import counted, format_bandwidth, format_duration
from orchestrator.views.console import figure, percent
from trainer.shared.setting_fields import SettingsError, declared
from trainer.shared.settings import Settings
from trainer.shared.shares import WORDS
from trainer.shared.strategy_table import FIDELITY_NAMES, Fidelity

TITLES = ("fidelity", "strategy", "shares", "step", "samples/s", "of sum", "network", "limited by")
FEW_NAMES = 8
"""Larger numbers of hosts are not listed by name."""
UNSEEN: dict[str, tuple[object, ...]] = {
    "strategy": (*PREDICTED, "pipeline", "tensor", "auto"),
    "shares": WORDS,
    **{each.name: known for each in fields(Settings) if (known := declared(each).predicted)},
}
"""Settings that affect speed but not the prediction, with the values for which the prediction holds."""
UNSEEN_OF_CATALOGUE: dict[str, tuple[object, ...]] = dict.fromkeys(GPU_SETTINGS, ("auto",))
"""For estimated speeds; a profile includes its own GPU settings."""
UNSEEN_OF_IMAGINED: dict[str, tuple[object, ...]] = {
    "device": ("auto", "cuda"),
    "backend": ("auto", "nccl"),
    "speeds": ("",),
}


@dataclass(frozen=True)
class InHalf:
    """Samples/s with `amp=fp16`: of the fastest allowed way, of the fastest host alone."""

    samples_per_s: float
    way: str
    host: str
    alone_samples_per_s: float


@dataclass(frozen=True)
class Outlook:
    """Predictions for one workload on one cluster."""

    cluster: str
    """In words."""
    exp: str
    scene: Scene
    advice: Advice
    basis: tuple[str, ...]
    speeds_from: Mapping[str, str]
    failures: FailureCosts | None = None
    """Only for imagined hosts."""
    pipelines: Mapping[str, PipelineChoice] = field(default_factory=dict)
    """The fastest of each fidelity, if the other settings allow any."""
    pipeline_then: Mapping[str, PipelineChoice] = field(default_factory=dict)
    """By change of the advice, if `pipeline` is the fastest now."""
    in_half: InHalf | None = None
    """If the speeds are the catalogue's, in 32 bits."""
    faster: tuple[Faster, ...] = ()
    """Than the current settings."""
    command: str = ""
    """The `orch run` line of the fastest allowed way; "" for imagined hosts."""

    @property
    def pipeline(self) -> PipelineChoice | None:
        """The allowed fidelity's."""
        return self.pipelines.get(self.advice.fidelity)

    @property
    def samples_per_s(self) -> float:
        """The fastest allowed way's."""
        own = self.advice.best.get(self.advice.fidelity)
        allowed_ways = [each.samples_per_s for each in (own, self.pipeline) if each]
        return max(allowed_ways, default=self.advice.now.samples_per_s)


def outlook_of(plan: LaunchPlan, view: ForecastInputs, chosen: Collection[str]) -> Outlook:
    """chosen: settings made by the user; their bucket size or local steps stay."""
    unseen = {**UNSEEN, **(UNSEEN_OF_CATALOGUE if view.is_estimate else {})}
    assert plan.training  # noqa: S101 - for the type checker: a view always has training
    advice, limits = _advised(view.scene, plan.training, chosen, view.speeds_from, unseen)
    faster = faster_ways(plan, view, chosen)
    return Outlook(
        cluster=plan.cluster,
        exp=plan.exp,
        scene=view.scene,
        advice=advice,
        basis=(*view.basis, *(f"sets {setting.words}" for setting in plan.nccl), *limits),
        speeds_from=view.speeds_from,
        **_pipelines(view.scene, plan.training, chosen, advice),
        in_half=_in_half(plan.training, chosen, partial(by_catalogue, plan, view)),
        faster=faster,
        command=faster[0].command if faster else run_line(plan),
    )


def imagined_outlook(
    groups: Sequence[HostGroup], settings: Settings, bandwidth_bps: float, chosen: Collection[str]
) -> Outlook:
    layers = layers_in(network_of(settings))
    scene = imagine(groups, layers, bandwidth_bps, settings)
    unseen = {**UNSEEN, **UNSEEN_OF_CATALOGUE, **UNSEEN_OF_IMAGINED}
    advice, limits = _advised(scene, settings, chosen, {}, unseen)
    gpus = {group.gpu.name: group.gpu for group in groups}.values()
    return Outlook(
        cluster=", ".join(group.words for group in groups),
        exp=settings.exp,
        scene=scene,
        advice=advice,
        basis=(
            f"speeds: estimates from the hardware catalogue "
            f"({error_words([estimate(gpu, layers, settings.amp) for gpu in gpus])})",
            *(_card_words(gpu, settings.amp) for gpu in gpus),
            f"links: {format_bandwidth(bandwidth_bps)} for every host, as given, times {GOODPUT} of payload",
            f"{scene.wire.costs.name}: {scene.wire.costs.source}",
            f"failures: one a host every {HOST_DAYS:.0f} days and {RESTART_S:.0f} s to start again, both assumed",
            *limits,
        ),
        speeds_from={group.gpu.name: "catalogue" for group in groups},
        **_pipelines(scene, settings, chosen, advice),
        in_half=_in_half(settings, chosen, lambda half: imagine(groups, layers, bandwidth_bps, half)),
        failures=failures(len(scene.hosts), 2 * gradient_bytes(layers)),
    )


def _advised(
    scene: Scene,
    settings: Settings,
    chosen: Collection[str],
    speeds_from: Mapping[str, str],
    unseen: Mapping[str, tuple[object, ...]],
) -> tuple[Advice, list[str]]:
    """The advice and its limits: unmeasured memory, unpredicted settings."""
    advice = advise(scene, allowed(settings), kept(settings, chosen))
    shares = advice.now.forecast.shares
    return advice, [*memory_words(scene, shares, speeds_from, settings), *_unseen_words(settings, chosen, unseen)]


def _pipelines(scene: Scene, settings: Settings, chosen: Collection[str], advice: Advice) -> dict[str, Any]:
    """Fields of an Outlook."""
    pipelines = {
        fidelity: cut
        for fidelity in FIDELITY_NAMES
        if fidelity == advice.fidelity or len(scene.hosts) <= MOST_CUTS
        if (cut := pipeline_for(scene, settings, chosen, fidelity))
    }
    found, then = pipelines.get(advice.fidelity), dict[str, PipelineChoice]()
    if found and len(scene.hosts) <= MOST_CUTS and found.samples_per_s > advice.now.samples_per_s:
        for words, changed_scene in changed(scene):
            settings_then = replace(settings, stages="", batch=changed_scene.job.batch)
            if cut := pipeline_for(changed_scene, settings_then, chosen):
                then[words] = cut
    return {"pipelines": pipelines, "pipeline_then": then}


def _in_half(
    settings: Settings, chosen: Collection[str], scene_of: Callable[[Settings], Scene | None]
) -> InHalf | None:
    """None if the job rounds already or uses no GPU. scene_of: the hosts with these settings, if they are known."""
    if settings.amp != "none" or settings.device == "cpu":
        return None
    try:
        half = replace(settings, amp="fp16")
    except SettingsError:  # other settings refuse it
        return None
    scene = scene_of(half)
    if scene is None:
        return None
    advice = advise(scene, allowed(half), kept(half, chosen))
    best, cut = advice.now, pipeline_for(scene, half, chosen)
    way, fastest = way_words(best), best.samples_per_s
    if cut and cut.samples_per_s > fastest:
        way, fastest = "pipeline", cut.samples_per_s
    host = max(advice.alone, key=lambda name: advice.alone[name])
    kind = next(each.kind for each in scene.hosts if each.name == host)
    return InHalf(fastest, way, kind or host, advice.alone[host])


def _card_words(gpu: Card, amp: str) -> str:
    rate = gpu.rate(amp)
    seen = f"{gpu.gb_per_s:.0f} GB/s, {gpu.memory_gib:.0f} GiB ({_trust(gpu.unsure)})"
    return f"{gpu.name}: {seen}; {figure(rate.images_per_s)} images/s of ResNet-50 ({rate.source})"


def _trust(unsure: Collection[str]) -> str:
    return "not verified" if "memory_gib" in unsure else "bandwidth not verified" if "gb_per_s" in unsure else "read"


def _unseen_words(
    settings: Settings, chosen: Collection[str], unseen: Mapping[str, tuple[object, ...]]
) -> Iterator[str]:
    values = {name: getattr(settings, name) for name in unseen if name in chosen}
    words = [f"{name}={value}" for name, value in values.items() if value not in unseen[name]]
    if words:
        yield f"not included in the prediction: {', '.join(words)}"


# ---- for people -----------------------------------------------------------------------------------------------------


def headline(found: Outlook) -> tuple[str, ...]:
    job, wire = found.scene.job, found.scene.wire
    sent = f"{figure(gradient_bytes(job.layers) / 1e6)} MB of gradient in {len(job.shapes)} tensors"
    return (
        f"{found.exp} on {found.cluster}: {counted(len(wire.sites), 'host')}, {counted(wire.ranks, 'rank')}",
        f"batch {job.batch}, {sent}; all of this is predicted, not measured",
    )


def rows(found: Outlook) -> list[tuple[str, ...]]:
    """Below TITLES. The allowed fidelity is marked."""
    tensor = _tensor(found.advice)
    return [row for fidelity in FIDELITY_NAMES for row in _rows_of(found, fidelity, tensor)]


def _rows_of(found: Outlook, fidelity: Fidelity, tensor: Choice | None) -> Iterator[tuple[str, ...]]:
    if best := found.advice.best.get(fidelity):
        yield _row(found, best)
    if cut := found.pipelines.get(fidelity):
        yield _pipeline_row(found, fidelity, cut)
    if tensor and fidelity == found.advice.fidelity:
        yield _row(found, tensor)


def _tensor(advice: Advice) -> Choice | None:
    """The best tensor way, unless it is the best overall."""
    ways = (choice for choice in advice.choices if choice.forecast.way.fidelity == advice.fidelity)
    tensor = next((choice for choice in ways if choice.forecast.way.strategy == "tensor"), None)
    return None if tensor == advice.now else tensor


def _pipeline_row(found: Outlook, fidelity: str, cut: PipelineChoice) -> tuple[str, ...]:
    return (
        _marked(found, fidelity),
        f"pipeline{_after_words(cut.exact_part)}",
        f"{cut.micro_batches} micro",
        f"{figure(1000 * cut.timed.seconds)} ms",
        figure(cut.samples_per_s),
        percent(cut.samples_per_s / found.advice.sum_of_parts),
        f"{figure(1000 * cut.timed.parts_s['link'])} ms",
        LIMITS["link"] if cut.limited_by == "link" else cut.limited_by,
    )


def _row(found: Outlook, choice: Choice) -> tuple[str, ...]:
    forecast, fidelity = choice.forecast, choice.forecast.way.fidelity
    critical = forecast.ranks[forecast.critical]
    of_step = {"wire": forecast.sync_ms, "compute": critical.compute_ms}[forecast.limited_by] / forecast.step_ms
    return (
        _marked(found, fidelity),
        way_words(choice),
        share_words(choice),
        f"{figure(forecast.step_ms)} ms",
        figure(choice.samples_per_s),
        percent(choice.samples_per_s / found.advice.sum_of_parts),
        f"{figure(forecast.sync_ms)} ms",
        f"{LIMITS[forecast.limited_by]}, {percent(of_step)}",
    )


def _marked(found: Outlook, fidelity: str) -> str:
    return f"{fidelity}{' *' if fidelity == found.advice.fidelity else ''}"


def way_words(choice: Choice) -> str:
    way = choice.forecast.way
    if len(choice.forecast.shares) == 1:
        return "one rank"
    words = way.strategy
    if way.strategy == "ddp":
        words += f", {way.bucket_mib:g} MiB buckets" if way.bucket_mib else ", fitted buckets"
    if way.fidelity == "compressed":
        words = f"PowerSGD {way.rank}"
    if way.fidelity == "local":
        words = f"every {way.every} steps{', 16 bits' if way.half_wire else ''}"
    return words + _after_words(way.exact_part)


def _after_words(exact_part: float) -> str:
    return f" after {100 * exact_part:.3g} %" if exact_part else ""


def share_words(choice: Choice) -> str:
    """`73+183`, or a word for many shares."""
    forecast = choice.forecast
    if len(forecast.shares) <= 4:
        return "+".join(map(str, forecast.shares))
    return "equal" if choice.policy == "equal" else "by speed"


def changes(found: Outlook) -> Iterator[str]:
    """Hosts better left out, and the effect of changes."""
    advice = found.advice
    now = found.samples_per_s
    whole = figure(advice.sum_of_parts)
    micro = "micro: micro-batches of an update; " if found.pipelines else ""
    yield f"* the fidelity that the settings allow; {micro}the hosts' combined standalone speed is {whole} samples/s"
    if found.pipeline and found.pipeline.samples_per_s == now and found.command:
        yield from found.pipeline.words
    without = [better for better in advice.without if better.choice.samples_per_s > GAIN * now]
    for better in without[:1]:
        yield f"better: {hosts_of_change(better, found)}, {_gain(better, now)}"
    if not without:
        yield "leaving a host out would not make it faster"
    for change in advice.what_if:
        cut = found.pipeline_then.get(change.change)
        by_cut = cut is not None and cut.samples_per_s > change.choice.samples_per_s
        yield f"{change.change}: {_gain_by_cut(cut, now) if cut and by_cut else _gain(change, now)}"
    if half := found.in_half:
        yield (
            f"in 16 bits (--set amp=fp16, which rounds): {figure(half.samples_per_s)} samples/s, "
            f"{_compared(half.samples_per_s / now)} ({half.way}); {half.host} alone "
            f"{figure(half.alone_samples_per_s)} samples/s"
        )
    yield from _rings(found)
    if found.failures:
        yield _failure_words(found.failures)


def endings(found: Outlook) -> Iterator[str]:
    """Faster alternatives with command lines; else the current one."""
    for each in found.faster:
        yield f"{each.words}:"
        yield f"  {each.command}"
    if found.command and not found.faster:
        yield "no change that these settings allow is worth it; run:"
        yield f"  {found.command}"


def hosts_of_change(change: WhatIf, found: Outlook) -> str:
    """The shorter of the remaining and the left-out hosts."""
    stay, scene = set(change.hosts), found.scene
    if all(host.kind for host in scene.hosts):
        return _imagined_hosts(stay, scene.hosts)
    if len(stay) == 1:
        return f"{change.hosts[0]} alone"
    if len(stay) <= FEW_NAMES:
        return f"only {', '.join(change.hosts)} (--nodes {','.join(change.hosts)})"
    out = [host.name for host in scene.hosts if host.name not in stay]
    if len(out) <= FEW_NAMES:
        return f"without {', '.join(out)}"
    kinds = [kind for names in scene.kinds if (kind := [name for name in names if name not in stay])]
    return "without " + " and ".join(f"the {counted(len(kind), 'host')} like {kind[0]}" for kind in kinds)


def _imagined_hosts(stay: Collection[str], hosts: Sequence[HostSpeed]) -> str:
    """In groups, since imagined hosts have no names."""
    groups = _groups(host for host in hosts if host.name in stay)
    hint = f"(--nodes {shlex.quote(groups)})"
    if len(stay) == 1:
        return f"one {groups.removeprefix('1x')} host alone {hint}"
    return f"without {_groups(host for host in hosts if host.name not in stay)} {hint}"


def _groups(hosts: Iterable[HostSpeed]) -> str:
    """For `parse_groups`."""
    return ",".join(f"{count}x{kind}" for kind, count in Counter(host.kind for host in hosts).items())


def _gain(change: WhatIf, now: float) -> str:
    choice = change.choice
    rate = f"{figure(choice.samples_per_s)} samples/s, {_compared(choice.samples_per_s / now)}"
    return f"{rate} ({way_words(choice)}; limited by the {LIMITS[choice.forecast.limited_by]})"


def _gain_by_cut(cut: PipelineChoice, now: float) -> str:
    rate = f"{figure(cut.samples_per_s)} samples/s, {_compared(cut.samples_per_s / now)}"
    return f"{rate} (pipeline; limited by the {LIMITS[cut.limited_by]})"


def _compared(ratio: float) -> str:
    """`21 % slower`, `35 % faster`, `2.13 times as fast`."""
    if ratio >= 2:
        return f"{figure(ratio)} times as fast"
    by = percent(abs(ratio - 1))
    return "as fast" if by == percent(0) else f"{by} {'faster' if ratio > 1 else 'slower'}"


def _rings(found: Outlook) -> Iterator[str]:
    """A flat ring and one inside each host first, if hosts have several ranks."""
    wire = found.scene.wire
    if wire.is_shared:
        size = gradient_bytes(found.scene.job.layers)
        flat, by_host = (figure(1000 * seconds) for seconds in (wire.all_reduce_s(size), sum(wire.relay_s(size))))
        yield f"one ring through all ranks: {flat} ms; inside each host first: {by_host} ms"


def _failure_words(failures: FailureCosts) -> str:
    return (
        f"failures: {failures.a_day:.2g} a day; with a checkpoint every {format_duration(failures.every_s)} "
        f"(each takes {format_duration(failures.checkpoint_s)}) {100 * failures.lost:.2g} % of the time is lost"
    )
