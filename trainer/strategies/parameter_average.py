"""`parameter_average`: every rank trains by itself, and every few updates all weights become their mean.

McDonald, Hall and Mann 2010; with several updates in between it is local SGD (Stich 2019). After every single update of
plain SGD it is the exact gradient: w - lr * sum_j (m_j/n) g_j. Momentum stays each rank's own.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from trainer.models import trainable
from trainer.strategies.after_backward import flatten, unflatten
from trainer.strategies.seam import Accumulating, Exchange, share_initial_state
from trainer.timing import Brake, Timer


class ParameterAverage(Accumulating):
    """A rank counts by the samples it has trained on since the last average.

    An evaluation or checkpoint averages at once: what it sees is what training goes on with.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, timer: Timer, brake: Brake, every: int) -> None:
        self.model = model
        self.group = group
        self.timer = timer
        self.brake = brake
        self.every = every
        self.updates = 0
        self.samples = 0
        self.samples_of_all = 0
        share_initial_state(model, group)

    def backward(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        (loss_sum / max(1, samples)).backward()
        self.samples += samples
        self.samples_of_all += batch
        self.brake.pause("sync")
        return Exchange(self.timer.mark())

    def accumulate(self, loss_sum: Tensor, samples: int, batch: int) -> None:
        (loss_sum / max(1, samples)).backward()

    def after_update(self) -> None:
        self.updates += 1
        if self.updates == self.every:
            self._average()

    def whole(self) -> nn.Module:
        if self.updates:
            self._average()
        return self.model

    def _average(self) -> None:
        flat = flatten(trainable(self.model)) * (self.samples / self.samples_of_all)
        dist.all_reduce(flat, group=self.group)
        unflatten(flat, trainable(self.model))
        self.updates = self.samples = self.samples_of_all = 0
