"""What a rank without samples gives to the others: gradients that are exactly 0, whatever the network.

loss_sum = no_loss(weights)              without a forward pass: nothing that the network does can be seen in it
with without_effect(network):            if ranks meet in the forward pass: with samples that count for nothing
    loss_sum = ...
    strategy.backward(loss_sum, 0, batch)

A made-up sample, or a loss times 0, would not do: 0 times a number that is not finite is NaN, for every rank.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.strategies.batch_norm import SynchronisedBatchNorm

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""What each module has that is no note of its own; buffers are looked at by themselves."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def no_loss(weights: Sequence[Tensor]) -> Tensor:
    """0, whose gradient is exactly 0 for each of these weights."""
    loss: Tensor = _Nothing.apply(*weights)
    return loss


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, *weights: Tensor) -> Tensor:
        context.weights = weights
        return weights[0].new_zeros(())

    @staticmethod
    def backward(context: Any, _: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(weight) for weight in context.weights)


@contextlib.contextmanager
def without_effect(network: nn.Module) -> Iterator[None]:
    """Forward and backward in it take part in what all ranks do together, and change nothing else: gradients of all
    weights are 0, a BatchNorm over all ranks does not count the samples, and buffers, modes and what modules note in
    attributes are put back. (Statistics of a BatchNorm over all ranks move on, as on the other ranks.)
    """
    hooks: list[Any] = []
    hooked: set[int] = set()

    def hook_weights(module: nn.Module, *_: object) -> None:
        """Those that are there now: fsdp's are gathered as forward comes to them."""
        for weight in module.parameters():
            if weight.requires_grad and id(weight) not in hooked:
                hooked.add(id(weight))
                hooks.append(weight.register_hook(torch.zeros_like))

    modules = list(network.modules())
    synchronised = [module for module in modules if isinstance(module, SynchronisedBatchNorm)]
    notes = [_Note(module) for module in modules]
    hook_weights(network)
    hooks += [module.register_forward_pre_hook(hook_weights) for module in modules]
    for module in synchronised:
        module.counts = False
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in synchronised:
            module.counts = True
        for note in notes:
            note.put_back()


class _Note:
    """What a module keeps from one forward pass to the next, beside its weights."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = {
            name: (value, _copied(value))
            for name, value in vars(module).items()
            if name not in _OF_TORCH and isinstance(value, (*_PLAIN, Tensor, list, dict, set, deque))
        }
        moves_on = isinstance(module, SynchronisedBatchNorm)
        self.buffers = {} if moves_on else {name: (one, _copied(one)) for name, one in module._buffers.items()}

    @torch.no_grad()
    def put_back(self) -> None:
        of_module: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (vars(self.module), self.attributes),
            (self.module._buffers, self.buffers),
        ]
        for places, kept in of_module:
            for name, (value, before) in kept.items():
                places[name] = value
                _refill(value, before)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value if isinstance(value, _PLAIN) else copy.copy(value)


def _refill(value: Any, before: Any) -> None:
    """If it was changed in place."""
    if isinstance(value, Tensor):
        value.copy_(before)
    elif not isinstance(value, _PLAIN):
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(before)
