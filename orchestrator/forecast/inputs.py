"""Inputs of the forecast from a launch plan; also memory warnings, and the choice of `local_steps`. Pure.

    view = inputs_of(plan, profiles, read_network(Path("runs"), plan))
    view.scene, view.basis                      for `advise`; a sentence for each figure's source

A rank's speed is from its profile, else its pace, else the hardware catalogue.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.forecast.advice import BUCKETS_MIB, Kept, Scene
from orchestrator.forecast.gpu_catalogue import Estimate, activation_bytes, error_words, estimate
from orchestrator.forecast.layers import (
    Block,
    Layer,
    gradient_bytes,
    has_depthwise,
    is_known,
    is_resnet,
    is_written_here,
    layers_in,
    network_like,
    network_of,
)
from orchestrator.forecast.links import MeasuredLinks, site_of, wire_of
from orchestrator.forecast.step import PREDICTED, Forecast, HostSpeed, Way, Workload, predict
from orchestrator.hosts.cards import find_card
from orchestrator.planning.build import Draft
from orchestrator.planning.launch_plan import LaunchPlan, NodePlan
from orchestrator.planning.profiles import BlockTimes, Profiles, profile_line
from orchestrator.units import format_figure, format_percent
from trainer.shared.experiments import OWN
from trainer.shared.settings import Settings, overlap_of
from trainer.shared.shares import Speed, Speeds, parse_speeds
from trainer.shared.strategy_table import FIDELITY_NAMES, LOCAL_STEPS, ONE_PROCESS, Fidelity


@dataclass(frozen=True)
class ForecastInputs:
    scene: Scene
    speeds_from: dict[str, str]
    """By host: profile, pace, by hand or catalogue."""
    basis: tuple[str, ...]
    """Sources of the figures, a sentence each."""

    @property
    def is_estimate(self) -> bool:
        return "catalogue" in self.speeds_from.values()


def inputs_of(
    plan: LaunchPlan,
    profiles: Profiles,
    network: MeasuredLinks | None = None,
    bandwidth_bps: float | None = None,
    *,
    may_cut: bool = False,
) -> ForecastInputs:
    """bandwidth_bps: of every host; overrides declared and measured ones. may_cut: the network may be cut, so a host
    without memory for the whole may take part. Raises UsageError if a speed or a link is unknown, or for jobs without
    training.
    """
    settings = plan.training
    if settings is None:
        raise UsageError(f"{plan.exp} trains nothing whose speed could be predicted", "choose another --exp")
    links = [] if len(plan.nodes) == 1 else [partial(site_of, node, network, bandwidth_bps) for node in plan.nodes]
    [blocks] = _known(partial(blocks_in, plan, settings, profiles), also=links)
    layers = layers_in(blocks)
    by_hand = parse_speeds(settings.speeds)
    asked = [partial(speeds_of, node, settings, by_hand, profiles, layers) for node in plan.nodes]
    known: dict[str, tuple[tuple[Speed, ...], str]]
    known = dict(zip((node.name for node in plan.nodes), _known(*asked, *links), strict=False))
    for name, (speeds, _) in known.items():
        if any(speed.cap == 0 for speed in speeds) and not may_cut:
            remedy = "leave it out with --nodes, or cut the network with --set strategy=pipeline"
            raise UsageError(f"{name}: not one sample fits into its memory", remedy)
    estimates = _estimates(plan, settings, layers)
    hosts = tuple(_host(node, *known[node.name], profiles, estimates.get(node.name), settings) for node in plan.nodes)
    speeds_from = {name: source for name, (_, source) in known.items()}
    wire, words = wire_of(plan, network, bandwidth_bps)
    scene = Scene(Workload(layers, settings.batch, blocks), hosts, wire)
    by_profile = (host for host in hosts if speeds_from[host.name] == "profile")
    basis = (
        *_speed_words(speeds_from, estimates, layers),
        *(_outside_words(by_profile, plan, estimates) if is_resnet(settings.model) else ()),
        *_changed_words(plan, profiles),
        *words,
    )
    return ForecastInputs(scene, speeds_from, basis)


MOST_NAMED = 8


def _known(*wanted: Callable[[], Any], also: Sequence[Callable[[], Any]] = ()) -> list[Any]:
    """Raises one UsageError that names all that is unknown, then with what is unknown of `also`."""
    found, lacking = list[Any](), list[UsageError]()
    for number, ask in enumerate((*wanted, *also)):
        if number < len(wanted) or lacking:
            try:
                found.append(ask())
            except UsageError as error:
                lacking.append(error)
    if lacking:
        remedies = dict.fromkeys(error.remedy for error in lacking)
        raise UsageError("; ".join(error.message for error in lacking[:MOST_NAMED]), "; ".join(remedies))
    return found


def _host(
    node: NodePlan,
    speeds: tuple[Speed, ...],
    source: str,
    profiles: Profiles,
    estimated: Estimate | None,
    settings: Settings,
) -> HostSpeed:
    memory_bytes = node.paced.get("memory_bytes") if node.paced else None
    blocks = _blocks(node, source, profiles)
    launch_ms = estimated.launched_ms(settings) if estimated and source == "catalogue" else 0.0
    return HostSpeed(node.name, speeds, blocks=blocks, memory_bytes=memory_bytes, launch_ms=launch_ms)


def _estimates(plan: LaunchPlan, settings: Settings, layers: Sequence[Layer]) -> dict[str, Estimate]:
    """By host with a GPU of the catalogue. Raises UsageError for an `amp` that a GPU has not."""
    return {node.name: found for node in plan.nodes if (found := _estimate(node, settings, layers))}


def _estimate(node: NodePlan, settings: Settings, layers: Sequence[Layer]) -> Estimate | None:
    """None if the node has no GPU of the catalogue. Raises UsageError for an `amp` that the GPU has not."""
    gpu = find_card(node.gpu or "") if node.device == "cuda" and not node.paced else None
    return estimate(gpu, layers, settings.amp, settings.states) if gpu else None


def by_catalogue(plan: LaunchPlan, view: ForecastInputs, settings: Settings) -> Scene | None:
    """These hosts with other settings, such as `amp=fp16`. None unless all speeds are the catalogue's."""
    if {*view.speeds_from.values()} != {"catalogue"}:
        return None
    found = _estimates(plan, settings, view.scene.job.layers)
    hosts = [
        replace(
            host,
            speeds=(found[host.name].speed,) * len(host.speeds),
            launch_ms=found[host.name].launched_ms(settings),
        )
        for host in view.scene.hosts
    ]
    return replace(view.scene, hosts=tuple(hosts))


def blocks_in(plan: LaunchPlan, settings: Settings, profiles: Profiles) -> tuple[Block, ...]:
    """Raises UsageError for an unknown network."""
    like = next((node.paced["like"] for node in plan.nodes if node.paced and node.paced.get("like")), None)
    if like:
        return network_like(str(like))
    seen = next((profile.network for profile in profiles.values() if profile.network), None)
    if is_known(settings) or (seen is None and settings.model != OWN):
        return network_of(settings)
    if seen is None:
        raise UsageError(
            "the script's network is unknown: it has not been profiled, has too many layers, or not 32 bits",
            f"measure it: `{profile_line(settings)}`, with the same --set",
        )
    return tuple(
        Block(tuple(Layer(each.shapes, each.work, batch_norm=each.batch_norm) for each in block.layers), block.outputs)
        for block in seen
    )


# ---- how fast the ranks are -----------------------------------------------------------------------------------------


def speeds_of(
    node: NodePlan, settings: Settings, by_hand: Speeds, profiles: Profiles, layers: Sequence[Layer]
) -> tuple[tuple[Speed, ...], str]:
    """Also returns their source. by_hand: the setting `speeds`."""
    ranks = [(node.name, local_rank) for local_rank in range(node.ranks)]
    if all(rank in by_hand for rank in ranks):
        return tuple(by_hand[rank] for rank in ranks), "by hand"
    if all(rank in profiles for rank in ranks):
        return tuple(profiles[rank].speed for rank in ranks), "profile"
    if node.paced:
        return (_pace(node.paced, layers, settings.states),) * node.ranks, "pace"
    if found := _estimate(node, settings, layers):
        return (found.speed,) * node.ranks, "catalogue"
    what = f"its GPU, {node.gpu}," if node.device == "cuda" else "a CPU"
    raise UsageError(
        f"{node.name}: the speed is unknown: no profile, and {what} is not in the catalogue",
        f"measure it: `{profile_line(settings)}`, with the same --set",
    )


def _blocks(node: NodePlan, speed_from: str, profiles: Profiles) -> tuple[BlockTimes | None, ...]:
    if speed_from != "profile":
        return ()
    return tuple(profiles[node.name, local_rank].blocks for local_rank in range(node.ranks))


def _pace(paced: dict[str, Any], layers: Sequence[Layer], states: int) -> Speed:
    memory, cap = paced.get("memory_bytes"), None
    if memory:
        cap = max(0, int((memory - states * gradient_bytes(layers)) // activation_bytes(layers)))
    return Speed(float(paced.get("fixed_ms") or 0.0), 1000 / float(paced["samples_per_s"]), cap)


def _speed_words(
    speeds_from: Mapping[str, str], estimates: Mapping[str, Estimate], layers: Sequence[Layer]
) -> Iterator[str]:
    error = error_words([estimates[name] for name, source in speeds_from.items() if source == "catalogue"])
    if error and has_depthwise(layers):
        error += "; depthwise convolutions may take several times as long"
    words = {
        "profile": "from profiles",
        "pace": "the pace in the inventory, not measured",
        "by hand": "the setting `speeds`",
        "catalogue": f"an estimate from the hardware catalogue ({error}); `orch profile` measures",
    }
    for source, meaning in words.items():
        names = [name for name, found in speeds_from.items() if found == source]
        if names:
            yield f"speed of {', '.join(names)}: {meaning}"


def _outside_words(hosts: Iterable[HostSpeed], plan: LaunchPlan, estimates: Mapping[str, Estimate]) -> Iterator[str]:
    """Profiles that contradict the catalogue by more than its error: something may be wrong on the host. Only for
    ResNets, for which the error holds.
    """
    gpus = {node.name: node.gpu for node in plan.nodes}
    for host in hosts:
        if (found := estimates.get(host.name)) is None:
            continue
        ratio = max(speed.sample_ms for speed in host.speeds) / found.speed.sample_ms
        if not 1 - found.error <= ratio <= 1 + found.error:
            card = f"the catalogue's {gpus[host.name]} (+-{format_percent(found.error)}, {found.source})"
            yield f"{host.name}: a sample takes {format_figure(ratio)} times as long as for {card}; the profile counts"


def _changed_words(plan: LaunchPlan, profiles: Profiles) -> Iterator[str]:
    measured = [profile.created[:10] for profile in profiles.values() if profile.code not in (None, plan.code.sha256)]
    if measured:
        yield f"its files have changed since it was profiled on {min(measured)}: run `orch profile --again`"


def memory_notes(plan: LaunchPlan, view: ForecastInputs) -> tuple[str, ...]:
    return tuple(memory_words(view.scene, plan.shares, view.speeds_from, plan.training)) if plan.training else ()


# The way that settings ask for (`way_of`), its forecast (`forecast_in`), and whether memory is too small. Pure.

ENDLESS = 10**12
"""Samples."""
UNSENT = ("pace", "catalogue")
"""Sources of speeds that ranks do not receive; nor do they receive memory limits."""


def way_of(settings: Settings) -> Way | None:
    """None if it is not predicted."""
    strategy, fidelity = settings.strategy, allowed(settings)
    half_wire = settings.wire in ("bf16", "fp16")
    if strategy in ONE_PROCESS:
        return Way("ddp")  # one rank, which exchanges nothing
    exact_part = exact_part_of(settings, fidelity)
    if fidelity == "local":
        rounds = {"half_wire": half_wire, **rounds_of(settings)}
        return Way("parameter_average", "local", settings.bucket_mib, exact_part=exact_part, **rounds)
    if strategy == "parameter_average":
        return Way(strategy, "local", half_wire=half_wire)  # after every update
    if strategy == "tensor":
        return Way(strategy, fidelity, half_wire=settings.amp != "none")
    if strategy not in PREDICTED:
        return None
    way = Way(strategy, fidelity, settings.bucket_mib, rank=settings.compress_rank)
    return dataclasses.replace(way, exact_part=exact_part, sync_bn=settings.sync_bn)


def exact_part_of(settings: Settings, fidelity: str) -> float:
    """Updates (0..1) before the run compresses, is late, or trains locally."""
    if fidelity == "late":
        return settings.late_after
    after = {"compressed": settings.compress_after, "local": settings.local_after}.get(fidelity, 0)
    updates = updates_of(settings)
    return min(1.0, (updates // 10 if after < 0 else after) / updates)


def updates_of(settings: Settings) -> int:
    """A folder counts as the experiment's data set, a script's data and text as endless."""
    is_endless = settings.model == OWN or settings.data_set.is_text
    there = ENDLESS if is_endless else settings.data_set.train_samples
    whole = settings.epochs * -(-min(settings.samples or there, there) // settings.batch)
    return min(whole, settings.steps or whole)


def rounds_of(settings: Settings) -> dict[str, Any]:
    every = settings.local_steps or LOCAL_STEPS
    overlap = overlap_of(every, settings.local_overlap)
    return {"every": every, "overlap": overlap, "local_batch": settings.local_batch}


def kept(settings: Settings, chosen: Collection[str]) -> Kept:
    """chosen: the user's settings."""
    own_mib = settings.bucket_mib if "bucket_mib" in chosen else 0.0
    return Kept(
        **rounds_of(settings),
        rank=settings.compress_rank,
        wire=settings.wire,
        buckets_mib=(own_mib,) if own_mib else BUCKETS_MIB,
        exact_parts={each: exact_part_of(settings, each) for each in ("compressed", "local")},
        sync_bn=settings.sync_bn,
        slices=not settings.sync_bn and is_written_here(settings.model),
        half_outputs=settings.amp != "none",
    )


def allowed(settings: Settings) -> Fidelity:
    return next(each for each in FIDELITY_NAMES if each == settings.fidelity)


def forecast_in(scene: Scene, way: Way, shares: Sequence[int], micro: int) -> Forecast:
    """micro: the setting `accumulate`."""
    hosts, first, computed = [], 0, computed_shares(way.strategy, shares, scene.job.batch)
    for host in scene.hosts:
        own = computed[first : first + len(host.speeds)]
        first += len(own)
        speeds = (_in_parts(speed, share, micro) for speed, share in zip(host.speeds, own, strict=True))
        hosts.append(dataclasses.replace(host, speeds=tuple(speeds)))
    return predict(scene.job, hosts, scene.wire, way, shares)


def computed_shares(strategy: str, shares: Sequence[int], batch: int) -> Sequence[int]:
    """With tensor all compute the batch."""
    return [batch] * len(shares) if strategy == "tensor" else shares


def _in_parts(speed: Speed, share: int, micro: int) -> Speed:
    if micro < 1 or share < 1:
        return speed
    part = -(-share // micro)
    return dataclasses.replace(speed, cap=part if speed.cap is None else min(part, speed.cap))


def memory_words(
    scene: Scene, shares: Sequence[int], speeds_from: Mapping[str, str], settings: Settings
) -> Iterator[str]:
    """Warnings if a host's share exceeds its memory: ranks do not receive these estimates."""
    local_batch = settings.local_batch
    found: dict[int, list[tuple[str, int]]] = {}
    for name, cap, share in _too_large(scene, shares, speeds_from, settings):
        found.setdefault(cap, []).append((name, share))
    parts = parts_needed(scene, shares, speeds_from, settings)
    remedy = f"local_batch={min(found, default=0)}" if local_batch else f"accumulate={parts}"
    for cap, ranks in found.items():
        names, most = ", ".join(dict(ranks)), max(share for _, share in ranks)
        what = f"a local batch of {local_batch}" if local_batch else f"a share of {most}"
        yield (
            f"{names}: {what} will not fit into its memory at once ({cap} samples, estimated); `orch profile`, "
            f"or --set {remedy}"
        )


def parts_needed(scene: Scene, shares: Sequence[int], speeds_from: Mapping[str, str], settings: Settings) -> int:
    """The setting `accumulate` with which these shares fit; 0 if they fit unsplit."""
    return max((-(-share // cap) for _, cap, share in _too_large(scene, shares, speeds_from, settings)), default=0)


def _too_large(
    scene: Scene, shares: Sequence[int], speeds_from: Mapping[str, str], settings: Settings
) -> Iterator[tuple[str, int, int]]:
    """Name, cap and share of ranks that receive no cap but need one."""
    micro, local_batch = max(1, settings.accumulate), settings.local_batch
    split = iter(computed_shares(settings.strategy, shares, scene.job.batch))
    for host in scene.hosts:
        has_no_cap = speeds_from.get(host.name, "catalogue") in UNSENT
        for speed, share in zip(host.speeds, split, strict=False):
            at_once = min(-(-share // micro), local_batch or share)
            if has_no_cap and speed.cap and at_once > speed.cap:
                yield host.kind or host.name, speed.cap, share


# Local steps between two averages (`local_steps=0`). Pure. More steps hide more of the network but let ranks drift
# apart: the fewest that are about as fast as the most.

NEAR = 0.99
"""Part of the best speed that counts as equally good."""
MANY_STEPS = (48, 64, 96, 128, 192, 256)
"""Tried for slow networks, besides all up to LOCAL_STEPS."""
SAME = 0.999
"""Part of the speed with half of the steps overlapping that fewer overlapping steps have to reach."""


def with_rounds(draft: Draft, view: ForecastInputs | UsageError) -> Draft:
    """Resolves `local_steps=0`: the fewest steps, and the fewest overlapping, that hide the network. view: an error
    means that nothing can be predicted; then LOCAL_STEPS.
    """
    settings = draft.training
    if settings is None or settings.fidelity != "local" or settings.local_steps:
        return draft
    asked = settings.local_overlap
    if settings.strategy == "pipeline":
        every = max(LOCAL_STEPS, asked + 1)
        return _decided(draft, every, asked, f"{every}, for parallel pipelines")
    if isinstance(view, UsageError):
        every = max(LOCAL_STEPS, asked + 1)
        return _decided(draft, every, asked, f"{every}, since {view.message}; {view.remedy}")

    def speed(every: int, overlap: int) -> float:
        return _samples_per_s(settings, draft.shares, view, every, overlap)

    every, overlap = fewest_steps(speed, asked)
    predicted = f"predicted at {format_figure(speed(every, overlap))} samples/s"
    words = f"{every}, {overlap} of them while an average travels: {predicted}"
    price = "; more than 32 cost accuracy, see `orch help strategies`" if every > LOCAL_STEPS else ""
    return _decided(draft, every, overlap, f"{words}, within 1 % of the most that {MANY_STEPS[-1]} would bring{price}")


def fewest_steps(speed: Callable[[int, int], float], asked: int) -> tuple[int, int]:
    """(steps between averages, overlapping steps). speed: samples/s by both. asked: `local_overlap`; -1 allows up to
    half of the steps (a quarter if the user sets `local_steps`).
    """
    least = max(1, asked + 1)
    tried = [*range(least, max(LOCAL_STEPS, least) + 1), *(many for many in MANY_STEPS if many > least)]
    speeds = {every: speed(every, every // 2 if asked < 0 else asked) for every in tried}
    every = next(steps for steps in speeds if speeds[steps] >= NEAR * max(speeds.values()))
    overlaps = range(every // 2 + 1) if asked < 0 else (asked,)
    return every, next(overlap for overlap in overlaps if speed(every, overlap) >= SAME * speeds[every])


def _samples_per_s(settings: Settings, shares: Sequence[int], view: ForecastInputs, every: int, overlap: int) -> float:
    """After the exact updates of `local_after`."""
    way = way_of(replace(settings, local_steps=every, local_overlap=overlap, local_after=0))
    assert way  # noqa: S101 - for the type checker
    return forecast_in(view.scene, way, shares, settings.accumulate).samples_per_s


def _decided(draft: Draft, every: int, overlap: int, words: str) -> Draft:
    return draft.settled({"local_steps": every, "local_overlap": overlap}, f"local_steps=0: {words}")
