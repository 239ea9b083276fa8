"""Which rank holds which blocks, and the way of each micro-batch over the ranks. Pure.

    >>> from trainer.shared.stages import parse_stages
    >>> layout = Layout.of(parse_stages("v100:0-31,a16:32-51"), nodes=["v100", "a16", "a16"], blocks=52)
    >>> layout.place(rank=2)
    Place(pipeline=0, stage=1, lane=1)
    >>> layout.routes(pipeline=0, sizes={0: (8, 8)})        # micro-batches, each with its rank in every stage
    (MicroBatch(number=0, size=8, ranks=(0, 1)), MicroBatch(number=1, size=8, ranks=(0, 2)))

The ranks of one host are the lanes of its stage: each holds all of the stage, and takes micro-batches whole, so that
BatchNorm sees the same groups however many GPUs a host has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.compute.microbatches import MicroBatches
from trainer.shared.stages import Pipelines, Stage, check_stages, ranks_of, routes, stage_names


@dataclass(frozen=True)
class Place:
    """A rank's. lane: its number among the ranks of its stage."""

    pipeline: int
    stage: int
    lane: int


@dataclass(frozen=True)
class MicroBatch:
    """One on its way through a pipeline. number: within the update, in the order in which every stage takes them.
    ranks: the one that takes it in each stage.
    """

    number: int
    size: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """pipelines: as `stages` has them. ranks: of each pipeline, and each stage of it, the ranks in their order."""

    pipelines: Pipelines
    ranks: tuple[tuple[tuple[int, ...], ...], ...]

    @staticmethod
    def of(pipelines: Pipelines, nodes: Sequence[str], blocks: int) -> Layout:
        """nodes: each rank's host, whom stages name as `ranks_of` knows.

        Raises ValueError where stages and ranks do not fit each other.
        """
        check_stages(pipelines, blocks)
        if len({tuple((stage.first, stage.last) for stage in stages) for stages in pipelines}) > 1:
            raise ValueError("pipelines beside each other are cut at the same blocks, so that their stages add up")
        held = tuple(tuple(ranks_of(stage.node, nodes) for stage in stages) for stages in pipelines)
        _check_ranks(pipelines, held, nodes)
        return Layout(pipelines, held)

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """Those that read samples."""
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
        """All ranks that hold a block, whose gradients add up."""
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
        """An update's micro-batches by the rank that reads them. shares: of all ranks."""
        readers = self.ranks[pipeline][0]
        return {one: tuple(size for size in micro_batches.sizes(shares, one) if size) for one in readers}

    def routes(self, pipeline: int, sizes: Mapping[int, Sequence[int]]) -> tuple[MicroBatch, ...]:
        """One update's micro-batches. sizes: those of each rank of the first stage, which reads them."""
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
    """Raises ValueError where not each rank has one stage, and each stage a rank."""
    names = stage_names(nodes)
    owners: dict[int, str] = {}
    for stages, row in zip(pipelines, held, strict=True):
        for stage, ranks in zip(stages, row, strict=True):
            if not ranks:
                here = "" if list(nodes) == names else ": on one host the ranks are stages, by their numbers"
                raise ValueError(
                    f"{stage.node!r} has a stage, and is not among {', '.join(dict.fromkeys(names))}{here}"
                )
            for rank in ranks:
                if rank in owners:
                    raise ValueError(f"{owners[rank]!r} and {stage.node!r} are the same rank: a rank holds one stage")
                owners[rank] = stage.node
    if idle := [name for rank, name in enumerate(names) if rank not in owners]:
        raise ValueError(f"{idle[0]!r} has no stage: give it blocks, or leave it out")
