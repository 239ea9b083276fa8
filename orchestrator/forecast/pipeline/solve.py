"""The fastest cut of a pipeline: order of hosts, blocks, micro-batches. Pure.

    found = solve(chain, [v100, a2000], wire, batch=256)
    found.seconds, found.course.starts, found.is_proved         0.22, (0, 14), True

Candidates are ranked by lower bounds (`bound`, microseconds each); promising ones are simulated (`clock`) until no
bound is below the best.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.forecast.links import LinkCosts
from orchestrator.forecast.pipeline.block_costs import Chain, StageHost
from orchestrator.forecast.pipeline.bound import Cut, Family
from orchestrator.forecast.pipeline.clock import Course, update_seconds
from trainer.shared.stages import SPARE

# Per micro-batch: smaller BatchNorm groups have noisier statistics. Chosen, not measured.
LEAST_SAMPLES = 8
COUNTS = tuple(sorted({base << power for base in (1, 3, 5) for power in range(8)}))
"""Per rank of the first stage."""
# Within this of the best, the fewest and so largest micro-batches win: a run's shortfall grows with their number
# (docs/cutting.md). Gains below a quarter of it are not searched.
NEAR = 0.02
ALL_ORDERS = 4
"""Hosts up to which every order is tried."""
# Micro-batches times stages simulated, and cuts bounded: about half a second of one core each. With three times as
# many, of 14 random clusters 3 got updates 1 to 5 % shorter, and one, of 65,536 samples an update, 30 %.
MOST_PLAYED, MOST_BOUNDS = 20_000, 20_000
FIRST = 6
"""Families simulated first, besides the most promising per number of micro-batches."""
CLIMBED = 3
"""The best of these are improved step by step."""


@dataclass(frozen=True)
class Space:
    """counts, in_flight: `accumulate` and `in_flight` if the user chose them. late, clips: see `Course`. near: see
    NEAR.
    """

    counts: tuple[int, ...] = COUNTS
    in_flight: int | None = None
    splits: bool = True
    late: float = 0.0
    clips: bool = False
    least_samples: int = LEAST_SAMPLES
    near: float = NEAR


@dataclass(frozen=True)
class Solved:
    """is_proved: nothing in the space is faster; False if the search was cut short."""

    course: Course
    seconds: float
    is_proved: bool


def solve(
    chain: Chain, hosts: Sequence[StageHost], wire: LinkCosts, batch: int, space: Space = Space()
) -> Solved | None:
    """None if no cut fits their memory, or there are more hosts than blocks."""
    if len(hosts) > len(chain.blocks):
        return None
    return _Search(chain, wire, space).run(hosts, batch)


@dataclass(frozen=True)
class _Option:
    """bound_s: the least busy maximum."""

    family: Family
    bound_s: float
    balanced: Cut


class _Search:
    def __init__(self, chain: Chain, wire: LinkCosts, space: Space) -> None:
        self.chain, self.wire, self.space = chain, wire, space
        self.played: dict[Course, float] = {}
        self.left, self.bounds_left = MOST_PLAYED, MOST_BOUNDS
        self.is_proved = True
        self.worth = 1 - space.near / 4

    def run(self, hosts: Sequence[StageHost], batch: int) -> Solved | None:
        options = sorted(self._options(hosts, batch), key=lambda option: option.bound_s)
        if not options:
            return None
        best = self._first(options)
        best = self._better(options, self.played[best], best) or best
        fewer = self._with_fewer(options, best)
        return Solved(fewer, self.played[fewer], self.is_proved and len(hosts) <= ALL_ORDERS)

    # ---- what there is -----------------------------------------------------------------------------------------------

    def _options(self, hosts: Sequence[StageHost], batch: int) -> Iterator[_Option]:
        for order in orders_of(hosts, self.wire):
            most = max(1, batch // order[0].ranks // self.space.least_samples)
            counts = [count for count in self.space.counts if count <= most] or self.space.counts[:1]
            for count in counts:
                if count * order[0].ranks <= batch:
                    course = Course(order, (0,) * len(order), batch, count, splits=self.space.splits)
                    yield from self._held(dataclasses.replace(course, late=self.space.late, clips=self.space.clips))

    def _held(self, course: Course) -> Iterator[_Option]:
        # More micro-batches in flight and delayed weight gradients are assumed never slower, which holds except for
        # about 1 % if hosts have several ranks. Fewer in flight only if memory may require it.
        asked = self.space.in_flight
        most = len(course.hosts) + SPARE
        for in_flight in (0, *range(most - 1, 0, -1)) if asked is None else (asked,):
            each = dataclasses.replace(course, in_flight=in_flight)
            family = Family(self.chain, self.wire, each)
            if (found := family.balanced()) is not None:
                yield _Option(family, *found)
            if _holds_all(self.chain, each):
                return

    # ---- the search --------------------------------------------------------------------------------------------------

    def _play(self, option: _Option, cut: Cut) -> tuple[float, Course]:
        course = dataclasses.replace(option.family.course, starts=cut)
        if course not in self.played:
            self.left -= len(course.routes()) * len(course.hosts)
            self.played[course] = update_seconds(self.chain, [course], self.wire)
        return self.played[course], course

    def _first(self, options: Sequence[_Option]) -> Course:
        """Balanced cuts, and the neighbours of the best."""
        by_bound = sorted(options, key=lambda option: option.family.lower_s(option.balanced))
        starts = [*by_bound[:FIRST], *{option.family.course.count: option for option in reversed(by_bound)}.values()]
        played = sorted((self._play(option, option.balanced)[0], number) for number, option in enumerate(starts))
        for _, number in played[:CLIMBED]:
            self._climb(starts[number])
        return min(self.played, key=lambda course: self.played[course])

    def _climb(self, option: _Option) -> None:
        cut = option.balanced
        while self.left > MOST_PLAYED // 2:
            near = filter(option.family.holds, neighbours(cut, option.family.blocks))
            better = min(near, key=lambda other: self._play(option, other)[0], default=cut)
            if self._play(option, better)[0] >= self._play(option, cut)[0]:
                return
            cut = better

    def _better(self, options: Sequence[_Option], limit_s: float, best: Course | None = None) -> Course | None:
        """The best below the limit, else `best`."""
        for option in options:
            if option.bound_s >= self.worth * limit_s:
                break
            for lower_s, cut in self._promising(option, self.worth * limit_s):
                if lower_s >= self.worth * limit_s:
                    break
                if self.left <= 0:
                    self.is_proved = False
                    return best
                seconds, course = self._play(option, cut)
                if seconds < limit_s:
                    limit_s, best = seconds, course
        return best

    def _promising(self, option: _Option, limit_s: float) -> list[tuple[float, Cut]]:
        found = []
        for cut in option.family.cuts(limit_s):
            if self.bounds_left <= 0:
                self.is_proved = False
                break
            self.bounds_left -= 1
            lower_s = option.family.lower_s(cut)
            if lower_s < limit_s:
                found.append((lower_s, cut))
        return sorted(found)

    def _with_fewer(self, options: Sequence[_Option], best: Course) -> Course:
        """About as fast with fewer micro-batches."""
        limit_s = (1 + self.space.near) * self.played[best]
        proved = self.is_proved
        for count in sorted({option.family.course.count for option in options}):
            if count >= best.count or self.space.near <= 0:
                break
            same = [option for option in options if option.family.course.count == count]
            if found := self._better(same, limit_s):
                best = found
                break
        self.is_proved = proved
        return best


def orders_of(hosts: Sequence[StageHost], wire: LinkCosts) -> Iterator[tuple[StageHost, ...]]:
    """Only a few good orders of many hosts."""
    if len(hosts) > ALL_ORDERS:
        by_speed = sorted(hosts, key=lambda host: -host.samples_per_s)
        middle = (*by_speed[::2], *reversed(by_speed[1::2]))  # the slowest in the middle
        yield from dict.fromkeys((tuple(by_speed), tuple(reversed(by_speed)), middle))
        return
    links = {site.name: (site.up_bps, site.down_bps) for site in wire.sites}
    seen = set()
    for order in itertools.permutations(hosts):
        kinds = tuple(
            (host.site if wire.pairs else "", dataclasses.replace(host, name="", site="-"), links[host.site])
            for host in order
        )
        if kinds not in seen:
            seen.add(kinds)
            yield order


def _holds_all(chain: Chain, course: Course) -> bool:
    """Whether each host could hold the whole network."""
    largest, end = max(one.size for one in course.routes()), len(chain.blocks)
    return all(
        host.memory_bytes is None
        or course.copies(chain, stage) * chain.weight_bytes(0, end)
        + course.held(stage) * largest * chain.kept_bytes(0, end)
        <= host.memory_bytes
        for stage, host in enumerate(course.hosts)
    )


def neighbours(cut: Cut, blocks: int) -> Iterator[Cut]:
    """With one block moved to the next stage."""
    for stage in range(1, len(cut)):
        for start in (cut[stage] - 1, cut[stage] + 1):
            moved = (*cut[:stage], start, *cut[stage + 1 :])
            if list(moved) == sorted(set(moved)) and start < blocks:
                yield moved
