"""`ddp`: torch's DistributedDataParallel (Li et al. 2020), with this rank's own marks of what travelled when."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.strategies.seam import Accumulating, Exchange, weighted
from trainer.timing import Brake, Timer

# The name that newer torch gives to DDP's switch for overwriting buffers at each forward.
_BUFFER_OPTION = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


class Ddp(Accumulating):
    """Buckets of gradients travel while backward still computes the next ones.

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

    def without_sync(self) -> AbstractContextManager[object]:
        return self.model.no_sync()

    def after_update(self) -> None:
        pass

    def whole(self) -> nn.Module:
        return self.model.module
