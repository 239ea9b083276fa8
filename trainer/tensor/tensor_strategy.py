"""`tensor`: all ranks take the whole batch, and each computes some output channels of every layer.

The update is that of one process. Each layer's outputs and input gradients travel, with no overlap: for close ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.compute.batch_norm_kernels import estimate_running_statistics
from trainer.compute.models import has_batch_norm
from trainer.compute.timer import InjectedDelay, Timer
from trainer.paced.standin import PacedPart
from trainer.paced.stopwatch import StageClock
from trainer.shared.pace import BACKWARD, FORWARD
from trainer.strategies.base import Base, Exchange, weighted
from trainer.tensor.sliced_layers import Layer, Meeting

READER = 0
"""The rank whose samples, losses and evaluations count; all ranks have the same."""


class TensorParallel(Base):
    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], meeting: Meeting, timer: Timer, delay: InjectedDelay
    ) -> None:
        self.model, self.meeting, self.timer, self.delay = model, meeting, timer, delay
        self.counts = meeting.rank == READER
        self.parts = SlicedParts(layers)

    def backward(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        weighted(loss_sum, batch).backward()
        self.delay.pause("sync")
        spans, held_up_s = self.meeting.take()
        return Exchange(self.timer.mark(), held_up_s=held_up_s, waits=tuple(spans))

    def whole(self) -> nn.Module:
        return self.model

    def outputs(self, network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """All ranks compute all batches; one evaluates them."""
        for pair in super().outputs(network, batches):
            self.meeting.take()
            if self.counts:
                yield pair

    def average_statistics(self, network: nn.Module, batches: Iterable[Tensor], *, again: bool = False) -> None:
        # BatchNorm's statistics are equal on all ranks.
        if again and has_batch_norm(network):
            estimate_running_statistics(network, batches)
            self.meeting.take()


class SlicedParts:
    def __init__(self, layers: Sequence[Layer]) -> None:
        self.slices = {f"{layer.name}.{kind}": layer.slices for layer in layers for kind in ("weight", "bias")}

    def held(self, rank: int, state: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
        return {
            name: tensor.narrow(0, *self.slices[name].own(rank)) if name in self.slices and tensor.dim() else tensor
            for name, tensor in state.items()
        }

    def kept(self, rank: int, state: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
        held = self.held(rank, state, network)
        return held if rank == READER else {name: tensor for name, tensor in held.items() if name in self.slices}


# Tensor parallelism of simulated GPUs: computing is timed, transfers are real, numbers are meaningless.


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
