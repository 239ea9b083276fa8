"""Assigns blocks to ranks, and routes micro-batches over the ranks. Pure.

    >>> from trainer.shared.stages import parse_stages
    >>> layout = Layout.of(parse_stages("v100:0-31,a16:32-51"), nodes=["v100", "a16", "a16"], blocks=52)
    >>> layout.place(rank=2)
    Place(pipeline=0, stage=1, lane=1)
    >>> layout.routes(pipeline=0, sizes={0: (8, 8)})        # micro-batches, each with its rank in every stage
    (MicroBatch(number=0, size=8, ranks=(0, 1)), MicroBatch(number=1, size=8, ranks=(0, 2)))

The ranks of one host are the lanes of its stage: each holds the whole stage and takes whole micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.compute.microbatches import MicroBatches
from trainer.shared.stages import Pipelines, Stage, check_stages, ranks_of, routes, stage_names


@dataclass(frozen=True)
class Place:
    """lane: number among the ranks of its stage."""

    pipeline: int
    stage: int
    lane: int


@dataclass(frozen=True)
class MicroBatch:
    """number: within the update. ranks: one per stage."""

    number: int
    size: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """ranks: by pipeline and stage."""

    pipelines: Pipelines
    ranks: tuple[tuple[tuple[int, ...], ...], ...]

    @staticmethod
    def of(pipelines: Pipelines, nodes: Sequence[str], blocks: int) -> Layout:
        """nodes: each rank's host. Raises ValueError if stages and ranks do not match."""
        check_stages(pipelines, blocks)
        if len({tuple((stage.first, stage.last) for stage in stages) for stages in pipelines}) > 1:
            raise ValueError("parallel pipelines must be cut at the same blocks, because their stages exchange sums")
        held = tuple(tuple(ranks_of(stage.node, nodes) for stage in stages) for stages in pipelines)
        _check_ranks(pipelines, held, nodes)
        return Layout(pipelines, held)

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """Ranks that read samples."""
        return tuple(rank for stages in self.ranks for rank in stages[0])

    def place(self, rank: int) -> Place:
        return next(
            Place(number, stage, lanes.index(rank))
            for number, stages in enumerate(self.ranks)
            for stage, lanes in enumerate(stages)
            if rank in lanes
        )

    def stage(self, rank: int) -> Stage:
        place = self.place(rank)
        return self.pipelines[place.pipeline][place.stage]

    def holders(self, block: int) -> tuple[int, ...]:
        """All ranks with this block, whose gradients are summed."""
        return tuple(
            sorted(
                rank
                for stages, held in zip(self.pipelines, self.ranks, strict=True)
                for stage, lanes in zip(stages, held, strict=True)
                if stage.first <= block <= stage.last
                for rank in lanes
            )
        )

    def entering(self, pipeline: int, micro_batches: MicroBatches, shares: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """By the rank that reads them. shares: of all ranks."""
        readers = self.ranks[pipeline][0]
        return {rank: tuple(size for size in micro_batches.sizes(shares, rank) if size) for rank in readers}

    def routes(self, pipeline: int, sizes: Mapping[int, Sequence[int]]) -> tuple[MicroBatch, ...]:
        """sizes: by rank of the first stage."""
        first, *later = self.ranks[pipeline]
        of_lanes = routes([sizes[rank] for rank in first], [len(lanes) for lanes in later])
        return tuple(
            MicroBatch(
                number,
                route.size,
                tuple(ranks[lane] for ranks, lane in zip(self.ranks[pipeline], route.lanes, strict=True)),
            )
            for number, route in enumerate(of_lanes)
        )


def _check_ranks(pipelines: Pipelines, held: Sequence[Sequence[tuple[int, ...]]], nodes: Sequence[str]) -> None:
    """Raises ValueError."""
    names = stage_names(nodes)
    owners: dict[int, str] = {}
    for stages, row in zip(pipelines, held, strict=True):
        for stage, ranks in zip(stages, row, strict=True):
            if not ranks:
                here = "" if list(nodes) == names else ": on a single host, name ranks by their numbers"
                raise ValueError(
                    f"{stage.node!r} has a stage, but is not among {', '.join(dict.fromkeys(names))}{here}"
                )
            for rank in ranks:
                if rank in owners:
                    raise ValueError(f"{owners[rank]!r} and {stage.node!r} are the same rank: a rank holds one stage")
                owners[rank] = stage.node
    if idle := [name for rank, name in enumerate(names) if rank not in owners]:
        raise ValueError(f"{idle[0]!r} has no stage: give it blocks, or leave it out")
