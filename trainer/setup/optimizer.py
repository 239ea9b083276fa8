"""The optimiser: SGD or AdamW, or a stand-in where the rank is paced."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainer.compute.models import trainable
from trainer.paced.learner import Learner, LearnerOptimizer
from trainer.paced.part import LearningPart, PacedPart
from trainer.paced.standin import StandIn, StandInOptimizer
from trainer.shared.settings import Settings


def build_optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer | StandInOptimizer:
    """settings: `fused_sgd` as it turned out."""
    if isinstance(model, Learner | LearningPart):
        return LearnerOptimizer(model, _real(settings, model.network))
    if isinstance(model, StandIn | PacedPart):
        return StandInOptimizer(model)
    return _real(settings, model)


def _real(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    rule: dict[str, Any] = {"lr": settings.lr, "momentum": settings.momentum, "weight_decay": settings.weight_decay}
    if settings.fused_sgd != "on":
        return torch.optim.SGD(model.parameters(), **rule)
    optimizer = torch.optim.SGD(model.parameters(), **rule, fused=True)
    if settings.momentum:
        # By itself it begins with memory as it finds it, which it would keep where fp16 leaves the first update out.
        optimizer.state.update({weight: {"momentum_buffer": torch.zeros_like(weight)} for weight in trainable(model)})
    return optimizer
