"""How ranks synchronise: `build_strategy` makes the class for the settings `strategy` and `fidelity`.

    strategy = build_strategy(settings, model, group, timer, delay)
    loss_sum = local_loss(strategy.model, images, labels)
    exchange = strategy.backward(loss_sum, samples, batch)      # .grad now holds the gradient for the optimiser
    optimizer.step()
    strategy.after_update()

The sum of the ranks' gradients is the gradient of the whole batch, except that BatchNorm normalises each part by itself
unless `sync_bn` is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from trainer.compute.compiler import ON_DEVICE, Executor
from trainer.compute.timer import NO_DELAY, InjectedDelay, Timer
from trainer.shared.doors import door
from trainer.shared.errors import TrainError
from trainer.shared.settings import Settings
from trainer.shared.strategy_table import ONE_PROCESS
from trainer.strategies.after_backward import EXCHANGES, AfterBackward
from trainer.strategies.averaging import Compressed, ExactFirst, ParameterAverage, averaged
from trainer.strategies.base import Exchange, Strategy, cross_entropy_sum, local_loss, weighted
from trainer.strategies.fsdp import Fsdp
from trainer.strategies.gradient_sum import DTYPES, GradientSum
from trainer.strategies.horovod import Horovod
from trainer.strategies.single import Alone, Ddp
from trainer.strategies.sync_batch_norm import synchronise_batch_norm

__all__ = ["Exchange", "Strategy", "build_strategy", "cross_entropy_sum", "local_loss", "weighted"]

FSDP_MIB = 25.0
"""Default size of FSDP's pieces."""


def build_strategy(
    settings: Settings,
    model: nn.Module,
    group: dist.ProcessGroup,
    timer: Timer,
    delay: InjectedDelay = NO_DELAY,
    executor: Executor = ON_DEVICE,
    *,
    nodes: Sequence[str] = (),
    devices: Sequence[str] = (),
    updates: int = 0,
) -> Strategy:
    """Gives every rank rank 0's weights. Raises TrainError if the strategy does not fit.

    nodes: hosts by rank, for sums within hosts first. devices: device types by rank. updates: of the whole run.
    """
    if settings.strategy in ONE_PROCESS:
        if group.size() > 1:
            raise TrainError(
                f"strategy {settings.strategy} is for a single process, but there are {group.size()} ranks: "
                "use ddp or allreduce"
            )
        return Alone(model, timer, delay, all_devices=settings.strategy == "dp")
    if settings.strategy == "fsdp" and "cuda" in devices and dist.get_backend(group) == "gloo":
        raise TrainError(
            "strategy fsdp: gloo cannot gather the weights of GPUs; use nccl, with a GPU for each rank, or strategy ddp"
        )
    if settings.sync_bn:
        synchronise_batch_norm(model, group)
    if settings.strategy == "horovod":
        return Horovod(model, group, timer, delay, nodes)
    sums = GradientSum(group, nodes, DTYPES[settings.sent_as], delay, executor, devices)
    if settings.fidelity not in ("compressed", "local"):
        return _exact(settings, model, sums, timer, delay)
    after = settings.exact_updates(updates)
    if not after:
        return _lesser(settings, model, sums, timer, delay)
    full = GradientSum(group, nodes, delay=delay, executor=executor, devices=devices) if sums.dtype else sums
    exact = _exact(settings, model, full, timer, delay)
    return ExactFirst(exact, _lesser(settings, model, sums, timer, delay), after)


def _lesser(settings: Settings, model: nn.Module, sums: GradientSum, timer: Timer, delay: InjectedDelay) -> Strategy:
    if settings.fidelity == "compressed":
        return Compressed(model, sums, timer, delay, settings.compress_rank)
    return averaged(settings, model, sums, timer, delay)


def _exact(settings: Settings, model: nn.Module, sums: GradientSum, timer: Timer, delay: InjectedDelay) -> Strategy:
    name = settings.strategy
    if name == "ddp":
        return Ddp(model, sums, timer, delay, settings.bucket_mib)
    if name == "fsdp":
        return Fsdp(model, sums.group, timer, delay, settings.bucket_mib or FSDP_MIB)
    if name == "parameter_average":
        return ParameterAverage(model, sums, timer, delay, every=1, is_exact=True)
    return AfterBackward(model, sums, timer, delay, EXCHANGES[name])


if not TYPE_CHECKING:  # a type checker looks for names in the modules themselves
    __getattr__ = door(__name__, __path__[0])
