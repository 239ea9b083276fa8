"""How the gradients of all ranks become one: the strategies `none`, `ddp` and `allreduce`.

    strategy = build_strategy(settings, model, group, timer, brake)
    loss_sum = local_loss(strategy.model, images, labels)
    exchange = strategy.backward(loss_sum, samples, batch)      # .grad now holds the whole batch's gradient
    optimizer.step()
    strategy.after_update()

With l_j the mean loss over rank j's m_j samples of n, the gradient wanted is sum_j (m_j/n) grad l_j. Every strategy
leaves the plain mean over the W ranks, so each rank's loss is first multiplied by m_j*W/n: this makes it W/n times the
sum of its samples' losses. It stays exact for unequal shares, and for a share of 0.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from trainer.config import Settings
from trainer.errors import TrainError
from trainer.models import trainable
from trainer.timing import Brake, Timer

NO_BRAKE = Brake()

# The name that newer torch gives to DDP's switch for overwriting buffers at each forward.
_BUFFER_OPTION = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


@dataclass(frozen=True)
class Exchange:
    """computed: the mark of this rank's own last gradient. collectives: for each one that ran beside backward, the
    marks of when this rank handed it over and when the sum was there, in the order of their ends.
    """

    computed: Any
    collectives: tuple[tuple[Any, Any], ...] = ()


class Strategy(Protocol):
    model: nn.Module
    """What the forward pass calls."""

    def backward(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        """Leaves in .grad what the optimiser shall use: the gradient of the mean loss over the whole batch.

        loss_sum: of this rank's `samples`, which are part of `batch` over all ranks.
        """

    def after_update(self) -> None:
        """Called when the optimiser has moved the weights: what a strategy sends then counts as synchronisation."""

    def whole(self) -> nn.Module:
        """The network with the weights that all ranks share, for evaluations and checkpoints. Called by all ranks."""


class Alone:
    """No synchronisation: one process with the whole batch."""

    def __init__(self, model: nn.Module, timer: Timer, brake: Brake) -> None:
        self.model = model
        self.timer = timer
        self.brake = brake

    def backward(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        weighted(loss_sum, batch, 1).backward()
        self.brake.pause("sync")
        return Exchange(self.timer.mark())

    def after_update(self) -> None:
        pass

    def whole(self) -> nn.Module:
        return self.model


class AllReduce:
    """After backward, one blocking all_reduce(SUM) a parameter, then a division: the loop of the studies."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, timer: Timer, brake: Brake) -> None:
        self.model = model
        self.group = group
        self.timer = timer
        self.brake = brake
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0, group=group)

    def backward(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        weighted(loss_sum, batch, self.group.size()).backward()
        self.brake.pause("sync")
        computed = self.timer.mark()
        for parameter in trainable(self.model):
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad /= self.group.size()
        return Exchange(computed)

    def after_update(self) -> None:
        pass

    def whole(self) -> nn.Module:
        return self.model


class Ddp:
    """torch's DistributedDataParallel: buckets of gradients travel while backward still computes the next ones.

    Every rank keeps its own BatchNorm statistics (they are averaged before an evaluation): DDP would overwrite them
    with rank 0's at each step.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, timer: Timer, brake: Brake, bucket_mib: float
    ) -> None:
        self.group = group
        self.timer = timer
        self.brake = brake
        self.computed: Any = None
        self.collectives: list[tuple[Any, Any]] = []
        self.model = DistributedDataParallel(
            model,
            process_group=group,
            bucket_cap_mb=bucket_mib,
            gradient_as_bucket_view=True,
            **{_BUFFER_OPTION: False},
        )
        self.model.register_comm_hook(self, Ddp._send)

    def _send(self, bucket):  # no annotations: DDP compares them with classes, ours are text
        """DDP hands over buckets in order, so with the last one this rank has computed all its gradients."""
        if bucket.is_last():
            self.brake.pause("sync")
            self.computed = self.timer.mark()
        handed_over = self.timer.mark()
        mean = bucket.buffer().div_(self.group.size())
        sent = dist.all_reduce(mean, group=self.group, async_op=True).get_future()

        def summed(future):
            self.collectives.append((handed_over, self.timer.mark()))
            return future.value()[0]

        return sent.then(summed)

    def backward(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        self.collectives.clear()
        weighted(loss_sum, batch, self.group.size()).backward()
        return Exchange(self.computed, tuple(self.collectives))

    def after_update(self) -> None:
        pass

    def whole(self) -> nn.Module:
        return self.model.module


def build_strategy(
    settings: Settings, model: nn.Module, group: dist.ProcessGroup, timer: Timer, brake: Brake = NO_BRAKE
) -> Strategy:
    """Gives every rank rank 0's weights. Raises TrainError where the strategy does not fit the number of ranks."""
    if settings.strategy == "ddp":
        return Ddp(model, group, timer, brake, settings.bucket_mib)
    if settings.strategy == "allreduce":
        return AllReduce(model, group, timer, brake)
    if group.size() > 1:
        raise TrainError(f"strategy none is for a process alone, there are {group.size()} ranks: use ddp or allreduce")
    return Alone(model, timer, brake)


def local_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The sum of the losses of this rank's samples.

    A rank without samples still takes part in every collective: it sends one image of zeros through the network and
    multiplies the result by 0, so that each gradient exists and is 0. In eval mode, to leave BatchNorm's statistics be.
    """
    if len(labels):
        return cross_entropy(model(images), labels, reduction="sum")
    model.eval()
    nothing = model(images.new_zeros((1, *images.shape[1:]))).sum() * 0
    model.train()
    return nothing


def weighted(loss_sum: Tensor, batch: int, world_size: int) -> Tensor:
    """The loss to differentiate, for a rank whose samples are part of `batch` over all ranks."""
    return loss_sum * (world_size / batch)
