"""A network that keeps a GPU's time instead of computing: what a paced rank trains.

    standin = StandIn(dissect("resnet152", (3, 32, 32), 10), pace, clock)
    standin(images).sum().backward()       takes as long as the pace says; every gradient exists when its time has come

Everything that the other ranks and the network notice is real: the parameters and their shapes, autograd's hooks as
backward goes from the last layer to the first, and every byte on the wire. The numbers are not: gradients are the
weights themselves, so that a paced run has neither loss nor accuracy.

A step's moments are deadlines, counted from its begin: forward ends at FORWARD * T, each layer's gradients are released
when backward would have got there. What the CPU spends on them lies within T. Were the times slept one after another,
a V100's stand-in would reach 0.56 of its speed. What a GPU does to gradients beside its steps (`gpu_work`) is time
alone, too: the numbers are left as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer.paced.anatomy import Anatomy
from trainer.paced.part import PacedPart
from trainer.paced.stopwatch import Stopwatch
from trainer.shared.pace import BACKWARD, FORWARD


class StandIn(nn.Module):
    """Parameters and buffers like the network's own, in its order; takes images, gives logits of no meaning."""

    def __init__(self, anatomy: Anatomy, stopwatch: Stopwatch, classes: int) -> None:
        super().__init__()
        self.anatomy = anatomy
        self.stopwatch = stopwatch
        self.classes = classes
        like = [nn.Parameter(torch.empty(p.shape).normal_(std=1e-3)) for p in anatomy.model.parameters()]
        self.weights = nn.ParameterList(like)
        for index, buffer in enumerate(anatomy.model.buffers()):
            self.register_buffer(f"buffer{index}", torch.zeros(buffer.shape, dtype=buffer.dtype))
        self.layers = []
        done = 0.0
        for layer in anatomy.layers:
            # Backward reaches this layer's gradients when all later layers and itself are through.
            release = FORWARD + BACKWARD * (1 - done)
            self.layers.append((release, [like[index] for index in layer.parameters]))
            done += layer.work

    def forward(self, images: Tensor) -> Tensor:
        self.stopwatch.begin(len(images))
        output = images.new_zeros((len(images), self.classes))
        for number, (release, weights) in enumerate(self.layers):
            output = _Layer.apply(output, self.stopwatch, release, number == 0, *weights)
        output = self.answer(images, output)
        self.stopwatch.until(FORWARD)
        return output

    def answer(self, images: Tensor, blank: Tensor) -> Tensor:
        """What comes of these images: nothing."""
        return blank


class _Layer(torch.autograd.Function):
    """Passes its input on; in backward gives each weight a gradient, not before the layer's time has come."""

    @staticmethod
    def forward(
        context: Any, output: Tensor, stopwatch: Stopwatch, release: float, is_first: bool, *weights: Tensor
    ) -> Tensor:
        context.stopwatch, context.release, context.is_first, context.weights = stopwatch, release, is_first, weights
        return output.clone()

    @staticmethod
    def backward(context: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        # The weights under another name: a copy of each would take this CPU longer than a fast GPU its whole backward.
        gradients = [weight.detach() for weight in context.weights]
        context.stopwatch.until(context.release)
        if context.is_first:
            context.stopwatch.backward_ended()
        return output_gradient, None, None, None, *gradients


class StandInOptimizer:
    """Takes the time of an update and leaves the weights alone."""

    def __init__(self, model: StandIn | PacedPart) -> None:
        self.model = model

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """What has a learning rate: nothing."""
        return []

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.model.stopwatch.start()  # freeing takes the CPU milliseconds, a GPU no time
        self.model.zero_grad(set_to_none)

    def step(self) -> None:
        self.model.stopwatch.optimise()
