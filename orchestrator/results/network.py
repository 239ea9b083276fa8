"""What a run of `--exp collectives` found out about the network.

Takes the ranks' events and the plan, gives the measurements and, for each operation, the line through them:

    collectives = read_collectives(events, plan)
    collectives.operation("all_reduce").of_declared  # 0.93 of the slowest host's declared bandwidth

Bandwidths and lines are computed again from bytes and times, as `trainer.shared.alpha_beta` defines them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from orchestrator.jobs.metric_lines import count, number, text
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.results.collectives import CollectiveOperation, Collectives, CollectiveTime, LinkSpeed
from orchestrator.results.events import Events
from orchestrator.units import format_bytes
from trainer.shared.alpha_beta import BUS_FACTORS, algorithm_gbps, bus_factor, fit

EXPERIMENT = "collectives"
LIMIT = 10_000
"""Measurements of one run that are looked at."""


def measures_collectives(plan: LaunchPlan) -> bool:
    return plan.kind == "experiment" and plan.exp == EXPERIMENT


def unpaced(plan: LaunchPlan) -> LaunchPlan:
    """A host that stands in for a GPU computes nothing here, and its network is its own."""
    return plan.model_copy(update={"nodes": tuple(node.model_copy(update={"paced": None}) for node in plan.nodes)})


def read_collectives(events: Events, plan: LaunchPlan) -> Collectives:
    """Rank 0's measurements; invalid lines are left out."""
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
    """A sentence for each operation that was not measured at all sizes."""
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
    """times: of one operation. None where none of them could be measured."""
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
