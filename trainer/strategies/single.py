"""One process with the whole batch (`none`, `dp`), and torch's DistributedDataParallel (`ddp`)."""

from __future__ import annotations

import inspect
import weakref
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.compute.models import gradient_bytes
from trainer.compute.timer import InjectedDelay, Timer
from trainer.shared.errors import TrainError
from trainer.strategies.base import Base, Exchange, backward_weighted, no_loss, refuse_unused, weighted
from trainer.strategies.gradient_sum import GradientSum, fitted_bucket_bytes


class Alone(Base):
    """all_devices: torch's DataParallel, which splits the batch evenly over the GPUs at each step. Ignored on CPUs."""

    def __init__(self, model: nn.Module, timer: Timer, delay: InjectedDelay, all_devices: bool) -> None:
        self.network = model
        on_gpu = next(model.parameters()).is_cuda
        self.model = nn.DataParallel(model) if all_devices and on_gpu else model
        self.timer = timer
        self.delay = delay

    def backward(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        backward_weighted(loss_sum, batch)
        self.delay.pause("sync")
        return Exchange(self.timer.mark())

    def whole(self) -> nn.Module:
        return self.network


# The newer name of DDP's switch for overwriting buffers in forward.
_BUFFER_OPTION = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


class Ddp(Base):
    """torch's DistributedDataParallel (Li et al. 2020), with marks of each transfer. bucket_mib: 0 fits the link."""

    # Every rank keeps its own BatchNorm statistics, averaged before evaluations; DDP would overwrite them with rank
    # 0's.

    def __init__(
        self, model: nn.Module, sums: GradientSum, timer: Timer, delay: InjectedDelay, bucket_mib: float
    ) -> None:
        self.sums = sums
        self.timer = timer
        self.delay = delay
        self.computed: Any = None
        self.collectives: list[tuple[Any, Any]] = []
        device = next(model.parameters()).device
        self.bucket_mib = bucket_mib or fitted_bucket_bytes(sums, gradient_bytes(model), device) / 2**20
        keep_own_buffers: dict[str, Any] = {_BUFFER_OPTION: False}
        self.model = DistributedDataParallel(
            _OrNothing(model),
            process_group=sums.group,
            bucket_cap_mb=self.bucket_mib,
            gradient_as_bucket_view=True,
            **keep_own_buffers,
        )
        # A weak reference, because Python's collector cannot see torch's hooks.
        self.model.register_comm_hook(weakref.proxy(self), Ddp._send)

    # Without annotations: DDP compares them with classes, but ours are text.
    def _send(self, bucket):  # type: ignore[no-untyped-def]
        # DDP hands over buckets in order: with the last one, all gradients are computed.
        self.delay.pause("call")
        if bucket.is_last():
            self.delay.pause("sync")
            self.computed = self.timer.mark()
        handed_over = self.timer.mark()

        def arrived() -> None:
            self.collectives.append((handed_over, self.timer.mark()))

        return self.sums.begin(bucket.buffer(), arrived)

    def backward(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        self.collectives.clear()
        self.computed = None
        try:
            weighted(loss_sum, batch).backward()
        except RuntimeError as error:
            if "mark a variable ready only once" not in str(error):
                raise
            raise TrainError(
                "strategy ddp: a weight's gradient came twice in one update, as that of a checkpointed block that is "
                "used twice: call torch.utils.checkpoint with use_reentrant=False, or use strategy=allreduce_flat"
            ) from error
        if self.computed is None:  # a bucket was incomplete, so nothing was exchanged
            refuse_unused(self.whole(), loss_sum)
        return Exchange(self.computed, tuple(self.collectives))

    def no_loss(self) -> Tensor:
        # DDP's forward prepares its buckets.
        self._either.is_called = False
        try:
            nothing: Tensor = self.model()
        finally:
            self._either.is_called = True
        return nothing

    def without_sync(self) -> AbstractContextManager[object]:
        paused: AbstractContextManager[object] = self.model.no_sync()
        return paused

    def whole(self) -> nn.Module:
        return self._either.network

    @property
    def _either(self) -> _OrNothing:
        either: _OrNothing = self.model.module
        return either


class _OrNothing(nn.Module):
    """The network, or a zero loss if the rank has no samples."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.is_called = network, True

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.network(*inputs, **named) if self.is_called else no_loss(self.network)
