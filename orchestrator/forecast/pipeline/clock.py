"""Update time of a pipeline, simulated task by task and message by message. Pure.

    update_seconds(chain, [course], wire)

Ranks follow `trainer.shared.stages`, like in a run. A message occupies its sender's outgoing and its receiver's
incoming link for its bytes, one message after another; its overhead only delays it. A stage begins its next update
after its own optimiser, so updates overlap; the first ones are left out. With `fidelity=late` all stages but the last
also take forwards of the next update before this one is over.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from orchestrator.forecast.links import LinkCosts
from orchestrator.forecast.pipeline.block_costs import Chain, Line, StageHost, times_of
from trainer.shared import gpu_work
from trainer.shared.pace import OPTIMISER
from trainer.shared.shares import equal_shares, micro_batch_sizes
from trainer.shared.stages import Pipelines, Route, Stage, StageSchedule, Task, format_stages, in_flight_of_rank, routes

EXACT, LATE = (2, 4), (6, 18)
"""Updates before the steady state, and in total. Late updates alternate in turns of up to 4."""


def update_seconds(chain: Chain, courses: Sequence[Course], wire: LinkCosts) -> float:
    """In the steady state; the mean of a run's exact and late updates. courses: parallel pipelines. wire: with a site
    per host.
    """
    late = courses[0].late
    exact_s = _Clock(chain, courses, wire, is_late=False).run() if late < 1 else 0.0
    late_s = _Clock(chain, courses, wire, is_late=True).run() if late > 0 else 0.0
    return (1 - late) * exact_s + late * late_s


def copy_s(chain: Chain, first: int, end: int, wire: LinkCosts) -> float:
    """Seconds in which a late stage keeps its weights for the next update but one."""
    return wire.costs.work_s(gpu_work.copy(chain.weight_bytes(first, end)))


@dataclass(eq=False, slots=True)
class _Link:
    """When a host's interface is free again, per direction."""

    out_s: float = 0.0
    in_s: float = 0.0


@dataclass(eq=False, slots=True)
class _Own:
    """A micro-batch on one rank: task times, neighbours, transfer times. later_s: left to WEIGHTS."""

    forward_s: float
    backward_s: float
    later_s: float
    behind: _Rank | None = None
    before: _Rank | None = None
    on_s: float = 0.0
    back_s: float = 0.0
    place_behind: int = 0
    """Index on the rank behind."""
    place_before: int = 0


@dataclass(eq=False, slots=True)
class _Rank:
    link: _Link
    in_flight: int
    splits: bool
    is_first: bool
    is_last: bool
    is_late: bool
    own: list[_Own] = field(default_factory=list)
    optimiser_s: float = 0.0
    sums: list[_Sum] = field(default_factory=list)
    sums_left: int = 0
    update: int = 0
    begun: list[float] = field(default_factory=list)
    """Start of each update's first task."""
    is_busy: bool = False
    turns: StageSchedule = field(default_factory=lambda: StageSchedule(0, 1))
    inputs: set[int] = field(default_factory=set)
    """Indices of received inputs, counted over all updates."""
    gradients: set[int] = field(default_factory=set)

    def begin(self) -> None:
        """The next update, of which a late stage may have done some forwards."""
        following = len(self.own) if self.is_late else 0
        self.turns = StageSchedule(len(self.own), self.in_flight, self.splits, following, self.turns.ahead)


@dataclass(eq=False, slots=True)
class _Sum:
    """A gradient sum, once per update, when the last rank is ready."""

    ranks: list[_Rank]
    seconds: float
    there: int = 0


FREE, INPUT, GRADIENT, SUMMED, UPDATED = range(5)


class _Clock:
    def __init__(self, chain: Chain, courses: Sequence[Course], wire: LinkCosts, *, is_late: bool) -> None:
        self.is_late = is_late
        self.left_out, self.updates = LATE if is_late else EXACT
        self.wire, self.delay_s = wire, wire.cuts.message_s
        self.sites = {site.name: site for site in wire.sites}
        self.links = {site.name: _Link() for site in wire.sites}
        self.events: list[tuple[float, int, int, _Rank, int]] = []
        self.asked = 0
        ranks = [self._course(chain, course) for course in courses]
        for each in sums_of(chain, courses, wire):
            members = [rank for number, stage in each.holders for rank in ranks[number][stage]]
            one = _Sum(members, each.seconds)
            for rank in members:
                rank.sums.append(one)
        self.ranks = [rank for stages in ranks for lanes in stages for rank in lanes]
        self.going = sum(1 for rank in self.ranks if rank.own)

    # ---- who there is ------------------------------------------------------------------------------------------------

    def _course(self, chain: Chain, course: Course) -> list[list[_Rank]]:
        """Ranks by stage, with their micro-batches."""
        costs = course.stages(chain)
        stages = [
            [self._rank(cost, course, number, number == len(costs) - 1) for _ in range(cost.host.ranks)]
            for number, cost in enumerate(costs)
        ]
        seconds = [self._byte_s(a, b) for a, b in itertools.pairwise(costs)]
        for one in course.routes():
            passed: tuple[_Rank, _Own, int] | None = None
            for stage, (cost, lane) in enumerate(zip(costs, one.lanes, strict=True)):
                rank = stages[stage][lane]
                own = _own(cost, one.size, course.splits)
                if passed:
                    travels_s = one.size * seconds[stage - 1]
                    own.before, own.place_before, own.back_s = passed[0], passed[2], travels_s
                    passed[1].behind, passed[1].place_behind, passed[1].on_s = rank, len(rank.own), travels_s
                passed = rank, own, len(rank.own)
                rank.own.append(own)
        ends = course.ends(chain)
        for lanes, first, end in zip(stages, course.starts, ends, strict=True):
            for rank in lanes:
                rank.optimiser_s = OPTIMISER * sum(own.forward_s + own.backward_s + own.later_s for own in rank.own)
                rank.optimiser_s += copy_s(chain, first, end, self.wire) if rank.is_late else 0.0
                rank.begin()
        return stages

    def _rank(self, cost: StageCost, course: Course, stage: int, is_last: bool) -> _Rank:
        is_late = self.is_late and not is_last
        return _Rank(self.links[cost.host.site], cost.in_flight, course.splits, stage == 0, is_last, is_late)

    def _byte_s(self, source: StageCost, target: StageCost) -> float:
        """Seconds per sample on both hosts' links, or inside a host."""
        return 8 * source.cut_bytes / self.wire.cut_bps(self.sites[source.host.site], self.sites[target.host.site])

    # ---- what happens ------------------------------------------------------------------------------------------------

    def run(self) -> float:
        for rank in self.ranks:
            self._wake(rank, 0.0)
        while self.going:
            now, _, what, rank, place = heapq.heappop(self.events)
            if what == INPUT:
                rank.inputs.add(place)
            elif what == GRADIENT:
                rank.gradients.add(place)
            elif what == FREE:
                rank.is_busy = False
            elif what == SUMMED:
                self._summed(rank, now)
                continue
            else:
                rank.update += 1
                rank.begin()
                rank.is_busy = False
            if not rank.is_busy:
                self._wake(rank, now)
        begun = (rank.begun for rank in self.ranks if rank.own)
        return max(each[self.updates] - each[self.left_out] for each in begun) / (self.updates - self.left_out)

    def _at(self, time_s: float, what: int, rank: _Rank, place: int = 0) -> None:
        self.asked += 1
        heapq.heappush(self.events, (time_s, self.asked, what, rank, place))

    def _wake(self, rank: _Rank, now: float) -> None:
        turns = rank.turns
        if turns.is_over:
            self._over(rank, now)
            return
        base = rank.update * turns.count
        forward, backward = base + turns.forwards, base + turns.backwards
        task = turns.take(
            has_input=rank.is_first or forward in rank.inputs, has_gradient=rank.is_last or backward in rank.gradients
        )
        if task is None:
            return
        rank.is_busy = True
        if task is Task.FORWARD:
            self._forward(rank, now, forward)
        elif task is Task.BACKWARD:
            rank.gradients.discard(backward)
            own = rank.own[backward - base]
            end = now + own.backward_s
            self._at(end, FREE, rank)
            if own.before:
                place = rank.update * len(own.before.own) + own.place_before
                self._sends(end, rank, own.before, own.back_s, GRADIENT, place)
        else:
            self._at(now + rank.own[turns.weights - 1].later_s, FREE, rank)

    def _forward(self, rank: _Rank, now: float, place: int) -> None:
        update, number = divmod(place, len(rank.own))
        own = rank.own[number]
        if len(rank.begun) == update:
            rank.begun.append(now)
            self.going -= update == self.updates
        rank.inputs.discard(place)
        end = now + own.forward_s
        self._at(end, FREE, rank)
        if own.behind:
            place = update * len(own.behind.own) + own.place_behind
            self._sends(end, rank, own.behind, own.on_s, INPUT, place)

    def _sends(self, now: float, source: _Rank, target: _Rank, travels_s: float, what: int, place: int) -> None:
        """now: when the message is ready. Reserving ahead is safe, since the rank sends nothing else until then."""
        out, into = source.link, target.link
        if out is into:
            self._at(now + travels_s + self.wire.cuts.local_message_s, what, target, place)
            return
        gone = max(now, out.out_s, into.in_s) + travels_s
        out.out_s = into.in_s = gone
        self._at(gone + self.delay_s, what, target, place)

    def _over(self, rank: _Rank, now: float) -> None:
        """Tasks are done: gradient sums, then the optimiser."""
        rank.is_busy = True
        rank.sums_left = len(rank.sums)
        if not rank.sums:
            self._at(now + rank.optimiser_s, UPDATED, rank)
        for one in rank.sums:
            one.there += 1
            if one.there == len(one.ranks):
                one.there = 0
                self._adds_up(one, now)

    def _adds_up(self, one: _Sum, now: float) -> None:
        links = {id(rank.link): rank.link for rank in one.ranks}.values()
        crosses = len(links) > 1
        end = max([now, *(max(link.out_s, link.in_s) for link in links if crosses)]) + one.seconds
        for link in links if crosses else ():
            link.out_s = link.in_s = end
        for rank in one.ranks:
            self._at(end, SUMMED, rank)

    def _summed(self, rank: _Rank, now: float) -> None:
        rank.sums_left -= 1
        if not rank.sums_left:
            self._at(now + rank.optimiser_s, UPDATED, rank)


def _own(cost: StageCost, size: int, splits: bool) -> _Own:
    backward_s, weights_s = cost.backward.at(size), cost.weights.at(size)
    if splits:
        return _Own(cost.forward.at(size), backward_s, weights_s)
    return _Own(cost.forward.at(size), backward_s + weights_s, 0.0)


# A network cut over hosts, and the cost of its stages. Pure. Same rules as `trainer.pipeline.stage_layout`.
#
# course = Course((a2000, v100), starts=(0, 20), batch=256, count=16)
# course.stages(chain)[1].forward.at(16)          seconds of FORWARD of 16 samples in the second stage

LATE_COPIES = 2
"""More copies, of a late stage: the weights of this update and of the next."""


@dataclass(frozen=True)
class StageCost:
    """Per rank, without the update."""

    host: StageHost
    forward: Line
    backward: Line
    weights: Line
    cut_bytes: int
    """To the next stage, per sample; 0 for the last."""
    in_flight: int


@dataclass(frozen=True)
class Course:
    """hosts: by stage. starts: first blocks. batch: samples per update. count: micro-batches per rank of the first
    stage (`accumulate`). splits: gradients of weights are delayed (zero bubble). late: the part of a run's updates, 0
    to 1, in which all stages but the last compute with weights that lack the update before. clips: each update waits
    for the norm of all stages' gradients (`clip_norm`). smaller_first: the part by which the first micro-batch is
    smaller.
    """

    hosts: tuple[StageHost, ...]
    starts: tuple[int, ...]
    batch: int
    count: int
    in_flight: int = 0
    splits: bool = True
    late: float = 0.0
    clips: bool = False
    smaller_first: float = 0.0

    def ends(self, chain: Chain) -> tuple[int, ...]:
        return (*self.starts[1:], len(chain.blocks))

    def routes(self) -> tuple[Route, ...]:
        """In order."""
        return _routes(tuple(host.ranks for host in self.hosts), self.batch, self.count, self.smaller_first)

    def held(self, stage: int) -> int:
        """Micro-batches per rank, at most all of an update; on a late stage of two."""
        ranks = self.hosts[stage].ranks
        in_flight = in_flight_of_rank(self.in_flight, len(self.hosts), stage, ranks)
        of_update = -(-len(self.routes()) // ranks)
        return min(in_flight, of_update * (2 if self.is_late(stage) else 1))

    def is_late(self, stage: int) -> bool:
        return self.late > 0 and stage < len(self.hosts) - 1

    def copies(self, chain: Chain, stage: int) -> int:
        """The stage's weights and what has their size, in memory."""
        return chain.states + (LATE_COPIES if self.is_late(stage) else 0)

    def stages(self, chain: Chain) -> tuple[StageCost, ...]:
        ends = self.ends(chain)
        return tuple(
            _stage_cost(chain, host, first, end, self.held(number))
            for number, (host, first, end) in enumerate(zip(self.hosts, self.starts, ends, strict=True))
        )

    def memory_bytes(self, chain: Chain) -> tuple[int, ...]:
        """Per rank, by stage."""
        return tuple(
            self.copies(chain, number) * chain.weight_bytes(first, end)
            + self._held_samples(number) * chain.kept_bytes(first, end)
            for number, (first, end) in enumerate(zip(self.starts, self.ends(chain), strict=True))
        )

    def _held_samples(self, stage: int) -> int:
        held, sizes = self.held(stage), Counter(route.size for route in self.routes())
        if not self.smaller_first:
            return held * max(sizes)
        # Each size has CUDA graphs of its own, which keep their memory.
        updates = 2 if self.is_late(stage) else 1
        return sum(min(held, updates * times) * size for size, times in sizes.items())

    def fits(self, chain: Chain) -> bool:
        return all(
            host.memory_bytes is None or needed <= host.memory_bytes
            for host, needed in zip(self.hosts, self.memory_bytes(chain), strict=True)
        )

    def named(self, chain: Chain) -> tuple[Stage, ...]:
        return tuple(
            Stage(host.name, first, end - 1)
            for host, first, end in zip(self.hosts, self.starts, self.ends(chain), strict=True)
        )


def stages_setting(courses: Sequence[Course], chain: Chain) -> str:
    pipelines: Pipelines = tuple(course.named(chain) for course in courses)
    return format_stages(pipelines)


@lru_cache(maxsize=4096)
def _routes(lanes: tuple[int, ...], batch: int, count: int, smaller_first: float) -> tuple[Route, ...]:
    shares = equal_shares(batch, lanes[0])
    return routes([micro_batch_sizes(share, count, smaller_first) for share in shares], lanes[1:])


@lru_cache(maxsize=65536)
def _stage_cost(chain: Chain, host: StageHost, first: int, end: int, in_flight: int) -> StageCost:
    times = times_of(chain, host)
    return StageCost(
        host=host,
        forward=times.forward.line(first, end),
        backward=times.backward.line(first, end),
        weights=times.weights.line(first, end),
        cut_bytes=chain.cut_bytes(end) if end < len(chain.blocks) else 0,
        in_flight=in_flight,
    )


# Gradient sums at the end of an update of pipelines: all ranks with a block add up its gradients, on one host or in
# parallel pipelines. Pure.


@dataclass(frozen=True)
class GradientSum:
    """holders: (pipeline, stage)."""

    holders: tuple[tuple[int, int], ...]
    seconds: float


NORM_BYTES = 8


def sums_of(chain: Chain, courses: Sequence[Course], wire: LinkCosts) -> tuple[GradientSum, ...]:
    """By stretch of blocks that the same ranks hold, and over all ranks for a limited norm of the gradient."""
    stages = [(number, stage) for number, course in enumerate(courses) for stage in range(len(course.hosts))]
    norm = (GradientSum(tuple(stages), wire.sum_s(NORM_BYTES)),) if courses[0].clips else ()
    if len(courses) == 1 and all(host.ranks == 1 for host in courses[0].hosts):
        return norm
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
    return (*found, *norm)


def _ranks_of_sites(hosts: Iterable[StageHost]) -> dict[str, int]:
    found: dict[str, int] = {}
    for host in hosts:
        found[host.site] = found.get(host.site, 0) + host.ranks
    return found
