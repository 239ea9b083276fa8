"""Network measurements of a run of `--exp collectives`; formulas: `trainer.shared.alpha_beta`.

collectives = read_collectives(events, plan)
collectives.operation("all_reduce").of_declared  # 0.93 of the slowest host's declared bandwidth
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any

from orchestrator.jobs.metric_lines import count, number, text
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.record import Record, Words
from orchestrator.results.events import Events
from orchestrator.units import format_bytes
from trainer.shared.alpha_beta import BUS_FACTORS, algorithm_gbps, bus_factor, fit

EXPERIMENT = "collectives"
LIMIT = 10_000


def measures_collectives(plan: LaunchPlan) -> bool:
    return plan.kind == "experiment" and plan.exp == EXPERIMENT


def unpaced(plan: LaunchPlan) -> LaunchPlan:
    """Paced hosts compute nothing here, and their network is real."""
    return plan.model_copy(update={"nodes": tuple(node.model_copy(update={"paced": None}) for node in plan.nodes)})


def read_collectives(events: Events, plan: LaunchPlan) -> Collectives:
    """From rank 0."""
    read = (_time(event, plan.world_size) for event in events.of_rank(0, "collective", LIMIT))
    times = tuple(time for time in read if time)
    declared = [node.bandwidth_bps / 1e9 for node in plan.nodes if node.bandwidth_bps]
    slowest = min(declared, default=None) if len(plan.nodes) > 1 else None  # within one host no link is used
    names = dict.fromkeys(time.operation for time in times)
    operations = (_operation([time for time in times if time.operation == name], plan, slowest) for name in names)
    return Collectives(
        declared_gbps=slowest,
        times=times,
        operations=tuple(each for each in operations if each),
        links=tuple(_links(events, plan)),
    )


def not_measured(found: Collectives) -> Iterable[str]:
    """A sentence per operation."""
    if not found.times:
        yield "No measurement was recorded."
    names = dict.fromkeys(time.operation for time in found.times)
    for name in names:
        missing = [time for time in found.times if time.operation == name and time.time_ms is None]
        if missing:
            least = min(missing, key=lambda time: time.bytes)
            yield f"{name}, {format_bytes(least.bytes)} and more: {least.error or 'not measured'}."


def _links(events: Events, plan: LaunchPlan) -> Iterator[LinkSpeed]:
    node_of = {rank: node.name for node in plan.nodes for rank in node.rank_numbers}
    for event in events.of_rank(0, "link", LIMIT):
        source, target = (node_of.get(count(event, end)) for end in ("source", "target"))  # type: ignore[arg-type]
        size, time_ms = count(event, "bytes"), number(event, "time_ms")
        if source and target and size and time_ms is not None and 1e-6 < time_ms < 1e12:
            yield LinkSpeed(source=source, target=target, gbps=algorithm_gbps(size, time_ms / 1000))


def _time(event: Mapping[str, Any], world_size: int) -> CollectiveTime | None:
    operation, size, time_ms = text(event, "operation"), count(event, "bytes"), number(event, "time_ms")
    if operation not in BUS_FACTORS or not size:
        return None
    if time_ms is None or not 1e-6 < time_ms < 1e12:
        return CollectiveTime(operation=operation, bytes=size, error=text(event, "error"))
    gbps = algorithm_gbps(size, time_ms / 1000)
    return CollectiveTime(
        operation=operation,
        bytes=size,
        iterations=count(event, "iterations") or 0,
        time_ms=time_ms,
        algbw_gbps=gbps,
        busbw_gbps=gbps * bus_factor(operation, world_size),
    )


def _operation(times: list[CollectiveTime], plan: LaunchPlan, declared: float | None) -> CollectiveOperation | None:
    """times: of one operation."""
    points = {time.bytes: time.time_ms / 1000 for time in times if time.time_ms is not None}
    if not points:
        return None
    name, smallest, largest = times[0].operation, min(points), max(points)
    line = fit(list(points.items()))
    reached = algorithm_gbps(largest, points[largest]) * bus_factor(name, plan.world_size)
    return CollectiveOperation(
        operation=name,
        smallest_bytes=smallest,
        latency_us=1e6 * points[smallest],
        largest_bytes=largest,
        busbw_gbps=reached,
        of_declared=reached / declared if declared else None,
        alpha_us=1e6 * line.alpha_s if line else None,
        beta_gbps=line.gbps if line else None,
        worst_error=line.worst_error if line else None,
    )


# Network measurements as a summary stores them.
#
#     found.operation("all_reduce").busbw_gbps
#     names, gbps = link_matrix(found)            gbps["v100", "a2000"]


class CollectiveTime(Record):
    """Time of one operation at one size, or `error`."""

    operation: str
    bytes: int
    """The whole array's."""
    iterations: int = 0
    time_ms: float | None = None
    """Median of the slowest rank's times."""
    algbw_gbps: float | None = None
    busbw_gbps: float | None = None
    error: Words | None = None


class CollectiveOperation(Record):
    """One operation over all sizes: time = alpha + bytes / beta."""

    operation: str
    smallest_bytes: int
    latency_us: float
    """At the smallest size."""
    largest_bytes: int
    busbw_gbps: float
    """At the largest size."""
    of_declared: float | None = None
    """Relative to the slowest host's declared bandwidth."""
    alpha_us: float | None = None
    beta_gbps: float | None = None
    """Algorithm bandwidth; None if time does not grow with bytes."""
    worst_error: float | None = None
    """The largest relative distance of a time from the line."""


class LinkSpeed(Record):
    source: str
    target: str
    gbps: float


class Collectives(Record):
    declared_gbps: float | None = None
    """The slowest host's; None within one host."""
    times: tuple[CollectiveTime, ...] = ()
    operations: tuple[CollectiveOperation, ...] = ()
    links: tuple[LinkSpeed, ...] = ()

    def operation(self, name: str) -> CollectiveOperation | None:
        return next((each for each in self.operations if each.operation == name), None)


def link_matrix(found: Collectives) -> tuple[list[str], dict[tuple[str, str], float]]:
    """Nodes, and Gbps by (source, target)."""
    names = list(dict.fromkeys(end for link in found.links for end in (link.source, link.target)))
    return names, {(link.source, link.target): link.gbps for link in found.links}


class LinksCarried(Record):
    """Measured bandwidth of the hosts' links."""

    job: str
    """The measuring job."""
    gbps: Mapping[str, tuple[float, float]]
    """By node: the most to, and the most from, one other node."""


def links_carried(job: str, found: Collectives, nodes: Sequence[str]) -> LinksCarried | None:
    """None unless every link between these nodes was measured.

    >>> links = (LinkSpeed(source="a", target="b", gbps=2.3), LinkSpeed(source="b", target="a", gbps=2.2))
    >>> links_carried("collectives-1", Collectives(links=links), ["a", "b"]).gbps["a"]
    (2.3, 2.2)
    >>> links_carried("collectives-1", Collectives(links=links[:1]), ["a", "b"])
    """
    _, gbps = link_matrix(found)
    if not all(pair in gbps for pair in permutations(nodes, 2)):
        return None
    others = {name: [other for other in nodes if other != name] for name in nodes}
    most = {
        name: (max(gbps[name, other] for other in rest), max(gbps[other, name] for other in rest))
        for name, rest in others.items()
    }
    return LinksCarried(job=job, gbps=most)
