"""What the links of a plan's hosts carry: as measured, as declared, or as a person says; and in words where from.

    wire, words = wire_of(plan, read_network(Path("runs"), plan), bandwidth_bps=None)

Links are as the newest `--exp collectives` run of these hosts measured them, else as declared, times what TCP leaves of
it. Pure but for `read_network`.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.errors import OrchError, UsageError
from orchestrator.forecast.links import GLOO, GOODPUT, NCCL, LinkCosts, Overheads, Site, measured
from orchestrator.hosts.cards import find_card
from orchestrator.paths import RunFolder
from orchestrator.planning.launch_plan import LaunchPlan, NodePlan
from orchestrator.results.collectives import Collectives, link_matrix
from orchestrator.results.summary import Summary
from orchestrator.units import format_bandwidth
from trainer.shared.alpha_beta import algorithm_gbps, bus_factor
from trainer.shared.gpu_work import GB_PER_S

SEEN_RUNS = 50
"""Newest runs of collectives that are looked at for one of these hosts."""
COLLECTIVES = "collectives-"
"""How the ids of jobs begin that measure the network."""


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
    """From the newest run that measured these hosts: see `runs_measuring`."""
    measuring = runs_measuring(out, plan.cluster, [node.name for node in plan.nodes], elsewhere)
    return next((found for summary in measuring if (found := network_from(summary))), None)


def runs_measuring(
    out: Path, cluster: str, names: Collection[str], elsewhere: Iterable[Path] = ()
) -> Iterator[Summary]:
    """The collected runs of collectives over (at least) these hosts, the newest first: in the folder of collected runs,
    or among run folders elsewhere. Of one host, over its ranks alone.
    """
    found_runs = [*out.glob(f"{COLLECTIVES}*"), *elsewhere]
    newest = sorted(found_runs, key=lambda folder: (_number(folder), folder.name), reverse=True)
    for folder in newest[:SEEN_RUNS]:
        try:
            summary = Summary.load(RunFolder(folder))
        except OrchError:
            continue
        seen = {node.name for node in summary.nodes}
        here = summary.cluster == cluster and {*names} <= seen and (len(names) > 1 or len(seen) == 1)
        if here:
            yield summary


def _number(folder: Path) -> int:
    """Of the run's job, in the order of their starts; 0 if that is not known: then their names say when."""
    try:
        return int(json.loads(RunFolder(folder).job.read_text())["number"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return 0


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
