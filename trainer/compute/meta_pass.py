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

from trainer.compute.models import storage_of

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Visit:
    """A layer with weights, each time that the pass comes to it."""

    parameters: tuple[nn.Parameter, ...]
    work: float
    """Its weights times the positions at which they are applied: its multiplications."""


@dataclass(frozen=True)
class Taken:
    output: Any
    visits: tuple[Visit, ...]
    kept: Mapping[int, Tensor]
    """What is held until backward, by its storage."""


def meta_pass(module: nn.Module, inputs: Tensor, held: Collection[int] = ()) -> Taken:
    """held: storages that somebody else holds, which are not counted; nor are weights and buffers."""
    visits: list[Visit] = []
    kept: dict[int, Tensor] = {}
    elsewhere = {storage_of(tensor) for tensor in [*module.parameters(), *module.buffers()]}.union(held)

    def visit(layer: nn.Module, inputs: Any, output: Any) -> None:
        visits.append(Visit(tuple(layer.parameters(recurse=False)), work_of(layer, numbers(inputs), numbers(output))))

    def keep(tensor: Tensor) -> Tensor:
        if storage_of(tensor) not in elsewhere:
            kept[storage_of(tensor)] = tensor  # the tensor itself, so that no later storage takes the same address
        return tensor

    layers = [one for one in module.modules() if next(one.parameters(recurse=False), None) is not None]
    hooks = [layer.register_forward_hook(visit) for layer in layers]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(inputs)
    for hook in hooks:
        hook.remove()
    return Taken(output, tuple(visits), kept)


def how_it_failed(error: Exception) -> str:
    """Of a network that cannot be called on the meta device, to follow its name."""
    first = (str(error).splitlines() or [""])[0][:200]
    return f"fails without numbers, on torch's meta device ({type(error).__name__}: {first})"


def numbers(values: Any) -> int:
    """In the first tensor of all: recurrent layers and attention give several."""
    if isinstance(values, Tensor):
        return values.numel()
    parts = values.values() if isinstance(values, Mapping) else values if isinstance(values, (tuple, list)) else ()
    return next((found for found in map(numbers, parts) if found), 0)


def work_of(layer: nn.Module, inputs: int, outputs: int) -> float:
    """Multiplications forward: its largest weight, times the positions at which it is applied.

    inputs, outputs: how many numbers go in and come out.
    """
    weight = max(layer.parameters(recurse=False), key=torch.numel)
    if weight.dim() < 2 or isinstance(layer, (nn.Embedding, nn.LayerNorm)):
        return float(outputs)
    return weight.numel() * (inputs if isinstance(layer, _TRANSPOSED) else outputs) / weight.shape[0]
