"""One process with the whole batch: `none` on one device, `dp` on all that its host has."""

from __future__ import annotations

from torch import Tensor, nn

from trainer.compute.brake import Brake
from trainer.compute.timer import Timer
from trainer.strategies.base import Base, Exchange, backward_weighted


class Alone(Base):
    """No synchronisation between processes.

    all_devices: torch's DataParallel copies the network to every GPU at each step, cuts the batch evenly, and brings
    outputs and gradients back to the first; where there is none, it is the network itself.
    """

    def __init__(self, model: nn.Module, timer: Timer, brake: Brake, all_devices: bool) -> None:
        self.network = model
        on_gpu = next(model.parameters()).is_cuda
        self.model = nn.DataParallel(model) if all_devices and on_gpu else model
        self.timer = timer
        self.brake = brake

    def backward(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        backward_weighted(loss_sum, batch)
        self.brake.pause("sync")
        return Exchange(self.timer.mark())

    def whole(self) -> nn.Module:
        return self.network
