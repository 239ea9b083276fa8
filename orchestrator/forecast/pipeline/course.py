"""A network cut over hosts, and what each stage of it costs. Pure.

    course = Course((a2000, v100), starts=(0, 20), batch=256, count=16)
    course.stages(chain)[1].forward.at(16)          seconds of FORWARD of 16 samples in the second stage
    course.memory_bytes(chain)                      of each rank, stage by stage

The first stage reads the samples; `trainer.pipeline.stage_layout` has the same rules for the ranks themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from orchestrator.forecast.pipeline.block_costs import Chain, Line, StageHost, times_of
from trainer.shared.shares import equal_shares
from trainer.shared.stages import Pipelines, Route, Stage, format_stages, in_flight_of_rank, routes

STATES = 3
"""Copies of its weights that a stage holds: themselves, their gradients, SGD's momentum."""


@dataclass(frozen=True)
class StageCost:
    """Of one rank of the stage, which then takes OPTIMISER of all that for its update."""

    host: StageHost
    forward: Line
    backward: Line
    weights: Line
    cut_bytes: int
    """What leaves it for the next stage, a sample; 0 of the last one."""
    in_flight: int


@dataclass(frozen=True)
class Course:
    """A pipeline. hosts: its stages. starts: the first block of each. batch: samples of an update. count: micro-batches
    of each rank of the first stage, the setting `accumulate`. in_flight: the setting. splits: do gradients of weights
    wait (zero bubble)?
    """

    hosts: tuple[StageHost, ...]
    starts: tuple[int, ...]
    batch: int
    count: int
    in_flight: int = 0
    splits: bool = True

    def ends(self, chain: Chain) -> tuple[int, ...]:
        return (*self.starts[1:], len(chain.blocks))

    def routes(self) -> tuple[Route, ...]:
        """One update's micro-batches, in the order in which every stage takes them."""
        return _routes(tuple(host.ranks for host in self.hosts), self.batch, self.count)

    def held(self, stage: int) -> int:
        """The most micro-batches that a rank of this stage holds."""
        return in_flight_of_rank(self.in_flight, len(self.hosts), stage, self.hosts[stage].ranks)

    def stages(self, chain: Chain) -> tuple[StageCost, ...]:
        ends = self.ends(chain)
        return tuple(
            _stage_cost(chain, host, first, end, self.held(number))
            for number, (host, first, end) in enumerate(zip(self.hosts, self.starts, ends, strict=True))
        )

    def memory_bytes(self, chain: Chain) -> tuple[int, ...]:
        """Of each rank, stage by stage."""
        largest = max(one.size for one in self.routes())
        return tuple(
            STATES * chain.weight_bytes(first, end) + self.held(number) * largest * chain.kept_bytes(first, end)
            for number, (first, end) in enumerate(zip(self.starts, self.ends(chain), strict=True))
        )

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
    """The setting `stages`."""
    pipelines: Pipelines = tuple(course.named(chain) for course in courses)
    return format_stages(pipelines)


@lru_cache(maxsize=4096)
def _routes(lanes: tuple[int, ...], batch: int, count: int) -> tuple[Route, ...]:
    return routes([equal_shares(share, count) for share in equal_shares(batch, lanes[0])], lanes[1:])


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
