"""How the ranks stay together: `build_strategy(settings, model, group, timer, brake)`, one strategy a name.

    strategy = build_strategy(settings, model, group, timer, brake)
    loss_sum = local_loss(strategy.model, images, labels)
    exchange = strategy.backward(loss_sum, samples, batch)      # .grad now holds what the optimiser shall use
    optimizer.step()
    strategy.after_update()

| strategy | what travels |
| --- | --- |
| none, dp | nothing: one process, on one device or on all of its host's |
| ddp | gradients in buckets, while backward still computes |
| allreduce | gradients after backward, one call a parameter |
| allreduce_flat, reduce_broadcast, gather_scatter, allgather, reduce_scatter | gradients after backward, all at once |
| parameter_average | weights, every few updates |
| fsdp | weights before they are used, gradients as they come, in pieces; no rank holds them all |
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from trainer.batch_norm import synchronise_batch_norm
from trainer.config import Settings
from trainer.errors import TrainError
from trainer.strategies.after_backward import EXCHANGES, AfterBackward
from trainer.strategies.ddp import Ddp
from trainer.strategies.fsdp import Fsdp
from trainer.strategies.parameter_average import ParameterAverage
from trainer.strategies.seam import Exchange, Strategy, local_loss, weighted
from trainer.strategies.single import Alone
from trainer.timing import Brake, Timer

__all__ = ["Exchange", "Strategy", "build_strategy", "local_loss", "weighted"]

NO_BRAKE = Brake()


def build_strategy(
    settings: Settings, model: nn.Module, group: dist.ProcessGroup, timer: Timer, brake: Brake = NO_BRAKE
) -> Strategy:
    """Gives every rank rank 0's weights. Raises TrainError where the strategy does not fit ranks, devices or torch."""
    name = settings.strategy
    if name in ("none", "dp"):
        if group.size() > 1:
            raise TrainError(
                f"strategy {name} is for a process alone, there are {group.size()} ranks: use ddp or allreduce"
            )
        return Alone(model, timer, brake, all_devices=name == "dp")
    if settings.sync_bn:
        synchronise_batch_norm(model, group)
    if name == "ddp":
        return Ddp(model, group, timer, brake, settings.bucket_mib)
    if name == "fsdp":
        return Fsdp(model, group, timer, brake, settings.bucket_mib)
    if name == "parameter_average":
        return ParameterAverage(model, group, timer, brake, settings.average_every)
    return AfterBackward(model, group, timer, brake, EXCHANGES[name])
