"""A whole network's state out of a pipeline's parts, and the other way round: checkpoints know whole networks alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.compute.models import build_model
from trainer.pipeline.part import Part, own_names
from trainer.pipeline.strategy import Pipeline

if TYPE_CHECKING:
    from trainer.training.run import Run


def skeleton(run: Run) -> nn.Module:
    """The whole network without numbers."""
    with torch.device("meta"):
        return build_model(run.settings.model, run.facts.shape, run.facts.classes)


def to_be_kept(run: Run, strategy: Pipeline, momentum: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """This rank's part of the network, and of SGD's momentum; nothing where a lower rank has the same."""
    if not _is_kept(strategy, run.info.rank):
        return {}
    names = [name for name, _ in run.model.named_parameters()]
    moved = {f"momentum {name}": one for name, one in zip(names, momentum, strict=True) if one is not None}
    return run.model.state_dict() | moved


def like_that_of(rank: int, strategy: Pipeline, whole: nn.Module, *, moves: bool) -> dict[str, Tensor]:
    """What `to_be_kept` gives on a rank, as far as names and shapes go. moves: has SGD a momentum yet?"""
    if not _is_kept(strategy, rank):
        return {}
    state, weights = whole.state_dict(), dict(whole.named_parameters())
    names = own_names(whole, strategy.layout.stage(rank))
    kept = {name: state[name] for name in names}
    return kept | {f"momentum {name}": weights[name] for name in names if moves and name in weights}


def _is_kept(strategy: Pipeline, rank: int) -> bool:
    return strategy.layout.holders(strategy.layout.stage(rank).first)[0] == rank


def take(part: Part, model: Mapping[str, Tensor]) -> None:
    """This part of a whole network's state."""
    for name, tensor in part.state_dict().items():  # load_state_dict would miss what the part has taken away
        tensor.copy_(model[name])


def own_momentum(run: Run, momentum: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Of a whole network's momentum that of this part's weights, in their order."""
    whole = [name for name, _ in skeleton(run).named_parameters()]
    by_name = dict(zip(whole, momentum, strict=True)) if momentum else {}
    return [by_name.get(name) for name, _ in run.model.named_parameters()]
