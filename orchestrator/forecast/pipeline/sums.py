"""Gradient sums at the end of an update of pipelines: all ranks with a block add up its gradients, on one host or in
parallel pipelines. Pure.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestrator.forecast.links import LinkCosts
from orchestrator.forecast.pipeline.block_costs import Chain, StageHost
from orchestrator.forecast.pipeline.course import Course


@dataclass(frozen=True)
class GradientSum:
    """holders: (pipeline, stage)."""

    holders: tuple[tuple[int, int], ...]
    seconds: float


def sums_of(chain: Chain, courses: Sequence[Course], wire: LinkCosts) -> tuple[GradientSum, ...]:
    """By stretch of blocks that the same ranks hold."""
    if len(courses) == 1 and all(host.ranks == 1 for host in courses[0].hosts):
        return ()
    cuts = sorted({start for course in courses for start in course.starts} | {len(chain.blocks)})
    found = []
    for first, end in itertools.pairwise(cuts):
        holders = tuple(
            (number, max(stage for stage, start in enumerate(course.starts) if start <= first))
            for number, course in enumerate(courses)
        )
        hosts = _ranks_of_sites(courses[number].hosts[stage] for number, stage in holders)
        if sum(hosts.values()) > 1:
            sites = [dataclasses.replace(site, ranks=hosts[site.name]) for site in wire.sites if site.name in hosts]
            among = LinkCosts(sites, wire.costs, wire.pairs)
            found.append(GradientSum(holders, among.sum_s(chain.weight_bytes(first, end))))
    return tuple(found)


def _ranks_of_sites(hosts: Iterable[StageHost]) -> dict[str, int]:
    found: dict[str, int] = {}
    for host in hosts:
        found[host.site] = found.get(host.site, 0) + host.ranks
    return found
