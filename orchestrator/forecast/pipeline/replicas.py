"""Several pipelines beside each other, for many hosts: the more stages, the longer each waits for the others. Pure.

    found = solve_replicas(chain, hosts, wire, batch=2048, replicas=2)
    [course.hosts for course in found.courses], found.seconds

Each takes the part of the batch that its hosts' speeds are of all, all are cut at the same blocks, and the gradients of
each stage add up over the pipelines, or its weights become their mean now and then. Hosts are dealt out so that stages
beside each other are alike: each pipeline has one of the fastest, one of the next.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.forecast.links import LinkCosts
from orchestrator.forecast.pipeline.averages import Averages, joined_s
from orchestrator.forecast.pipeline.bound import Cut, Family
from orchestrator.forecast.pipeline.chain import Chain
from orchestrator.forecast.pipeline.course import Course
from orchestrator.forecast.pipeline.solve import Space, solve
from orchestrator.forecast.pipeline.stage_host import StageHost
from trainer.shared.shares import scale_shares

MOST_STAGES = 3
"""Of each pipeline beside others; with more, every order of stages is too many."""
MOST_APART = 6
"""Ranks up to which each is tried as a stage of its own."""
PLAYED = 8
"""Of all cuts that are looked at by their bounds, so many are played out."""


@dataclass(frozen=True)
class Beside:
    """courses: one of each pipeline, all with the same cuts. seconds: of an update."""

    courses: tuple[Course, ...]
    seconds: float


def solve_all(
    chain: Chain,
    hosts: Sequence[StageHost],
    wire: LinkCosts,
    batch: int,
    space: Space | None = None,
    averages: Averages | None = None,
) -> Beside | None:
    """One pipeline or several, whichever takes least; a host's ranks share a stage, or hold one each, which leaves no
    gradients to add up. None where memory holds none. averages: several that do so; one has none to average with.
    """
    space = space or Space()
    found = [] if averages else list(_single(chain, hosts, wire, batch, space))
    for replicas in range(2, len(hosts) // 2 + 1):
        if len(hosts) % replicas == 0 and len(hosts) // replicas <= MOST_STAGES:
            found += (
                [beside] if (beside := solve_replicas(chain, hosts, wire, batch, replicas, space, averages)) else []
            )
    return min(found, key=lambda each: each.seconds, default=None)


def _single(chain: Chain, hosts: Sequence[StageHost], wire: LinkCosts, batch: int, space: Space) -> Iterator[Beside]:
    apart = tuple(rank for host in hosts for rank in host.apart)
    for kind in [hosts, apart] if len(hosts) < len(apart) <= MOST_APART else [hosts]:
        if one := solve(chain, kind, wire, batch, space):
            yield Beside((one.course,), one.seconds)


def solve_replicas(
    chain: Chain,
    hosts: Sequence[StageHost],
    wire: LinkCosts,
    batch: int,
    replicas: int,
    space: Space | None = None,
    averages: Averages | None = None,
) -> Beside | None:
    """So many pipelines of as many stages each. None where memory holds none. Not proved to be the best."""
    space = space or Space()
    options = []
    for groups in _orders(hosts, replicas):
        parts = scale_shares([round(1000 * sum(host.samples_per_s for host in group)) for group in groups], batch)
        for count in space.counts:
            if min(parts) >= count * space.least_samples * max(group[0].ranks for group in groups):
                options += _cuts(chain, wire, groups, parts, count, space)
    best = sorted(options, key=lambda option: option[0])[:PLAYED]
    played = [Beside(courses, joined_s(chain, courses, wire, averages)) for _, courses in best]
    return min(played, key=lambda each: each.seconds, default=None)


def _orders(hosts: Sequence[StageHost], replicas: int) -> Iterator[tuple[tuple[StageHost, ...], ...]]:
    """Hosts by speed, in rows of one for each pipeline; the rows are stages, in every order."""
    by_speed = sorted(hosts, key=lambda host: -host.samples_per_s)
    rows = [by_speed[first : first + replicas] for first in range(0, len(by_speed), replicas)]
    rows = [row[::-1] if number % 2 else row for number, row in enumerate(rows)]
    for order in itertools.permutations(rows):
        yield tuple(zip(*order, strict=True))


def _cuts(
    chain: Chain,
    wire: LinkCosts,
    groups: Sequence[tuple[StageHost, ...]],
    parts: Sequence[int],
    count: int,
    space: Space,
) -> list[tuple[float, tuple[Course, ...]]]:
    """Cuts that suit each pipeline by itself, with what the slowest of all takes at least."""
    plain = [
        Course(group, (0,) * len(group), part, count, space.in_flight or 0, space.splits)
        for group, part in zip(groups, parts, strict=True)
    ]
    families = [Family(chain, wire, course) for course in plain]
    tried = {found[1] for family in families if (found := family.balanced())}
    tried |= {_between(cuts) for cuts in itertools.combinations(sorted(tried), 2)}
    return [
        (
            max(family.lower_s(cut) for family in families),
            tuple(dataclasses.replace(course, starts=cut) for course in plain),
        )
        for cut in tried
        if all(family.holds(cut) for family in families)
    ]


def _between(cuts: tuple[Cut, Cut]) -> Cut:
    """In the middle of two, each stage has a block at least, since it has in both."""
    return tuple((a + b) // 2 for a, b in zip(*cuts, strict=True))
