"""A network that learns in a pipeline whose time and bytes are another's (`paced: {like: EXP}`).

The stages of a run are the other network's blocks. The one that learns is cut so that each stage does about the same
part of it; where, changes none of its numbers. What leaves a stage travels with zeros, as many as the other sends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from trainer.compute.models import skeleton_of
from trainer.pipeline.chain import Block, balanced, survey
from trainer.pipeline.layout import Layout
from trainer.pipeline.part import part_of
from trainer.ranks.agreement import gather_lines
from trainer.ranks.rank_info import RankInfo
from trainer.shared.errors import TrainError
from trainer.shared.experiments import CHOSEN, DATA_SETS
from trainer.shared.stages import Stage

Network = tuple[str, tuple[int, int, int], int]
"""Its name, the shape of an image, and the classes."""


@dataclass(frozen=True)
class Learning:
    """The network that learns: its blocks, and which rank holds which of them. exp: whose network it is like."""

    exp: str
    chain: tuple[Block, ...]
    layout: Layout

    def before(self, rank: int) -> tuple[int, ...] | None:
        """The shape of one sample's activations before the rank's part; None of the first stage."""
        first = self.layout.stage(rank).first
        return self.chain[first - 1].behind if first else None


def like_of_all(info: RankInfo) -> str:
    """The experiment that the ranks are like; empty where they stand in for the run's own network, or for nothing.
    Waits for all ranks. Raises TrainError where they differ: they would send each other what nobody expects.
    """
    likes = gather_lines(info.pace.like if info.pace else "")
    if len(set(likes)) > 1:
        named = ", ".join(f"rank {rank}: {like or 'the run itself'}" for rank, like in enumerate(likes))
        raise TrainError(f"paced: ranks stand in for different networks ({named}); give all the same `like`")
    return likes[0]


def chain_like(exp: str) -> list[Block]:
    return survey(*_network_of(exp))


def weights_like(exp: str, stage: Stage) -> list[Tensor]:
    """Of a stage of that experiment's network: their shapes without numbers."""
    return list(part_of(skeleton_of(*_network_of(exp)), stage).parameters())


def _network_of(exp: str) -> Network:
    facts = DATA_SETS[CHOSEN[exp]["data"]]
    return CHOSEN[exp]["model"], facts.shape, facts.classes


def learning_cut(exp: str, own: Sequence[Block], like: Sequence[Block], layout: Layout) -> Learning:
    """own: of the network that learns. like, layout: of the experiment's. Raises ValueError where there are more stages
    than blocks, or more numbers to send than those of `like`.
    """
    if list(own) == list(like):
        return Learning(exp, tuple(own), layout)
    stages = layout.pipelines[0]  # those beside it are cut at the same blocks
    parts = {str(number): sum(like[block].work for block in blocks_of(stage)) for number, stage in enumerate(stages)}
    (cut,) = balanced(own, parts)
    for learns, timed in zip(cut[:-1], stages, strict=False):
        _check_width(own[learns.last], learns.last, like[timed.last])
    pipelines = tuple(
        tuple(replace(stage, first=found.first, last=found.last) for stage, found in zip(of, cut, strict=True))
        for of in layout.pipelines
    )
    return Learning(exp, tuple(own), Layout(pipelines, layout.ranks))


def blocks_of(stage: Stage) -> range:
    return range(stage.first, stage.last + 1)


def _check_width(own: Block, number: int, like: Block) -> None:
    numbers, room = math.prod(own.behind), math.prod(like.behind)
    if numbers > room:
        raise ValueError(
            f"behind block {number} of the network that learns go {numbers:,} numbers a sample, and {room:,} where the "
            "one that it is like is cut: cut that one where more cross, or train a smaller network"
        )


def as_sent(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Of one sample: numbers in a row, which two networks can have alike."""
    return None if shape is None else (math.prod(shape),)
