"""A network cut over hosts, and the cost of its stages. Pure. Same rules as `trainer.pipeline.stage_layout`.

course = Course((a2000, v100), starts=(0, 20), batch=256, count=16)
course.stages(chain)[1].forward.at(16)          seconds of FORWARD of 16 samples in the second stage
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from orchestrator.forecast.pipeline.block_costs import Chain, Line, StageHost, times_of
from trainer.shared.shares import equal_shares
from trainer.shared.stages import Pipelines, Route, Stage, format_stages, in_flight_of_rank, routes

STATES = 3
"""Copies of weights: themselves, gradients, SGD's momentum."""


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
    stage (`accumulate`). splits: gradients of weights are delayed (zero bubble).
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
        """In order."""
        return _routes(tuple(host.ranks for host in self.hosts), self.batch, self.count)

    def held(self, stage: int) -> int:
        """Per rank."""
        return in_flight_of_rank(self.in_flight, len(self.hosts), stage, self.hosts[stage].ranks)

    def stages(self, chain: Chain) -> tuple[StageCost, ...]:
        ends = self.ends(chain)
        return tuple(
            _stage_cost(chain, host, first, end, self.held(number))
            for number, (host, first, end) in enumerate(zip(self.hosts, self.starts, ends, strict=True))
        )

    def memory_bytes(self, chain: Chain) -> tuple[int, ...]:
        """Per rank, by stage."""
        largest = max(route.size for route in self.routes())
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
