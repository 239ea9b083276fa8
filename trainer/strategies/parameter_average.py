"""Every rank trains by itself, and every few updates all weights become their mean: `parameter_average`, and `local`.

McDonald, Hall and Mann 2010; with several updates in between it is local SGD (Stich 2019). After every single update of
SGD it is the exact gradient: w - lr * sum_j (m_j/n) g_j. The ranks' momenta stay their own.

What travels is how far each rank came since the last average, so that it may be rounded to 16 bits: the weights
themselves would lose their last digits. The mean of these ways is a step of an outer optimiser (DiLoCo,
Douillard et al. 2023): with a learning rate of 1 and no momentum it leads to the mean of the weights.

With `overlap` the ranks train on while the ways travel, and take the mean over so many updates later: what they came
since then is put on top of it, and is part of the next way (CoCoD-SGD, Shen et al. 2019; Streaming DiLoCo, Douillard
et al. 2025). Nothing is lost or counted twice; a mean is only that much older.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer.flat import flatten, parts_of, unflatten
from trainer.models import trainable
from trainer.strategies.seam import Base, Exchange, share_initial_state
from trainer.strategies.wire import Wire
from trainer.timing import Brake, Timer


class ParameterAverage(Base):
    """A rank counts by the samples it has trained on since the last average.

    every: updates from one average to the next. overlap: those that go on while it travels, fewer than `every`. An
    evaluation or checkpoint averages at once: what it sees is what training goes on with.
    """

    def __init__(
        self,
        model: nn.Module,
        wire: Wire,
        timer: Timer,
        brake: Brake,
        every: int,
        overlap: int = 0,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
    ) -> None:
        self.model = model
        self.wire = wire
        self.timer = timer
        self.brake = brake
        self.every, self.overlap = every, overlap
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self.updates = 0
        self.samples = 0
        self.samples_of_all = 0
        share_initial_state(model, wire.group)
        self.start: Tensor | None = None  # of the round: a checkpoint may still be read before the first one
        self.sent_from: Tensor  # the weights that the way which travels has led to
        self.way: Tensor
        self.pieces: list[Any] = []  # of it, none where nothing travels
        self.velocity = torch.zeros_like(flatten(trainable(model))) if outer_momentum else torch.empty(0)

    def accumulate(self, loss_sum: Tensor, samples: int, batch: int) -> None:
        (loss_sum / max(1, samples)).backward()

    def backward_alone(self, loss_sum: Tensor, samples: int) -> None:
        """For an update of this rank's own, between two that all ranks make."""
        self.accumulate(loss_sum, samples, samples)
        if self.start is None:
            self.start = flatten(trainable(self.model))
            self.sent_from, self.way = torch.empty_like(self.start), torch.empty_like(self.start)
        self.samples += samples

    def backward(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        self.backward_alone(loss_sum, samples)
        self.samples_of_all += batch
        self.brake.pause("sync")
        if self.updates + 1 == self.every:
            self.brake.pause("call")
        return Exchange(self.timer.mark())

    def after_update(self) -> None:
        self.updates += 1
        if self.pieces and self.updates == self.overlap:
            self._receive()
        if self.updates == self.every:
            self._send()
            if not self.overlap:
                self._receive()

    def own_state(self) -> list[Tensor]:
        return [self.velocity]

    def whole(self) -> nn.Module:
        if self.pieces:
            self._receive()
        if self.updates:
            self._send()
            self._receive()
        return self.model

    def _send(self) -> None:
        flatten(trainable(self.model), out=self.sent_from)
        torch.sub(self.sent_from, self.start, out=self.way).mul_(self.samples / self.samples_of_all)
        self.pieces = self.wire.begin_in_pieces(self.way)
        self.updates = self.samples = self.samples_of_all = 0

    def _receive(self) -> None:
        way = self.way
        for piece in self.pieces:
            piece.wait()
        self.pieces = []
        if self.outer_momentum:  # as Nesterov has it
            self.velocity.mul_(self.outer_momentum).add_(way)
            way.add_(self.velocity, alpha=self.outer_momentum)
        self.start.add_(way, alpha=self.outer_lr)
        if self.updates:
            for weight, part in parts_of(torch.sub(self.start, self.sent_from, out=way), trainable(self.model)):
                weight.add_(part)
        else:  # to the same bits on every rank
            unflatten(self.start, trainable(self.model))
