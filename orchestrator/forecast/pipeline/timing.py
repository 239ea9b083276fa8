"""What an update of a pipeline is made of: each stage's tasks, what it waits, and what limits all. Pure.

timed = time_update(chain, [course], wire)
timed.seconds, timed.limited_by                     0.22, "slowest stage"
timed.stages[0][1].waiting_s                        of the first pipeline's second stage
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.forecast.links import LinkCosts
from orchestrator.forecast.pipeline.averages import Averages, joined_s
from orchestrator.forecast.pipeline.chain import Chain
from orchestrator.forecast.pipeline.course import Course
from trainer.shared.pace import OPTIMISER

Limit = Literal["slowest stage", "bubble", "link", "fixed cost"]


@dataclass(frozen=True)
class StageTime:
    """Seconds of an update, the mean of the stage's ranks. first, end: its blocks are `first` to `end - 1`. work: of
    these, as a part of the network's.
    fixed_s: what of its tasks depends on no sample. waiting_s: for a neighbour, or for sums of gradients. out_bytes:
    what all its ranks send to neighbours. memory_bytes: of each rank, at most.
    """

    host: str
    first: int
    end: int
    work: float
    forward_s: float
    backward_s: float
    weights_s: float
    optimiser_s: float
    fixed_s: float
    waiting_s: float
    out_bytes: int
    weight_bytes: int
    memory_bytes: int

    @property
    def busy_s(self) -> float:
        return self.forward_s + self.backward_s + self.weights_s + self.optimiser_s


@dataclass(frozen=True)
class Timed:
    """stages: of each pipeline. parts_s: what an update's seconds are made of, by what would have to change for them to
    go; they add up to `seconds`.
    """

    seconds: float
    stages: tuple[tuple[StageTime, ...], ...]
    parts_s: Mapping[Limit, float]

    @property
    def limited_by(self) -> Limit:
        return max(self.parts_s, key=lambda part: self.parts_s[part])


def time_update(chain: Chain, courses: Sequence[Course], wire: LinkCosts, averages: Averages | None = None) -> Timed:
    """courses: pipelines beside each other, each with its part of the batch. wire: has a site of each host's name.

    link: what an update is longer than over links that cost nothing, sums of gradients and averages among them. Of
    the rest, the busiest stage computes, some of it whatever a micro-batch's size (fixed cost), and waits (bubble).
    """
    seconds = joined_s(chain, courses, wire, averages)
    without_links_s = min(seconds, joined_s(chain, courses, _free(wire), averages))
    if math.isclose(without_links_s, seconds, rel_tol=1e-9):
        without_links_s = seconds  # sums in another order
    stages = tuple(tuple(_stage_times(chain, course, seconds)) for course in courses)
    busiest = max((stage for each in stages for stage in each), key=lambda stage: stage.busy_s)
    parts: dict[Limit, float] = {
        "slowest stage": busiest.busy_s - busiest.fixed_s,
        "fixed cost": busiest.fixed_s,
        "bubble": max(0.0, without_links_s - busiest.busy_s),
        "link": seconds - without_links_s,
    }
    return Timed(seconds, stages, parts)


def _free(wire: LinkCosts) -> LinkCosts:
    costs = dataclasses.replace(wire.costs, message_s=0.0, call_s=0.0, local_message_s=0.0, local_bps=math.inf)
    sites = [dataclasses.replace(site, up_bps=math.inf, down_bps=math.inf) for site in wire.sites]
    return LinkCosts(sites, costs)


def _stage_times(chain: Chain, course: Course, update_s: float) -> Iterator[StageTime]:
    routes, ends, memory = course.routes(), course.ends(chain), course.memory_bytes(chain)
    came = 0
    for number, cost in enumerate(course.stages(chain)):
        first, end, ranks = course.starts[number], ends[number], cost.host.ranks
        tasks = (cost.forward, cost.backward, cost.weights)
        times = [(len(routes) * line.fixed_s + course.batch * line.sample_s) / ranks for line in tasks]
        optimiser_s = OPTIMISER * sum(times)
        yield StageTime(
            host=cost.host.name,
            first=first,
            end=end,
            work=chain.work(first, end),
            forward_s=times[0],
            backward_s=times[1],
            weights_s=times[2],
            optimiser_s=optimiser_s,
            fixed_s=(1 + OPTIMISER) * len(routes) / ranks * sum(line.fixed_s for line in tasks),
            waiting_s=max(0.0, update_s - sum(times) - optimiser_s),
            out_bytes=course.batch * (cost.cut_bytes + came),
            weight_bytes=chain.weight_bytes(first, end),
            memory_bytes=memory[number],
        )
        came = cost.cut_bytes
