"""What a network is made of, without computing it: its layers' work, and what a sample takes in memory.

>>> anatomy = dissect("lenet", (1, 28, 28), classes=10)
>>> anatomy.layers[0].parameters            # positions in the order of model.parameters()
(0, 1)
>>> anatomy.activation_bytes                # of one sample, kept from forward to backward
48080
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from trainer.compute.flat_buffer import bytes_of
from trainer.compute.meta_pass import Visit, meta_pass
from trainer.compute.models import skeleton_of, stages_of
from trainer.shared.errors import TrainError

_SAMPLES = 2  # BatchNorm refuses a single value a channel
_LAYERS = 64
"""Layers are joined until there are about this many: finer than any bucket, and few enough to cost nothing."""


@dataclass(frozen=True)
class LayerGroup:
    """Neighbouring layers, taken as one."""

    parameters: tuple[int, ...]
    """Positions in the order of `model.parameters()`."""
    work: float
    """Its part of the forward pass, 0..1."""


@dataclass(frozen=True)
class Anatomy:
    """What a stand-in has to know of a network."""

    model: nn.Module
    """The network on the meta device."""
    layers: tuple[LayerGroup, ...]
    """In the order in which forward visits them."""
    activation_bytes: int

    @property
    def state_bytes(self) -> int:
        """Weights, their gradients, SGD's momentum, and the buffers."""
        return 3 * bytes_of(*self.model.parameters()) + bytes_of(*self.model.buffers())


def dissect(name: str, shape: tuple[int, int, int], classes: int) -> Anatomy:
    """Raises TrainError for a network that is no chain of blocks: nobody knows when its layers' gradients are due."""
    model, images = skeleton_of(name, shape, classes), torch.zeros(_SAMPLES, *shape, device="meta")
    if not stages_of(model):
        raise TrainError(f"paced: {name} is no chain of blocks whose time could be kept; use a ResNet, or leave it out")
    taken = meta_pass(model, images)
    kept_bytes = sum(tensor.untyped_storage().nbytes() for tensor in taken.kept.values())
    return Anatomy(model, _joined(model, taken.visits), kept_bytes // _SAMPLES)


def _joined(model: nn.Module, visits: Sequence[Visit]) -> tuple[LayerGroup, ...]:
    position = {id(parameter): index for index, parameter in enumerate(model.parameters())}
    total = sum(visit.work for visit in visits)
    layers: list[LayerGroup] = []
    parameters: tuple[int, ...] = ()
    work = 0.0
    for visit in visits:
        parameters += tuple(position[id(parameter)] for parameter in visit.parameters)
        work += visit.work / total
        if work >= 1 / _LAYERS:
            layers.append(LayerGroup(parameters, work))
            parameters, work = (), 0.0
    return (*layers, LayerGroup(parameters, work)) if parameters else tuple(layers)
