"""A launch plan as the forecast sees it: how fast its ranks are, what its links carry, and where all that comes from.

    view = inputs_of(plan, profiles, read_network(Path("runs"), plan))
    view.scene, view.basis                      what `advise` takes; a sentence for each figure that is not measured

A rank's speed is its profile's; else the pace that it was given; else an estimate from the catalogue. Links are as the
newest `--exp collectives` run of these hosts measured them, else as declared, times what TCP leaves of it. Pure but for
`read_network`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.errors import OrchError, UsageError
from orchestrator.forecast.advice import BUCKETS_MIB, FIDELITIES, Kept, Scene
from orchestrator.forecast.gpus import ERROR, activation_bytes, estimate_speed
from orchestrator.forecast.layers import Layer, gradient_bytes, layers_of
from orchestrator.forecast.links import GLOO, GOODPUT, NCCL, LinkCosts, Overheads, Site, measured
from orchestrator.forecast.step import STRATEGIES, Fidelity, Forecast, HostSpeed, Way, Workload, predict
from orchestrator.hosts.cards import find_card
from orchestrator.paths import RunFolder
from orchestrator.planning.launch_plan import LaunchPlan, NodePlan
from orchestrator.planning.measurement import BlockTimes
from orchestrator.planning.profiles import Profiles
from orchestrator.results.collectives import Collectives, link_matrix
from orchestrator.results.summary import Summary
from orchestrator.units import format_bandwidth
from trainer.shared.alpha_beta import algorithm_gbps, bus_factor
from trainer.shared.gpu_work import GB_PER_S
from trainer.shared.settings import Settings, overlap_of
from trainer.shared.shares import Speed, Speeds, parse_speeds
from trainer.shared.ways import LOCAL_STEPS

SEEN_RUNS = 50
"""Newest runs of collectives that are looked at for one of these hosts."""
COLLECTIVES = "collectives-"
"""How the ids of jobs begin that measure the network."""
UNSENT = ("pace", "catalogue")
"""The sources of speeds that a run's ranks do not receive, nor what their memory holds."""


@dataclass(frozen=True)
class MeasuredLinks:
    """What a run of collectives measured."""

    job: str
    message_s: float
    """Latency of its all_reduce, for each of its 2(n-1) messages."""
    bps: float
    """What the slowest link carried."""
    declared_bps: float | None
    """What the inventory says of that link."""
    pairs: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """What each path carries in a collective: as it does by itself, times what all_reduce makes of the slowest one that
    it takes.
    """


@dataclass(frozen=True)
class ForecastInputs:
    """What a forecast starts from."""

    scene: Scene
    speeds_from: dict[str, str]
    """By host: profile, pace, by hand or catalogue."""
    basis: tuple[str, ...]
    """What the figures rest on, a sentence each."""

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
    """bandwidth_bps: of every host, in place of what is declared or measured. may_cut: the network may be cut, so that
    a host whose memory holds no sample of the whole may take part. Raises UsageError where a speed or a link is not
    known, and for what is no training of ours.
    """
    settings = plan.training
    if settings is None:
        raise UsageError(f"{plan.exp} trains nothing whose speed could be predicted", "choose another --exp")
    layers = network_of(settings)
    by_hand = parse_speeds(settings.speeds)
    speeds_of = {node.name: _speeds(node, settings.exp, by_hand, profiles, layers) for node in plan.nodes}
    for name, (speeds, _) in speeds_of.items():
        if any(speed.cap == 0 for speed in speeds) and not may_cut:
            remedy = "leave it out with --nodes, or cut the network with --set strategy=pipeline"
            raise UsageError(f"{name}: not one sample fits into its memory", remedy)
    hosts = tuple(_host(node, *speeds_of[node.name], profiles) for node in plan.nodes)
    speeds_from = {name: source for name, (_, source) in speeds_of.items()}
    wire, words = wire_of(plan, network, bandwidth_bps)
    scene = Scene(Workload(layers, settings.batch), hosts, wire)
    return ForecastInputs(scene, speeds_from, (*_speed_words(speeds_from), *words))


def _host(node: NodePlan, speeds: tuple[Speed, ...], source: str, profiles: Profiles) -> HostSpeed:
    memory_bytes = node.paced.get("memory_bytes") if node.paced else None
    return HostSpeed(node.name, speeds, blocks=_blocks(node, source, profiles), memory_bytes=memory_bytes)


def network_of(settings: Settings) -> tuple[Layer, ...]:
    return layers_of(settings.model, settings.data_set.shape, settings.data_set.classes)


# ---- how fast the ranks are -----------------------------------------------------------------------------------------


def _speeds(
    node: NodePlan, exp: str, by_hand: Speeds, profiles: Profiles, layers: Sequence[Layer]
) -> tuple[tuple[Speed, ...], str]:
    """The speeds of the node's ranks, and where they come from. by_hand: the setting `speeds`."""
    ranks = [(node.name, local_rank) for local_rank in range(node.ranks)]
    if all(rank in by_hand for rank in ranks):
        return tuple(by_hand[rank] for rank in ranks), "by hand"
    if all(rank in profiles for rank in ranks):
        return tuple(profiles[rank].speed for rank in ranks), "profile"
    if node.paced:
        return (_pace(node.paced, layers),) * node.ranks, "pace"
    gpu = find_card(node.gpu or "") if node.device == "cuda" else None
    if gpu:
        return (estimate_speed(gpu, layers),) * node.ranks, "catalogue"
    what = f"its GPU, {node.gpu}," if node.device == "cuda" else "a CPU"
    raise UsageError(
        f"{node.name}: its speed is unknown: no profile, and {what} is not in the catalogue",
        f"measure it: `orch profile --exp {exp}`, with the same --set",
    )


def _blocks(node: NodePlan, speed_from: str, profiles: Profiles) -> tuple[BlockTimes | None, ...]:
    if speed_from != "profile":
        return ()
    return tuple(profiles[node.name, local_rank].blocks for local_rank in range(node.ranks))


def _pace(paced: dict[str, Any], layers: Sequence[Layer]) -> Speed:
    memory, cap = paced.get("memory_bytes"), None
    if memory:
        cap = max(0, int((memory - 3 * gradient_bytes(layers)) // activation_bytes(layers)))
    return Speed(float(paced.get("fixed_ms") or 0.0), 1000 / float(paced["samples_per_s"]), cap)


def _speed_words(speeds_from: dict[str, str]) -> Iterator[str]:
    words = {
        "profile": "as profiled alone",
        "pace": "the pace that the inventory sets, which nobody has measured",
        "by hand": "the setting `speeds`",
        "catalogue": f"an estimate from the hardware catalogue ({ERROR}); `orch profile` measures",
    }
    for source, meaning in words.items():
        names = [name for name, found in speeds_from.items() if found == source]
        if names:
            yield f"speed of {', '.join(names)}: {meaning}"


# ---- what the links carry -------------------------------------------------------------------------------------------


def wire_of(
    plan: LaunchPlan, network: MeasuredLinks | None, bandwidth_bps: float | None
) -> tuple[LinkCosts, tuple[str, ...]]:
    """The wire, and what is to be said of it."""
    costs = NCCL if plan.backend == "nccl" else GLOO
    if len(plan.nodes) == 1:
        node, costs = plan.nodes[0], _with_gpus(measured_inside(costs, network) if network else costs, plan)
        return LinkCosts((Site(node.name, node.ranks, float("inf"), float("inf")),), costs), (_costs_words(costs),)
    if bandwidth_bps is not None:
        network = None  # a person's word goes before what was measured
    if network:
        costs = measured(costs, network.message_s, f"latency as {network.job} measured it")
    costs = _with_gpus(costs, plan)
    sites = tuple(_site(node, network, bandwidth_bps) for node in plan.nodes)
    wire = LinkCosts(sites, costs, network.pairs if network else {})
    return wire, (_links_words(plan, network, bandwidth_bps), _costs_words(costs))


def measured_inside(costs: Overheads, network: MeasuredLinks) -> Overheads:
    source = f"ranks of one host as {network.job} measured them, {format_bandwidth(network.bps)} between two"
    message_s, bps = network.message_s, network.bps
    return dataclasses.replace(costs, call_s=0.0, source=source, local_message_s=message_s, local_bps=bps)


def _with_gpus(costs: Overheads, plan: LaunchPlan) -> Overheads:
    """All wait for the rank with the slowest memory, a CPU's where one has no GPU."""
    if all(node.paced or node.device == "cuda" for node in plan.nodes):
        return costs.on_gpus(min(map(_gb_per_s, plan.nodes)))
    return costs


def _gb_per_s(node: NodePlan) -> float:
    if node.paced:
        return float(node.paced.get("gb_per_s") or GB_PER_S)
    gpu = find_card(node.gpu or "")
    return gpu.gb_per_s if gpu else GB_PER_S


def _site(node: NodePlan, network: MeasuredLinks | None, bandwidth_bps: float | None) -> Site:
    declared = bandwidth_bps or node.bandwidth_bps
    if network and any(node.name in pair for pair in network.pairs):
        up_bps, down_bps = (max(bps for pair, bps in network.pairs.items() if pair[end] == node.name) for end in (0, 1))
        return Site(node.name, node.ranks, up_bps, down_bps)
    if network:
        part = network.bps / network.declared_bps if network.declared_bps else None
        bps = part * declared if part and declared else network.bps
    elif declared:
        bps = GOODPUT * declared
    elif node.address.startswith("127."):
        bps = GLOO.local_bps
    else:
        raise UsageError(
            f"{node.name}: the bandwidth of its link is unknown",
            "declare its `bandwidth`, give --bandwidth 2.5Gbps, or measure: `orch run --exp collectives`, then collect",
        )
    return Site(node.name, node.ranks, bps, bps)


def _links_words(plan: LaunchPlan, network: MeasuredLinks | None, bandwidth_bps: float | None) -> str:
    if bandwidth_bps:
        return f"links: {format_bandwidth(bandwidth_bps)} for every host, as you say, times {GOODPUT} of payload"
    if network:
        return f"links: {format_bandwidth(network.bps)} on the slowest, measured by {network.job}"
    known = [node.bandwidth_bps for node in plan.nodes if node.bandwidth_bps]
    slowest = format_bandwidth(min(known)) if known else "loopback, assumed"
    return f"links: as declared (slowest {slowest}), times {GOODPUT} of payload; `orch run --exp collectives` measures"


def _costs_words(costs: Overheads) -> str:
    return f"{costs.name}: {costs.source}"


def read_network(out: Path, plan: LaunchPlan, elsewhere: Iterable[Path] = ()) -> MeasuredLinks | None:
    """The newest collected run of collectives over (at least) these hosts: in the folder of collected runs, or among
    run folders elsewhere. Of one host, over its ranks alone.
    """
    wanted = {node.name for node in plan.nodes}
    found_runs = [*out.glob(f"{COLLECTIVES}*"), *elsewhere]
    newest = sorted(found_runs, key=lambda folder: folder.name, reverse=True)  # their names say when
    for folder in newest[:SEEN_RUNS]:
        try:
            summary = Summary.load(RunFolder(folder))
        except OrchError:
            continue
        seen = {node.name for node in summary.nodes}
        here = summary.cluster == plan.cluster and wanted <= seen and (len(wanted) > 1 or len(seen) == 1)
        if here and (found := network_from(summary)):
            return found
    return None


def network_from(summary: Summary) -> MeasuredLinks | None:
    """None where its all_reduce was not measured at several sizes, or there was a single rank."""
    ranks, found = summary.world_size, summary.collectives
    times = [time for time in found.times if time.operation == "all_reduce" and time.time_ms] if found else []
    if ranks < 2 or not found or len({time.bytes for time in times}) < 2:
        return None
    latency_ms, gbps = latency_and_bandwidth({time.bytes: time.time_ms for time in times if time.time_ms})
    declared, bps = found.declared_gbps, 1e9 * gbps * bus_factor("all_reduce", ranks)
    return MeasuredLinks(
        job=summary.job,
        message_s=latency_ms / 1000 / (2 * (ranks - 1)),
        bps=bps,
        declared_bps=1e9 * declared if declared else None,
        pairs=_pairs(found, [node.name for node in summary.nodes], bps),
    )


def latency_and_bandwidth(times_ms: Mapping[int, float]) -> tuple[float, float]:
    """ms, and Gbps, of times by bytes: the bandwidth of the largest size; and what small sizes take beyond it, in
    the median. The line that fits all of them best would let the noise of small ones move its slope, and with it what
    a gradient's time is predicted to be.
    """
    largest = max(times_ms)
    ms_a_byte = times_ms[largest] / largest
    small = [ms - size * ms_a_byte for size, ms in times_ms.items() if 2 * size * ms_a_byte < ms]
    latency_ms = min(statistics.median(small), times_ms[largest] / 2) if small else 0.0
    return latency_ms, algorithm_gbps(largest, (times_ms[largest] - latency_ms) / 1000)


def _pairs(found: Collectives, names: Sequence[str], bps: float) -> dict[tuple[str, str], float]:
    """Empty where not every path was measured, and of one host."""
    _, alone_gbps = link_matrix(found)
    if len(names) < 2 or len(alone_gbps) < len(names) * (len(names) - 1):
        return {}
    slowest_gbps = min(alone_gbps[pair] for pair in zip(names, [*names[1:], names[0]], strict=True))
    return {pair: gbps / slowest_gbps * bps for pair, gbps in alone_gbps.items()}


# ---- what a plan will do --------------------------------------------------------------------------------------------


def way_of(settings: Settings) -> Way | None:
    """The way that these settings ask for. None: one that is not predicted."""
    strategy, fidelity = settings.strategy, allowed(settings)
    half_wire = settings.wire in ("bf16", "fp16")
    if strategy in ("none", "dp"):
        return Way("ddp")  # one rank, which exchanges nothing
    exact_part = exact_part_of(settings, fidelity)
    if fidelity == "local":
        rounds = {"half_wire": half_wire, **rounds_of(settings)}
        return Way("parameter_average", "local", settings.bucket_mib, exact_part=exact_part, **rounds)
    if strategy == "parameter_average":
        return Way(strategy, "local", half_wire=half_wire)  # after every update
    if strategy == "tensor":
        return Way(strategy, fidelity, half_wire=settings.amp != "none")
    if strategy not in STRATEGIES:
        return None
    way = Way(strategy, fidelity, settings.bucket_mib, rank=settings.compress_rank)
    return dataclasses.replace(way, exact_part=exact_part, sync_bn=settings.sync_bn)


def exact_part_of(settings: Settings, fidelity: str) -> float:
    """The part of a run's updates (0..1) before it begins to compress, or to train locally."""
    after = {"compressed": settings.compress_after, "local": settings.local_after}.get(fidelity, 0)
    updates = updates_of(settings)
    return min(1.0, (updates // 10 if after < 0 else after) / updates)


def updates_of(settings: Settings) -> int:
    """The updates of the whole run, as far as the data set is known here; a folder counts as the experiment's set."""
    there = settings.data_set.train_samples
    whole = settings.epochs * -(-min(settings.samples or there, there) // settings.batch)
    return min(whole, settings.steps or whole)


def rounds_of(settings: Settings) -> dict[str, Any]:
    """The settings of local steps, as `Way` names them."""
    every = settings.local_steps or LOCAL_STEPS
    overlap = overlap_of(every, settings.local_overlap)
    return {"every": every, "overlap": overlap, "local_batch": settings.local_batch}


def kept(settings: Settings, chosen: Collection[str], *, elastic: bool = False) -> Kept:
    """chosen: settings that the person made."""
    own_mib = settings.bucket_mib if "bucket_mib" in chosen else 0.0
    return Kept(
        **rounds_of(settings),
        rank=settings.compress_rank,
        wire=settings.wire,
        buckets_mib=(own_mib,) if own_mib else BUCKETS_MIB,
        exact_parts={each: exact_part_of(settings, each) for each in ("compressed", "local")},
        sync_bn=settings.sync_bn,
        slices=not settings.sync_bn and not elastic,
        half_outputs=settings.amp != "none",
    )


def allowed(settings: Settings) -> Fidelity:
    return next(each for each in FIDELITIES if each == settings.fidelity)


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
    """Samples that each rank computes of an update. Under tensor shares are of channels, and all compute the batch."""
    return [batch] * len(shares) if strategy == "tensor" else shares


def _in_parts(speed: Speed, share: int, micro: int) -> Speed:
    if micro < 1 or share < 1:
        return speed
    part = -(-share // micro)
    return dataclasses.replace(speed, cap=part if speed.cap is None else min(part, speed.cap))


def memory_words(
    scene: Scene, shares: Sequence[int], speeds_from: Mapping[str, str], settings: Settings
) -> Iterator[str]:
    """Warnings about hosts that will do more at once than their memory holds: ranks do not learn these estimates."""
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
    """The setting `accumulate` with which these shares fit; 0 where they fit as they are."""
    return max((-(-share // cap) for _, cap, share in _too_large(scene, shares, speeds_from, settings)), default=0)


def _too_large(
    scene: Scene, shares: Sequence[int], speeds_from: Mapping[str, str], settings: Settings
) -> Iterator[tuple[str, int, int]]:
    """Name, cap and share, in samples, of each rank that receives no cap and would need one."""
    micro, local_batch = max(1, settings.accumulate), settings.local_batch
    split = iter(computed_shares(settings.strategy, shares, scene.job.batch))
    for host in scene.hosts:
        has_no_cap = speeds_from.get(host.name, "catalogue") in UNSENT
        for speed, share in zip(host.speeds, split, strict=False):
            at_once = min(-(-share // micro), local_batch or share)
            if has_no_cap and speed.cap and at_once > speed.cap:
                yield host.kind or host.name, speed.cap, share


def memory_notes(plan: LaunchPlan, view: ForecastInputs) -> tuple[str, ...]:
    return tuple(memory_words(view.scene, plan.shares, view.speeds_from, plan.training)) if plan.training else ()
