"""Tensor parallelism of simulated GPUs: computing is timed, transfers are real, numbers are meaningless."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.paced.standin import PacedPart
from trainer.paced.stopwatch import StageClock
from trainer.shared.pace import BACKWARD, FORWARD
from trainer.tensor.sliced_layers import Layer, Meeting


class PacedSlices(PacedPart):
    """Has weights like this rank's slices. meeting: set before the first pass."""

    meeting: Meeting

    def __init__(
        self, like: Sequence[Tensor], clock: StageClock, layers: Sequence[Layer], rank: int, classes: int
    ) -> None:
        super().__init__(like, clock)
        self.layers, self.rank, self.classes = layers, rank, classes
        self.there_s = self.late_s = 0.0
        self._buffer = torch.zeros(0)

    def forward(self, images: Tensor) -> Tensor:
        token = images.new_zeros((len(images), self.classes))
        for number, layer in enumerate(self.layers):
            weights = list(self.weights) if number == 0 else []
            token = _Meets.apply(token, self, layer, number == 0, *weights)
        return token

    def compute(self, layer: Layer, part: float, samples: int) -> None:
        """Returns when this rank's part of the layer would be done; catches up on lateness.
        part: FORWARD or BACKWARD.
        """
        own = layer.slices.own(self.rank)[1] / sum(layer.slices.channels)
        task_s = part * self.stopwatch.task_s(samples, own * layer.work, 1 / len(self.layers))
        self.stopwatch.take(task_s, self.there_s - self.late_s)
        self.late_s = max(0.0, self.stopwatch.clock.now() - self.stopwatch.free_s)

    def gather(self, layer: Layer, samples: int) -> None:
        whole = math.prod(layer.gives) // sum(layer.slices.channels)
        counts = [samples * whole * count for count in layer.slices.channels]
        received = self.buffer(sum(counts)).view(self.meeting.sums.dtype or torch.float32)[: sum(counts)]
        self.meeting.gather_into(list(received.split(counts)))
        self.there_s = self.stopwatch.clock.now()

    def add_up(self, layer: Layer, samples: int) -> None:
        self.meeting.add_up(self.buffer(samples * math.prod(layer.takes)))
        self.there_s = self.stopwatch.clock.now()

    def buffer(self, numbers: int) -> Tensor:
        """Reuses memory: allocating it would take longer than a GPU's layer."""
        if len(self._buffer) < numbers:
            self._buffer = torch.zeros(numbers)
        return self._buffer[:numbers]


class _Meets(torch.autograd.Function):
    """One layer. All weights get gradients (themselves) at the end of backward."""

    @staticmethod
    def forward(
        context: Any, token: Tensor, slices: PacedSlices, layer: Layer, is_first: bool, *weights: nn.Parameter
    ) -> Tensor:
        context.slices, context.layer, context.is_first, context.weights = slices, layer, is_first, weights
        context.samples = len(token)
        slices.compute(layer, FORWARD, len(token))
        slices.gather(layer, len(token))
        return token.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        context.slices.compute(context.layer, BACKWARD, context.samples)
        if not context.is_first:
            context.slices.add_up(context.layer, context.samples)
        return gradient, None, None, None, *(weight.detach() for weight in context.weights)
