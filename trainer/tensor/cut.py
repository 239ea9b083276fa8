"""A network whose layers hold this rank's slices alone: `cut(model, layers, meeting)`, in place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from trainer.tensor.layers import Sliced, SlicedConv2d, SlicedLinear
from trainer.tensor.meeting import Meeting
from trainer.tensor.survey import Layer


def cut(model: nn.Module, layers: Sequence[Layer], meeting: Meeting) -> nn.Module:
    """layers: as `survey` gives them; one that is called twice is there twice, and cut once."""
    for layer in layers:
        parent, _, name = layer.name.rpartition(".")
        holder, whole = model.get_submodule(parent), model.get_submodule(layer.name)
        if not isinstance(whole, Sliced):
            kind: type[Sliced] = SlicedConv2d if isinstance(whole, nn.Conv2d) else SlicedLinear
            setattr(holder, name, kind(whole, layer.slices, meeting, layer.axis))
    return model
