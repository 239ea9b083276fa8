"""What a network is made of, without computing it: its layers' work, and what a sample takes in memory.

    anatomy = dissect("resnet152", (3, 32, 32), classes=10)
    anatomy.layers[0].parameters        (0,): positions in the order of model.parameters()
    anatomy.activation_bytes            of one sample, kept from forward to backward

The network runs once on torch's meta device, which knows shapes and no numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.compute.models import build_model

_SAMPLES = 2  # BatchNorm refuses a single value a channel
_LAYERS = 64
"""Layers are joined until there are about this many: finer than any bucket, and few enough to cost nothing."""


@dataclass(frozen=True)
class Layer:
    """One layer of a network."""

    parameters: tuple[int, ...]
    """Positions in the order of `model.parameters()`."""
    work: float
    """Its part of the forward pass, 0..1."""


@dataclass(frozen=True)
class Anatomy:
    """What a stand-in has to know of a network."""

    model: nn.Module
    """The network on the meta device."""
    layers: tuple[Layer, ...]
    """In the order in which forward visits them."""
    activation_bytes: int

    @property
    def state_bytes(self) -> int:
        """Weights, their gradients, SGD's momentum, and the buffers."""
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        return 3 * weights + sum(buffer.nbytes for buffer in self.model.buffers())


def dissect(name: str, shape: tuple[int, int, int], classes: int) -> Anatomy:
    """The multiplications of a layer are its weights times the positions at which it is applied."""
    with torch.device("meta"):
        model = build_model(name, shape, classes)
        images = torch.zeros(_SAMPLES, *shape)
    position = {id(parameter): index for index, parameter in enumerate(model.parameters())}
    visited: list[tuple[tuple[int, ...], float]] = []

    def visit(module: nn.Module, _: Any, output: Tensor) -> None:
        own = list(module.parameters(recurse=False))
        largest = max(parameter.numel() for parameter in own)
        visited.append(
            (tuple(position[id(parameter)] for parameter in own), largest * output.numel() / output.shape[1])
        )

    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_hook(visit)
    kept: dict[int, int] = {}
    state = {_storage(tensor) for tensor in [*model.parameters(), *model.buffers()]}

    def keep(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in state:
            kept[_storage(tensor)] = tensor.untyped_storage().nbytes()
        held.append(tensor)  # so that no later storage takes the same address
        return tensor

    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(images)
    return Anatomy(model, _joined(visited), sum(kept.values()) // _SAMPLES)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _joined(visited: list[tuple[tuple[int, ...], float]]) -> tuple[Layer, ...]:
    total = sum(work for _, work in visited)
    layers: list[Layer] = []
    parameters: tuple[int, ...] = ()
    work = 0.0
    for own, flops in visited:
        parameters, work = (*parameters, *own), work + flops / total
        if work >= 1 / _LAYERS:
            layers.append(Layer(parameters, work))
            parameters, work = (), 0.0
    return (*layers, Layer(parameters, work)) if parameters else tuple(layers)
