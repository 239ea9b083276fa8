"""What was measured of a network, as a summary keeps it: operations by size, the line through them, links one by one.

    found.operation("all_reduce").busbw_gbps
    names, gbps = link_matrix(found)            gbps["v100", "a2000"]

How they are read from a run's events stands in `network`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

from orchestrator.record import Record, Words


class CollectiveTime(Record):
    """How long one operation took for one size. No time: `error` says why."""

    operation: str
    bytes: int
    """The size of the whole array."""
    iterations: int = 0
    time_ms: float | None = None
    """Median of what the slowest rank needed."""
    algbw_gbps: float | None = None
    busbw_gbps: float | None = None
    error: Words | None = None


class CollectiveOperation(Record):
    """One operation over all its sizes: what was measured at both ends, and time = alpha + bytes / beta between."""

    operation: str
    smallest_bytes: int
    latency_us: float
    """The latency of the smallest size."""
    largest_bytes: int
    busbw_gbps: float
    """The bus bandwidth at the largest size."""
    of_declared: float | None = None
    """busbw_gbps as a part of the slowest host's declared bandwidth."""
    alpha_us: float | None = None
    beta_gbps: float | None = None
    """Algorithm bandwidth; None where time does not grow with bytes."""
    worst_error: float | None = None
    """The largest distance of a measured time from the line, as a part of that time."""


class LinkSpeed(Record):
    """From one node to another, by itself."""

    source: str
    target: str
    gbps: float


class Collectives(Record):
    """What a run that measures the network found."""

    declared_gbps: float | None = None
    """Bandwidth of the slowest host, as the inventory says; None within one host."""
    times: tuple[CollectiveTime, ...] = ()
    operations: tuple[CollectiveOperation, ...] = ()
    links: tuple[LinkSpeed, ...] = ()

    def operation(self, name: str) -> CollectiveOperation | None:
        return next((each for each in self.operations if each.operation == name), None)


def link_matrix(found: Collectives) -> tuple[list[str], dict[tuple[str, str], float]]:
    """The nodes, and Gbps from one to another."""
    names = list(dict.fromkeys(end for link in found.links for end in (link.source, link.target)))
    return names, {(link.source, link.target): link.gbps for link in found.links}


class LinksCarried(Record):
    """What the hosts' links carried when they were measured."""

    job: str
    """That measured them."""
    gbps: Mapping[str, tuple[float, float]]
    """By node: the most that went out to one other node, and that came in from one."""


def links_carried(job: str, found: Collectives, nodes: Sequence[str]) -> LinksCarried | None:
    """Of a run of collectives; None where not every link between these nodes was measured.

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
