"""What a forward pass takes, without computing it.

>>> with torch.device("meta"):                      # which knows shapes and no numbers
...     network, images = nn.Sequential(nn.Linear(8, 4), nn.ReLU()), torch.zeros(2, 8)
>>> taken = meta_pass(network, images)
>>> taken.visits[0].work                            # multiplications of the first layer, for all inputs
64.0
>>> sum(tensor.untyped_storage().nbytes() for tensor in taken.kept.values())
96
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Visit:
    """A layer with weights, each time that the pass comes to it."""

    parameters: tuple[nn.Parameter, ...]
    work: float
    """Its weights times the positions at which they are applied: its multiplications."""


@dataclass(frozen=True)
class Taken:
    output: Tensor
    visits: tuple[Visit, ...]
    kept: Mapping[int, Tensor]
    """What is held until backward, by its storage."""


def meta_pass(module: nn.Module, inputs: Tensor, held: Collection[int] = ()) -> Taken:
    """held: storages that somebody else holds, which are not counted; nor are weights and buffers."""
    visits: list[Visit] = []
    kept: dict[int, Tensor] = {}
    elsewhere = {_storage(tensor) for tensor in [*module.parameters(), *module.buffers()]}.union(held)

    def visit(layer: nn.Module, _: Any, output: Tensor) -> None:
        own = tuple(layer.parameters(recurse=False))
        largest = max(parameter.numel() for parameter in own)
        visits.append(Visit(own, largest * output.numel() / output.shape[1]))

    def keep(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in elsewhere:
            kept[_storage(tensor)] = tensor  # the tensor itself, so that no later storage takes the same address
        return tensor

    layers = [one for one in module.modules() if next(one.parameters(recurse=False), None) is not None]
    hooks = [layer.register_forward_hook(visit) for layer in layers]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(inputs)
    for hook in hooks:
        hook.remove()
    return Taken(output.detach(), tuple(visits), kept)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
