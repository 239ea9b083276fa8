"""Lower bounds for the update time of pipeline cuts, much cheaper than a simulation. Pure.

family = Family(chain, wire, course)
family.balanced()                   the cut with the least busy maximum, and its time
family.cuts(within_s=0.3)           every cut in which no stage or link is busier
family.lower_s((0, 38))             lower bound of this cut's update
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from orchestrator.forecast.links import LinkCosts
from orchestrator.forecast.pipeline.block_costs import Chain, StageHost, times_of
from orchestrator.forecast.pipeline.clock import Course, copy_s
from trainer.shared.pace import OPTIMISER

ROUNDING = 1e-12
Cut = tuple[int, ...]
"""The first block of each stage."""


class Family:
    """All cuts of a chain over these hosts in order."""

    def __init__(
        self,
        chain: Chain,
        wire: LinkCosts,
        course: Course,
    ) -> None:
        """course: its cut is ignored."""
        self.chain, self.course, self.hosts, self.wire = chain, course, course.hosts, wire
        self.blocks, self.stages = len(chain.blocks), len(course.hosts)
        routes = course.routes()
        self.smallest = min(route.size for route in routes)
        self.samples = course.batch
        largest = max(route.size for route in routes)
        self.counts = [-(-len(routes) // host.ranks) for host in self.hosts]
        self.held = [course.held(stage) for stage in range(self.stages)]
        self._sums = [_sum_within(host, chain, wire) for host in self.hosts]
        self._times = [
            _tasks(chain, host, count, self.samples / host.ranks, self.smallest, course.splits)
            for host, count in zip(self.hosts, self.counts, strict=True)
        ]
        self.busy = [each[0] for each in self._times]
        self._needs = [
            None if host.memory_bytes is None else self._memory(course.copies(chain, stage), largest * held)
            for stage, (host, held) in enumerate(zip(self.hosts, self.held, strict=True))
        ]
        sites = {site.name: site for site in wire.sites}
        self._byte_s = [
            8 / wire.cut_bps(sites[a.site], sites[b.site]) for a, b in zip(self.hosts, self.hosts[1:], strict=False)
        ]
        self._links_s = [self._sends_s(stage) for stage in range(self.stages - 1)]
        self._delays_s = [
            wire.cuts.local_message_s if a.site == b.site else wire.cuts.message_s
            for a, b in zip(self.hosts, self.hosts[1:], strict=False)
        ]

    def _sends_s(self, stage: int) -> tuple[float, ...]:
        """Link seconds, for a cut before each block."""
        if self.hosts[stage].site == self.hosts[stage + 1].site:
            return (0.0,) * self.blocks
        byte_s = self.samples * self._byte_s[stage]
        return (0.0, *(byte_s * self.chain.cut_bytes(end) for end in range(1, self.blocks)))

    def _memory(self, copies: int, samples: int) -> tuple[float, ...]:
        weights, kept = self.chain.weight_sums, self.chain.kept_sums
        return tuple(copies * weight + samples * each for weight, each in zip(weights, kept, strict=True))

    # ---- which cuts there are ----------------------------------------------------------------------------------------

    def _furthest(self, stage: int, first: int, within_s: float) -> int:
        """The end of the longest stretch within the time and memory."""
        end = bisect_right(self.busy[stage], self.busy[stage][first] + within_s + ROUNDING) - 1
        needs, memory = self._needs[stage], self.hosts[stage].memory_bytes
        if needs is not None and memory is not None:
            end = min(end, bisect_right(needs, needs[first] + memory) - 1)
        end = min(end, self.blocks - (self.stages - 1 - stage))
        while end > first and not self._crosses(stage, end, within_s):
            end -= 1
        return end

    def _crosses(self, stage: int, end: int, within_s: float) -> bool:
        return stage == self.stages - 1 or self._links_s[stage][end] <= within_s + ROUNDING

    def _nearest(self, stage: int, end: int, within_s: float) -> int:
        """The first block of the longest stretch up to this end."""
        first = bisect_left(self.busy[stage], self.busy[stage][end] - within_s - ROUNDING)
        needs, memory = self._needs[stage], self.hosts[stage].memory_bytes
        if needs is not None and memory is not None:
            first = max(first, bisect_left(needs, needs[end] - memory))
        return max(first, stage)

    def _feasible(self, within_s: float) -> Cut | None:
        starts, first = [], 0
        for stage in range(self.stages):
            starts.append(first)
            end = self._furthest(stage, first, within_s)
            if end <= first:
                return self._from_any(within_s)
            first = end
        return tuple(starts) if first == self.blocks else None

    def _from_any(self, within_s: float) -> Cut | None:
        # Every stage needs a block. A stage may have to start before the furthest end of the stages before it, so all
        # possible starts are tried.
        firsts = [{0}]
        for stage in range(self.stages - 1):
            reached = (range(first + 1, self._furthest(stage, first, within_s) + 1) for first in firsts[-1])
            firsts.append({end for ends in reached for end in ends if self._crosses(stage, end, within_s)})
        starts, end = [], self.blocks
        for stage in range(self.stages - 1, -1, -1):
            fitting = (first for first in firsts[stage] if first < end <= self._furthest(stage, first, within_s))
            first = max(fitting, default=-1)
            if first < 0:
                return None
            starts.append(first)
            end = first
        return tuple(reversed(starts))

    def balanced(self) -> tuple[float, Cut] | None:
        """The least maximum of busy seconds, and its cut. None if memory is too small."""
        high = max(each for seconds in (*self.busy, *self._links_s) for each in seconds)
        found = self._feasible(high)
        if found is None:
            return None
        low = 0.0
        while high - low > 1e-4 * high:
            middle = (low + high) / 2
            cut = self._feasible(middle)
            if cut is None:
                low = middle
            else:
                high, found = middle, cut
        return low, found

    def cuts(self, within_s: float) -> Iterator[Cut]:
        """No stage or link is busier than this, and memory suffices."""
        earliest = [0] * self.stages + [self.blocks]
        for stage in range(self.stages - 1, 0, -1):
            earliest[stage] = self._nearest(stage, earliest[stage + 1], within_s)
        yield from self._cuts((0,), earliest, within_s)

    def _cuts(self, starts: Cut, earliest: Sequence[int], within_s: float) -> Iterator[Cut]:
        stage, first = len(starts) - 1, starts[-1]
        furthest = self._furthest(stage, first, within_s)
        if stage == self.stages - 1:
            if furthest == self.blocks:
                yield starts
            return
        for end in range(max(first + 1, earliest[stage + 1]), furthest + 1):
            if self._crosses(stage, end, within_s):
                yield from self._cuts((*starts, end), earliest, within_s)

    def holds(self, starts: Cut) -> bool:
        return all(
            needs is None or host.memory_bytes is None or needs[end] - needs[first] <= host.memory_bytes
            for needs, host, first, end in zip(self._needs, self.hosts, starts, (*starts[1:], self.blocks), strict=True)
        )

    # ---- what a cut takes at least -----------------------------------------------------------------------------------

    # A stage is busy with its own tasks. Twice per update it can do little: from its first FORWARD until its gradient
    # returns, only more FORWARDs, up to its limit; and from its last BACKWARD until the next update's first input, only
    # WEIGHTS of held micro-batches, sums with its host's ranks, and the optimiser. A micro-batch holds memory until its
    # WEIGHTS, which limits how many overlap. In late updates all but the last stage are only limited by memory, and
    # by beginning an update after the last but one.
    def lower_s(self, starts: Cut) -> float:
        late = self.course.late
        exact_s = self._lower_s(starts, is_late=False) if late < 1 else 0.0
        late_s = self._lower_s(starts, is_late=True) if late > 0 else 0.0
        return (1 - late) * exact_s + late * late_s

    def _lower_s(self, starts: Cut, *, is_late: bool) -> float:
        ends = (*starts[1:], self.blocks)
        parts = [
            [sums[end] - sums[first] for sums in times]
            for times, first, end in zip(self._times, starts, ends, strict=True)
        ]
        links = [self._byte_s[stage] * self.chain.cut_bytes(first) for stage, first in enumerate(starts[1:])]
        one_way = [delay_s + self.smallest * link for delay_s, link in zip(self._delays_s, links, strict=True)]
        least = 0.0
        until_back = [0.0] * self.stages
        for stage in range(self.stages - 2, -1, -1):
            _, forward, backward, _, _ = parts[stage + 1]
            until_back[stage] = until_back[stage + 1] + 2 * one_way[stage] + forward + backward
        until_next = 0.0
        for stage, (busy, forward, backward, weights, optimiser) in enumerate(parts):
            held = min(self.held[stage], self.counts[stage] if self.hosts[stage].ranks == 1 else self.held[stage])
            at_end = optimiser + self._sums[stage](starts[stage], ends[stage])
            at_first = max(0.0, until_back[stage] - (held - 1) * forward)
            at_last = max(0.0, until_next - held * weights - at_end)
            turn_s = forward + until_back[stage] + backward + weights
            in_turn = -(-self.counts[stage] // held) * turn_s
            if is_late and stage + 1 < self.stages:
                at_end += copy_s(self.chain, starts[stage], ends[stage], self.wire)
                overlapping = max((in_turn + at_end) / 2, self.counts[stage] * turn_s / self.held[stage])
                least = max(least, busy - optimiser + at_end, overlapping)
                continue
            least = max(least, busy - optimiser + at_end + at_first + at_last, in_turn + at_end)
            if stage + 1 < self.stages:
                own_s = weights + at_end if stage == 0 else 0.0
                until_next += own_s + forward + backward + 2 * one_way[stage]
        # A host sends to both neighbours over one interface; transfers inside a host are free.
        over = [
            link if a.site != b.site else 0.0 for link, a, b in zip(links, self.hosts, self.hosts[1:], strict=False)
        ]
        out = [self.samples * (before + behind) for before, behind in zip([0.0, *over], [*over, 0.0], strict=True)]
        return max(least, *out)


@lru_cache(maxsize=512)
def _tasks(
    chain: Chain, host: StageHost, count: int, samples: float, smallest: int, splits: bool
) -> tuple[tuple[float, ...], ...]:
    """Seconds up to each block: an update of a rank with `count` micro-batches; FORWARD, BACKWARD and WEIGHTS of the
    smallest micro-batch; the optimiser.
    """
    times = times_of(chain, host)
    tasks = _added(*(task.up_to(count, samples) for task in times.tasks))
    optimiser = tuple(OPTIMISER * each for each in tasks)
    forward, backward, weights = (task.up_to(1, smallest) for task in times.tasks)
    if not splits:
        backward, weights = _added(backward, weights), (0.0,) * len(weights)
    return _added(tasks, optimiser), forward, backward, weights, optimiser


def _added(*sums: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*sums, strict=True)))


def _sum_within(host: StageHost, chain: Chain, wire: LinkCosts) -> Callable[[int, int], float]:
    """Seconds to add up gradients of blocks `first` to `end - 1`."""
    if host.ranks == 1:
        return lambda first, end: 0.0
    sites = [dataclasses.replace(site, ranks=host.ranks) for site in wire.sites if site.name == host.site]
    within = LinkCosts(sites, wire.costs, wire.pairs)
    return lru_cache(lambda first, end: within.sum_s(chain.weight_bytes(first, end)))
