"""Every rank trains by itself, and every few updates all weights become their mean: `parameter_average`, and `local`.

McDonald, Hall and Mann 2010; with several updates in between it is local SGD (Stich 2019). After every single update of
SGD it is the exact gradient: w - lr * sum_j (m_j/n) g_j. The ranks' momenta stay their own.

What travels is how far each rank came since the last average, so that it may be rounded to 16 bits: the weights
themselves would lose their last digits. The mean of these ways is a step of an outer optimiser (DiLoCo,
Douillard et al. 2023): with a learning rate of 1 and no momentum it leads to the mean of the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.models import trainable
from trainer.strategies.after_backward import flatten, unflatten
from trainer.strategies.seam import Base, Exchange, share_initial_state
from trainer.strategies.wire import Wire
from trainer.timing import Brake, Timer


class ParameterAverage(Base):
    """A rank counts by the samples it has trained on since the last average.

    every: updates from one average to the next. An evaluation or checkpoint averages at once: what it sees is what
    training goes on with.
    """

    def __init__(
        self,
        model: nn.Module,
        wire: Wire,
        timer: Timer,
        brake: Brake,
        every: int,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
    ) -> None:
        self.model = model
        self.wire = wire
        self.timer = timer
        self.brake = brake
        self.every = every
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self.updates = 0
        self.samples = 0
        self.samples_of_all = 0
        share_initial_state(model, wire.group)
        self.start: Tensor | None = None  # of the round: a checkpoint may still be read before the first one
        self.velocity = torch.zeros_like(flatten(trainable(model))) if outer_momentum else torch.empty(0)

    def accumulate(self, loss_sum: Tensor, samples: int, batch: int) -> None:
        (loss_sum / max(1, samples)).backward()

    def backward(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        self.accumulate(loss_sum, samples, batch)
        if self.start is None:
            self.start = flatten(trainable(self.model))
        self.samples += samples
        self.samples_of_all += batch
        self.brake.pause("sync")
        return Exchange(self.timer.mark())

    def after_update(self) -> None:
        self.updates += 1
        if self.updates == self.every:
            self._average()

    def own_state(self) -> list[Tensor]:
        return [self.velocity]

    def whole(self) -> nn.Module:
        if self.updates:
            self._average()
        return self.model

    def _average(self) -> None:
        way = flatten(trainable(self.model)).sub_(self.start).mul_(self.samples / self.samples_of_all)
        self.wire.sum(way)
        if self.outer_momentum:  # as Nesterov has it
            self.velocity.mul_(self.outer_momentum).add_(way)
            way.add_(self.velocity, alpha=self.outer_momentum)
        unflatten(self.start.add_(way, alpha=self.outer_lr), trainable(self.model))
        self.updates = self.samples = self.samples_of_all = 0
