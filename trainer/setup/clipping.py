"""Whose gradients count where, for `clip_norm`."""

from __future__ import annotations

from collections.abc import Collection

import torch.distributed as dist
from torch import nn

from trainer.pipeline.strategy import Pipeline
from trainer.setup.material import Material
from trainer.shared.settings import Settings
from trainer.strategies import Strategy
from trainer.training.clipping import Clipping


def build_clipping(
    settings: Settings, material: Material, model: nn.Module, strategy: Strategy | Pipeline, group: dist.ProcessGroup
) -> Clipping | None:
    """None where nothing is clipped. group: of all ranks."""
    if not settings.clip_norm:
        return None
    if settings.fidelity == "local":
        return Clipping(model, settings.clip_norm, None, None)
    return Clipping(model, settings.clip_norm, _counted(settings, material, strategy, dist.get_rank()), group)


def _counted(
    settings: Settings, material: Material, strategy: Strategy | Pipeline, rank: int
) -> Collection[str] | None:
    """Names of the weights that no lower rank counts; None: all that this rank holds, and holds alone."""
    if settings.strategy == "fsdp":
        return None
    if strategy.parts is None:
        return None if rank == 0 else ()
    skeleton = material.skeleton()
    return strategy.parts.kept(rank, dict(skeleton.named_parameters()), skeleton).keys()
