"""How long ranks take to exchange bytes, by link speed and overhead; reads links that earlier runs measured.

wire = LinkCosts((Site("a2000", 1, 2.35e9, 2.35e9), Site("v100", 1, 2.35e9, 2.35e9)), GLOO)
wire.all_reduce_s(232_657_192)          0.794
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from orchestrator.errors import OrchError, UsageError
from orchestrator.hosts.cards import find_card
from orchestrator.paths import RunFolder
from orchestrator.planning.launch_plan import LaunchPlan, NodePlan
from orchestrator.results.network import Collectives, link_matrix
from orchestrator.results.summary import Summary
from orchestrator.units import format_bandwidth, some
from trainer.shared.alpha_beta import algorithm_gbps, bus_factor
from trainer.shared.gpu_work import GB_PER_S, KERNEL_S, STREAMED, Work

# Payload part of a declared bandwidth over TCP: 0.94 to 0.956 (iperf3: 2.35 to 2.39 of 2.5 Gbps).
GOODPUT = 0.94


@dataclass(frozen=True)
class Site:
    name: str
    ranks: int
    up_bps: float
    """Payload bits/s sent; down_bps: received."""
    down_bps: float


@dataclass(frozen=True)
class Transfers:
    """Costs of single messages, as in Overheads."""

    message_s: float
    local_message_s: float
    local_bps: float


@dataclass(frozen=True)
class Overheads:
    """Besides bytes on links."""

    name: str
    source: str
    message_s: float
    """Per message between hosts."""
    call_s: float
    """Per collective."""
    local_message_s: float
    """Inside a host, as local_bps."""
    local_bps: float
    moved_bytes_per_s: float
    """Memory traffic on the slowest rank (`trainer.shared.gpu_work`)."""
    kernel_s: float
    """Per kernel of that work."""
    tree_broadcast: bool
    """In log2(n) rounds; else in pieces along a chain."""
    relays: bool
    """Ranks of one host add up first (`trainer.strategies.gradient_sum`)."""
    of_cuts: Transfers | None = None
    """For activations between stages; None: as for gradients."""

    def work_s(self, work: Work) -> float:
        return work.moved_bytes / self.moved_bytes_per_s + self.kernel_s * work.kernels

    def on_gpus(self, gb_per_s: float) -> Overheads:
        source = f"{self.source}; work on gradients as at {gb_per_s:g} GB/s of a GPU's memory, an estimate"
        return dataclasses.replace(self, source=source, moved_bytes_per_s=STREAMED * 1e9 * gb_per_s, kernel_s=KERNEL_S)


# Gloo's message cost: one call per parameter or one for all 467. Between two lab hosts 1.44 s and 0.785 s bare, 1.774
# s in training; between four at 1 Gbps 6.07 s and 3.14 s bare, 5.5 s in training: the difference over 467 * 2(n-1)
# messages. CPU costs on one core, for 232.7 MB: to bf16 and back 0.12 s, 5.8 GB/s moved; PowerSGD of rank 2, while it
# moved ten times the gradient and not eight, 0.37 s alone, 0.42 s with two ranks, 5.6 GB/s moved; copies into untouched
# memory 2.6 to 3.4 GB/s. `local`'s averages move 16 GB/s, so the model overcharges them by 0.4 s a round of ResNet-152.
GLOO = Overheads(
    name="gloo",
    source="1 ms a message, as 2 hosts at 2.5 Gbps and 4 at 1 Gbps showed (0.7 to 1.06); CPU costs as of one core",
    message_s=1.0e-3,
    call_s=0.0,
    local_message_s=50e-6,
    local_bps=16e9,
    moved_bytes_per_s=5.6e9,
    kernel_s=0.0,
    tree_broadcast=True,
    relays=True,
)
# Stages exchange activations over Gloo even if gradients travel over NCCL (`trainer.pipeline.stage`). Between two ranks
# of one host that also compute, Gloo moved 8 Gbps.
GLOO_CUTS = Transfers(GLOO.message_s, GLOO.local_message_s, local_bps=8e9)
NCCL = Overheads(
    name="nccl",
    source="assumed, not measured: 50 us a message over TCP, PCIe 3 inside a host",
    message_s=50e-6,
    call_s=20e-6,
    local_message_s=10e-6,
    local_bps=80e9,
    moved_bytes_per_s=STREAMED * 1e9 * GB_PER_S,
    kernel_s=KERNEL_S,
    tree_broadcast=False,
    relays=False,
    of_cuts=GLOO_CUTS,
)


def measured(costs: Overheads, message_s: float, source: str) -> Overheads:
    """message_s: includes the call."""
    return dataclasses.replace(costs, message_s=message_s, call_s=0.0, source=source)


@dataclass(frozen=True)
class LinkCosts:
    sites: Sequence[Site]
    costs: Overheads
    pairs: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Measured bits/s from one host to another."""

    @cached_property
    def ranks(self) -> int:
        return sum(site.ranks for site in self.sites)

    @cached_property
    def site_of(self) -> tuple[Site, ...]:
        """By rank."""
        return tuple(site for site in self.sites for _ in range(site.ranks))

    def path_bps(self, source: Site, target: Site) -> float:
        if source is target:
            return self.costs.local_bps
        return min(source.up_bps, target.down_bps, self.pairs.get((source.name, target.name), math.inf))

    @cached_property
    def cuts(self) -> Transfers:
        own = self.costs
        return own.of_cuts or Transfers(own.message_s, own.local_message_s, own.local_bps)

    def cut_bps(self, source: Site, target: Site) -> float:
        """As `path_bps`, for activations between stages."""
        return self.cuts.local_bps if source is target else self.path_bps(source, target)

    @cached_property
    def _between(self) -> frozenset[float]:
        after = (*self.sites[1:], *self.sites[:1])
        return frozenset(self.path_bps(a, b) for a, b in zip(self.sites, after, strict=True) if a is not b)

    @cached_property
    def _most(self) -> int:
        return max(site.ranks for site in self.sites)

    def round_s(self, size_bytes: float) -> float:
        """Each rank passes this much on; the slowest counts."""
        costs = self.costs
        times = [costs.message_s + 8 * size_bytes / bps for bps in self._between]
        times += [costs.local_message_s + 8 * size_bytes / costs.local_bps] if self._most > 1 else []
        return max(times, default=0.0)

    # ---- collectives: size_bytes is the gradient of one rank -------------------------------------------------------

    # A ring (Patarasuk and Yuan 2009): n ranks pass pieces of S/n bytes in 2(n-1) rounds, each as long as its slowest
    # message: 2(n-1)*alpha + 2(n-1)/n * S/B. Ranks are in order, host by host, so a host's link carries one rank's
    # traffic each way, however many ranks it has.
    def all_reduce_s(self, size_bytes: float) -> float:
        return self._called(2 * (self.ranks - 1) * self.round_s(size_bytes / self.ranks))

    @property
    def is_shared(self) -> bool:
        return 1 < len(self.sites) < self.ranks

    def relay_s(self, size_bytes: float) -> tuple[float, float, float]:
        """Sum inside each host, ring over one rank per host, broadcast inside each host."""
        most, costs = self._most, self.costs
        inward = most * (costs.local_message_s + 8 * size_bytes / most / costs.local_bps)
        outward = math.ceil(math.log2(most)) * (costs.local_message_s + 8 * size_bytes / costs.local_bps)
        return inward, self._heads.all_reduce_s(size_bytes), outward

    def sum_legs_s(self, size_bytes: float) -> tuple[float, ...]:
        """Consecutive sums overlap leg by leg."""
        return self.relay_s(size_bytes) if self.costs.relays and self.is_shared else (self.all_reduce_s(size_bytes),)

    def sum_s(self, size_bytes: float) -> float:
        return sum(self.sum_legs_s(size_bytes))

    @cached_property
    def _heads(self) -> LinkCosts:
        """One rank per host."""
        return LinkCosts([dataclasses.replace(site, ranks=1) for site in self.sites], self.costs, self.pairs)

    def reduce_scatter_s(self, size_bytes: float) -> float:
        return self._called((self.ranks - 1) * self.round_s(size_bytes / self.ranks))

    def all_gather_s(self, size_bytes: float) -> float:
        """Whole gradients to every rank."""
        return self._called((self.ranks - 1) * self.round_s(size_bytes))

    def gather_s(self, size_bytes: float) -> float:
        """Whole gradients to rank 0, through its one link."""
        return self._called(self._star_s(size_bytes))

    scatter_s = gather_s

    def reduce_s(self, size_bytes: float) -> float:
        """Gloo: ring, then gather. NCCL: pieces along a chain."""
        if not self.costs.tree_broadcast:
            return self._chain_s(size_bytes)
        piece = size_bytes / self.ranks
        return self._called((self.ranks - 1) * self.round_s(piece) + self._star_s(piece))

    def broadcast_s(self, size_bytes: float) -> float:
        if not self.costs.tree_broadcast:
            return self._chain_s(size_bytes)
        have, time_s = 1, 0.0
        while have < self.ranks:  # each holder sends to one other
            time_s += self._at_once_s((rank, rank + have, size_bytes) for rank in range(min(have, self.ranks - have)))
            have *= 2
        return self._called(time_s)

    def swap_s(self, sizes_bytes: Sequence[float]) -> float:
        """By rank: to each other rank."""
        ranks = range(self.ranks)
        return self._called(
            self._at_once_s((a, b, sizes_bytes[a]) for a in ranks for b in ranks if a != b and sizes_bytes[a])
        )

    def _at_once_s(self, messages: Iterable[tuple[int, int, float]]) -> float:
        """messages: (source, target, bytes). The busiest link counts."""
        costs, busy_s = self.costs, dict[tuple[str, str], float]()
        for source, target, size_bytes in messages:
            a, b = self.site_of[source], self.site_of[target]
            if a is b:
                each = {(a.name, f"{source}"): costs.local_message_s + 8 * size_bytes / costs.local_bps}
            else:
                time_s = costs.message_s + 8 * size_bytes / self.path_bps(a, b)
                each = {(a.name, "up"): time_s, (b.name, "down"): time_s}
            for link, time_s in each.items():
                busy_s[link] = busy_s.get(link, 0.0) + time_s
        return max(busy_s.values(), default=0.0)

    def _called(self, time_s: float) -> float:
        return time_s + self.costs.call_s if self.ranks > 1 else 0.0

    def _chain_s(self, size_bytes: float) -> float:
        return self._called((self.ranks - 2) * self.round_s(0) + self.round_s(size_bytes))

    def _star_s(self, size_bytes: float) -> float:
        root, costs = self.sites[0], self.costs
        outside = self.ranks - root.ranks
        if not outside:
            return costs.local_message_s + 8 * size_bytes / costs.local_bps
        at_root_s = outside * (costs.message_s + 8 * size_bytes / min(root.down_bps, root.up_bps))
        at_others_s = (
            site.ranks * (costs.message_s + 8 * size_bytes / self.path_bps(site, root)) for site in self.sites[1:]
        )
        return max(at_root_s, *at_others_s)


# Links of a plan's hosts: from the newest run of `--exp collectives`, else as declared times GOODPUT; with sources in
# words. Pure except for `read_network`.
#
#     wire, words = wire_of(plan, read_network(Path("runs"), plan), bandwidth_bps=None)

SEEN_RUNS = 50
COLLECTIVES = "collectives-"
"""Begins the ids of jobs that measure the network."""


@dataclass(frozen=True)
class MeasuredLinks:
    job: str
    message_s: float
    """all_reduce's latency over its 2(n-1) messages."""
    bps: float
    """The slowest link's."""
    declared_bps: float | None
    """From the inventory."""
    pairs: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """In a collective: a path's own speed, scaled by all_reduce's on the slowest path."""


def wire_of(
    plan: LaunchPlan, network: MeasuredLinks | None, bandwidth_bps: float | None
) -> tuple[LinkCosts, tuple[str, ...]]:
    """Also returns notes on the sources."""
    costs = NCCL if plan.backend == "nccl" else GLOO
    if len(plan.nodes) == 1:
        node, costs = plan.nodes[0], _with_gpus(measured_inside(costs, network) if network else costs, plan)
        return LinkCosts((Site(node.name, node.ranks, float("inf"), float("inf")),), costs), (_costs_words(costs),)
    if bandwidth_bps is not None:
        network = None  # the user's value overrides measurements
    if network:
        costs = measured(costs, network.message_s, f"latency as {network.job} measured it")
    costs = _with_gpus(costs, plan)
    sites = tuple(site_of(node, network, bandwidth_bps) for node in plan.nodes)
    wire = LinkCosts(sites, costs, network.pairs if network else {})
    return wire, (_links_words(plan, network, bandwidth_bps), _costs_words(costs))


def measured_inside(costs: Overheads, network: MeasuredLinks) -> Overheads:
    source = f"ranks of one host as {network.job} measured them, {format_bandwidth(network.bps)} between two"
    message_s, bps = network.message_s, network.bps
    return dataclasses.replace(costs, call_s=0.0, source=source, local_message_s=message_s, local_bps=bps)


def _with_gpus(costs: Overheads, plan: LaunchPlan) -> Overheads:
    """The slowest memory counts, a CPU's if a node has no GPU."""
    if all(node.paced or node.device == "cuda" for node in plan.nodes):
        return costs.on_gpus(min(map(_gb_per_s, plan.nodes)))
    return costs


def _gb_per_s(node: NodePlan) -> float:
    if node.paced:
        return float(node.paced.get("gb_per_s") or GB_PER_S)
    gpu = find_card(node.gpu or "")
    return gpu.gb_per_s if gpu else GB_PER_S


def site_of(node: NodePlan, network: MeasuredLinks | None, bandwidth_bps: float | None) -> Site:
    """Raises UsageError if the speed of its link is unknown."""
    declared = bandwidth_bps or node.bandwidth_bps or node.interface_bps
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
            f"{node.name}: the bandwidth of the link is unknown",
            "declare its `bandwidth`, give --bandwidth 2.5Gbps, or measure: `orch run --exp collectives`, then collect",
        )
    return Site(node.name, node.ranks, bps, bps)


def _links_words(plan: LaunchPlan, network: MeasuredLinks | None, bandwidth_bps: float | None) -> str:
    if bandwidth_bps:
        return f"links: {format_bandwidth(bandwidth_bps)} for every host, as given, times {GOODPUT} of payload"
    if network:
        return f"links: {format_bandwidth(network.bps)} on the slowest, measured by {network.job}"
    known = [bps for node in plan.nodes if (bps := node.bandwidth_bps or node.interface_bps)]
    slowest = format_bandwidth(min(known)) if known else "loopback, assumed"
    seen = [node.name for node in plan.nodes if node.interface_bps]
    source = f"as declared, of {some(seen, 5)} as the interface reports" if seen else "as declared"
    if len(seen) == len(plan.nodes):
        source = "as the interfaces report"
    return f"links: {source} (slowest {slowest}), times {GOODPUT} of payload; `orch run --exp collectives` measures"


def _costs_words(costs: Overheads) -> str:
    return f"{costs.name}: {costs.source}"


def read_network(out: Path, plan: LaunchPlan, elsewhere: Iterable[Path] = ()) -> MeasuredLinks | None:
    measuring = runs_measuring(out, plan.cluster, [node.name for node in plan.nodes], elsewhere)
    return next((found for summary in measuring if (found := network_from(summary))), None)


def runs_measuring(
    out: Path, cluster: str, names: Collection[str], elsewhere: Iterable[Path] = ()
) -> Iterator[Summary]:
    """Collected runs of collectives over these hosts and maybe others, newest first; for one host only over its
    ranks.
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
    """0 if unknown; then names decide."""
    try:
        return int(json.loads(RunFolder(folder).job.read_text())["number"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return 0


def network_from(summary: Summary) -> MeasuredLinks | None:
    """None with a single rank, or without all_reduce at several sizes."""
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
    """(ms, Gbps), from times by bytes: the bandwidth of the largest size, and the median extra time of small sizes. A
    fitted line's slope would depend on the noise of small sizes.
    """
    largest = max(times_ms)
    ms_a_byte = times_ms[largest] / largest
    small = [ms - size * ms_a_byte for size, ms in times_ms.items() if 2 * size * ms_a_byte < ms]
    latency_ms = min(statistics.median(small), times_ms[largest] / 2) if small else 0.0
    return latency_ms, algorithm_gbps(largest, (times_ms[largest] - latency_ms) / 1000)


def _pairs(found: Collectives, names: Sequence[str], bps: float) -> dict[tuple[str, str], float]:
    """Empty if a path was not measured, or for one host."""
    _, alone_gbps = link_matrix(found)
    if len(names) < 2 or len(alone_gbps) < len(names) * (len(names) - 1):
        return {}
    slowest_gbps = min(alone_gbps[pair] for pair in zip(names, [*names[1:], names[0]], strict=True))
    return {pair: gbps / slowest_gbps * bps for pair, gbps in alone_gbps.items()}
