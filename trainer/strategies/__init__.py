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
| parameter_average | weights, after every update |
| fsdp | weights before they are used, gradients as they come, in pieces; no rank holds them all |
| horovod | gradients as they come, by the package of that name, while backward still computes |

| fidelity | how faithfully |
| --- | --- |
| exact | as it is: the update of one process that adds up the gradients of the ranks' parts |
| half | gradients in 16 bits (ddp, allreduce, allreduce_flat) |
| compressed | gradients as thin matrices, what that leaves out later (ddp, allreduce_flat) |
| local | no gradients: weights, every `local_steps` updates (ddp, parameter_average) |

The gradient of the whole batch is the sum of its parts' gradients, so this is the update of one process that sees the
whole batch at once, too, unless the network has BatchNorm: that takes its means over one part at a time, whatever a
rank computes at once (its share, or a micro-batch of it). With `sync_bn` it takes them over the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from trainer.compute.executor import ON_DEVICE, Executor
from trainer.compute.timer import NO_BRAKE, Brake, Timer
from trainer.shared.errors import TrainError
from trainer.shared.settings import Settings
from trainer.shared.strategy_table import ONE_PROCESS
from trainer.strategies.after_backward import EXCHANGES, AfterBackward
from trainer.strategies.averaging import Compressed, ExactFirst, ParameterAverage, averaged
from trainer.strategies.base import Exchange, Strategy, local_loss, weighted
from trainer.strategies.fsdp import Fsdp
from trainer.strategies.gradient_sum import DTYPES, GradientSum
from trainer.strategies.horovod import Horovod
from trainer.strategies.single import Alone, Ddp
from trainer.strategies.sync_batch_norm import synchronise_batch_norm

__all__ = ["Exchange", "Strategy", "build_strategy", "local_loss", "weighted"]

FSDP_MIB = 25.0
"""The size of FSDP's pieces where nobody has chosen one."""


def build_strategy(
    settings: Settings,
    model: nn.Module,
    group: dist.ProcessGroup,
    timer: Timer,
    brake: Brake = NO_BRAKE,
    executor: Executor = ON_DEVICE,
    *,
    nodes: Sequence[str] = (),
    devices: Sequence[str] = (),
    updates: int = 0,
) -> Strategy:
    """Gives every rank rank 0's weights. nodes: each rank's host, where ranks of one shall add up among themselves
    first. devices: each rank's kind of device; without them all are CPUs. updates: of the whole run.

    Raises TrainError where the strategy does not fit ranks, devices or torch.
    """
    if settings.strategy in ONE_PROCESS:
        if group.size() > 1:
            raise TrainError(
                f"strategy {settings.strategy} is for a process alone, there are {group.size()} ranks: "
                "use ddp or allreduce"
            )
        return Alone(model, timer, brake, all_devices=settings.strategy == "dp")
    if settings.strategy == "fsdp" and "cuda" in devices and dist.get_backend(group) == "gloo":
        raise TrainError(
            "strategy fsdp: gloo cannot gather the weights of GPUs; use nccl, with a GPU for each rank, or strategy ddp"
        )
    if settings.sync_bn:
        synchronise_batch_norm(model, group)
    if settings.strategy == "horovod":
        return Horovod(model, group, timer, brake, nodes)
    sums = GradientSum(group, nodes, DTYPES[settings.sent_as], brake, executor, devices)
    if settings.fidelity not in ("compressed", "local"):
        return _exact(settings, model, sums, timer, brake)
    after = settings.exact_updates(updates)
    if not after:
        return _lesser(settings, model, sums, timer, brake)
    full = GradientSum(group, nodes, brake=brake, executor=executor, devices=devices) if sums.dtype else sums
    exact = _exact(settings, model, full, timer, brake)
    return ExactFirst(exact, _lesser(settings, model, sums, timer, brake), after)


def _lesser(settings: Settings, model: nn.Module, sums: GradientSum, timer: Timer, brake: Brake) -> Strategy:
    if settings.fidelity == "compressed":
        return Compressed(model, sums, timer, brake, settings.compress_rank)
    return averaged(settings, model, sums, timer, brake)


def _exact(settings: Settings, model: nn.Module, sums: GradientSum, timer: Timer, brake: Brake) -> Strategy:
    """As far as the wire is."""
    name = settings.strategy
    if name == "ddp":
        return Ddp(model, sums, timer, brake, settings.bucket_mib)
    if name == "fsdp":
        return Fsdp(model, sums.group, timer, brake, settings.bucket_mib or FSDP_MIB)
    if name == "parameter_average":
        return ParameterAverage(model, sums, timer, brake, every=1, is_exact=True)
    return AfterBackward(model, sums, timer, brake, EXCHANGES[name])
