"""Layers that hold a slice of their output channels, and give all of them.

Forward computes the slice from the whole input and gathers the others'. Backward takes the slice of the output's
gradient, which is the same on all ranks; what it gives for the slice's weights is whole, and for the input one part of
the sum over ranks (Shoeybi et al. 2019, there for pairs of layers).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

from trainer.tensor.meeting import Meeting
from trainer.tensor.slices import Slices


class Sliced(nn.Module):
    """Weight and bias keep their names, so that a slice is found in a whole network's state."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: Any, slices: Slices, meeting: Meeting, axis: int) -> None:
        super().__init__()
        self.slices, self.meeting, self.axis = slices, meeting, axis
        self.first, self.count = slices.own(meeting.rank)
        for name in ("weight", "bias"):
            whole = getattr(layer, name)
            self.register_parameter(name, None if whole is None else self._slice_of(whole))

    def _slice_of(self, whole: nn.Parameter) -> nn.Parameter:
        own = whole.detach().narrow(0, self.first, self.count).clone()
        return nn.Parameter(own, requires_grad=whole.requires_grad)

    def forward(self, inputs: Tensor) -> Tensor:
        whole: Tensor = _Gather.apply(self.compute(_AddUp.apply(inputs, self.meeting)), self)
        return whole

    def compute(self, inputs: Tensor) -> Tensor:
        """This rank's channels."""
        raise NotImplementedError


class SlicedLinear(Sliced):
    def compute(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self.weight, self.bias)


class SlicedConv2d(Sliced):
    def __init__(self, layer: Any, slices: Slices, meeting: Meeting, axis: int) -> None:
        super().__init__(layer, slices, meeting, axis)
        self.how: dict[str, Any] = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
        self.groups = slices.groups[meeting.rank]
        self.first_input = 0
        if layer.groups > 1:
            self.first_input = sum(slices.groups[: meeting.rank]) * self.weight.shape[1]

    def compute(self, inputs: Tensor) -> Tensor:
        if not self.count:
            return self._compute_nothing(inputs)
        if self.groups * self.weight.shape[1] < inputs.shape[1]:
            inputs = inputs.narrow(1, self.first_input, self.groups * self.weight.shape[1])
        return conv2d(inputs, self.weight, self.bias, groups=self.groups, **self.how)

    def _compute_nothing(self, inputs: Tensor) -> Tensor:
        """torch refuses a convolution without channels; the shape, and gradients of nothing, are that of one of a
        single channel.
        """
        inputs = inputs.narrow(1, 0, self.weight.shape[1])
        weight = torch.cat([self.weight, self.weight.new_zeros(1, *self.weight.shape[1:])])
        bias = None if self.bias is None else torch.cat([self.bias, self.bias.new_zeros(1)])
        return conv2d(inputs, weight, bias, **self.how).narrow(1, 0, 0)


class _AddUp(torch.autograd.Function):
    """Passes its input on; in backward each rank's gradient becomes their sum."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, meeting: Meeting) -> Tensor:
        context.meeting = meeting
        return inputs.view_as(inputs)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # In 32 bits at least: rounded to 16 after each addition, the sum would depend on the number of ranks.
        summed = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()
        context.meeting.add_up(summed)
        return summed.to(gradient.dtype), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, own: Tensor, layer: Sliced) -> Tensor:
        context.layer = layer
        return layer.meeting.gather(own, layer.slices.channels, layer.axis)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        layer = context.layer
        return gradient.narrow(layer.axis, layer.first, layer.count), None
