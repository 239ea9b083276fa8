"""A whole network's state out of a pipeline's parts, and the other way round: checkpoints know whole networks alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.compute.models import build_model
from trainer.pipeline.part import Part, part_of
from trainer.pipeline.strategy import Pipeline

if TYPE_CHECKING:
    from trainer.training.run import Run


def skeleton(run: Run) -> nn.Module:
    """The whole network without numbers."""
    with torch.device("meta"):
        return build_model(run.settings.model, run.facts.shape, run.facts.classes)


def whole_names(run: Run) -> list[str]:
    """Of the weights, in their order."""
    return [name for name, _ in skeleton(run).named_parameters()]


def to_be_kept(run: Run, strategy: Pipeline, momentum: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """This rank's part of the network, and of SGD's momentum; nothing where a lower rank has the same."""
    if strategy.layout.holders(strategy.layout.stage(run.info.rank).first)[0] != run.info.rank:
        return {}
    names = [name for name, _ in run.model.named_parameters()]
    moved = {f"momentum {name}": one for name, one in zip(names, momentum, strict=True) if one is not None}
    return {name.replace("whole.", "", 1): tensor for name, tensor in (run.model.state_dict() | moved).items()}


def like_that_of(run: Run, strategy: Pipeline, rank: int, *, moves: bool) -> dict[str, Tensor]:
    """What `to_be_kept` gives on another rank, without numbers. moves: has SGD a momentum yet?"""
    stage = strategy.layout.stage(rank)
    if strategy.layout.holders(stage.first)[0] != rank:
        return {}
    part = part_of(skeleton(run), stage)
    weights = dict(part.named_parameters()) if moves else {}
    kept = part.state_dict() | {f"momentum {name}": tensor for name, tensor in weights.items()}
    return {name.replace("whole.", "", 1): tensor for name, tensor in kept.items()}


def take(part: Part, model: Mapping[str, Tensor]) -> None:
    """This part of a whole network's state."""
    part.load_state_dict({name: model[name.removeprefix("whole.")] for name in part.state_dict()})


def own_momentum(run: Run, momentum: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Of a whole network's momentum that of this part's weights, in their order."""
    by_name = dict(zip(whole_names(run), momentum, strict=True)) if momentum else {}
    return [by_name.get(name.removeprefix("whole.")) for name, _ in run.model.named_parameters()]
