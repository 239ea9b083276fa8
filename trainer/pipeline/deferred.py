"""Gradients of weights, later than those of what went in: what the stage before waits for goes first.

    >>> network, later = nn.Sequential(nn.Linear(3, 2)), Later()
    >>> split_backward(network, later)
    >>> network(torch.ones(1, 3)).sum().backward()  # inputs' gradients, and those of small weights (BatchNorm, biases)
    >>> network[0].weight.grad is None, network[0].bias.grad
    (True, tensor([1., 1.]))
    >>> with torch.no_grad():
    ...     for work in later.cut():                    # those of the convolutions' and linear layers' weights
    ...         work()
    >>> network[0].weight.grad
    tensor([[1., 1., 1.],
            [1., 1., 1.]])

Each is computed by the very function that autograd would have called, with the other half of its results left out, and
added to `.grad` as autograd would have: the sums are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Work = Callable[[], None]


class Later:
    """What has been put off, in the order in which autograd came to it."""

    def __init__(self) -> None:
        self._works: list[Work] = []

    def add(self, work: Work) -> None:
        self._works.append(work)

    def cut(self) -> list[Work]:
        """All since the last time."""
        works, self._works = self._works, []
        return works


def split_backward(network: nn.Module, later: Later) -> None:
    """From now on backward leaves the weights' gradients of its convolutions and linear layers to `later`."""
    for module in network.modules():
        if not _is_plain(module):
            continue
        if type(module) is nn.Conv2d and module.padding_mode == "zeros" and not isinstance(module.padding, str):
            module.forward = partial(_convolved, module, later)  # type: ignore[method-assign]
        elif type(module) is nn.Linear:
            module.forward = partial(_linear, module, later)  # type: ignore[method-assign]


def _is_plain(module: nn.Module) -> bool:
    """Is its weight its own, with nothing called when its gradient is there, and the forward pass that of its class?"""
    weight = module._parameters.get("weight")  # not there if a hook computes it, as that of spectral_norm does
    if weight is None or weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return False
    forward = vars(module).get("forward")  # of another stage perhaps, which was split before
    return forward is None or getattr(forward, "func", None) in (_convolved, _linear)


def _convolved(module: nn.Conv2d, later: Later, images: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        output: Tensor = module._conv_forward(images, module.weight, module.bias)
    else:
        output = _Convolution.apply(images, module.weight, module.bias, module, later)
    return output


def _linear(module: nn.Linear, later: Later, inputs: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return nn.functional.linear(inputs, module.weight, module.bias)
    output: Tensor = _Product.apply(inputs, module.weight, module.bias, later)
    return output


def added(weight: Tensor, gradient: Tensor) -> None:
    """As autograd does it: in the weight's type and order in memory, which a fused optimiser asks for."""
    gradient = gradient.to(weight.dtype)
    if weight.grad is None:
        same = gradient.stride() == weight.stride()
        weight.grad = gradient if same else torch.empty_like(weight).copy_(gradient)
    else:
        weight.grad += gradient


def _cast(*tensors: Tensor | None) -> list[Any]:
    """To what autocast would have computed with."""
    kind = next(tensor.device.type for tensor in tensors if tensor is not None)
    to = _autocast(kind)
    return list(tensors) if to is None else [None if tensor is None else tensor.to(to) for tensor in tensors]


def _autocast(kind: str) -> torch.dtype | None:
    """On a device of this kind; None where it is off."""
    if hasattr(torch, "get_autocast_dtype"):  # torch 2.4 or newer, which warns of the names before
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    if kind == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, images: Tensor, weight: Tensor, bias: Tensor | None, module: nn.Conv2d, later: Later
    ) -> Tensor:
        cast_images, cast_weight, cast_bias = _cast(images, weight, bias)
        context.save_for_backward(cast_images, cast_weight)
        context.weight, context.bias, context.module, context.later = weight, bias, module, later
        output: Tensor = module._conv_forward(cast_images, cast_weight, cast_bias)
        return output

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
        images, weight = context.saved_tensors
        parameter, module = context.weight, context.module
        sizes = None if context.bias is None else list(context.bias.shape)
        shape = (module.stride, module.padding, module.dilation, False, (0, 0), module.groups)

        def derived(mask: list[bool]) -> tuple[Any, ...]:
            found: tuple[Any, ...] = torch.ops.aten.convolution_backward(gradient, images, weight, sizes, *shape, mask)
            return found

        of_images, of_weight, of_bias = context.needs_input_grad[:3]
        if of_weight:
            context.later.add(lambda: added(parameter, derived([False, True, False])[1]))
        of_images, _, of_bias = derived([of_images, False, of_bias])
        return of_images, None, of_bias, None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, later: Later) -> Tensor:
        cast_inputs, cast_weight, cast_bias = _cast(inputs, weight, bias)
        context.save_for_backward(cast_inputs, cast_weight)
        context.weight, context.later = weight, later
        return nn.functional.linear(cast_inputs, cast_weight, cast_bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
        inputs, weight = context.saved_tensors
        parameter = context.weight

        def of_weight() -> None:
            added(parameter, gradient.flatten(0, -2).t() @ inputs.flatten(0, -2))

        if context.needs_input_grad[1]:
            context.later.add(of_weight)
        of_inputs = gradient @ weight if context.needs_input_grad[0] else None
        of_bias = gradient.flatten(0, -2).sum(0) if context.needs_input_grad[2] else None
        return of_inputs, None, of_bias, None
