"""Which layers of a network can be cut, what they take and give: `layers_of(model, images, shares)`, without computing.

Weights of other kinds (BatchNorm's) are held and moved by every rank: all see the same activations and gradients, so
that they stay alike with nothing exchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.compute.meta_pass import how_it_failed
from trainer.compute.models import has_hooks, skeleton_of, storage_of
from trainer.shared.errors import TrainError
from trainer.tensor.slices import Slices, cut_channels


@dataclass(frozen=True)
class Layer:
    """One that is cut. takes, gives: the shapes of a sample's input and output."""

    name: str
    slices: Slices
    work: float
    """Its part of the network's multiplications, 0..1."""
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    axis: int
    """That of the channels, in a batch's output."""


def is_cut(module: nn.Module) -> bool:
    """Not subclasses: some (of attention) are never called, others read their weights. Nor what would be lost with the
    layer that a slice takes the place of: its hooks, those of its weights, a forward pass of its own.
    """
    if has_hooks(module) or "forward" in vars(module):
        return False
    weights = [module._parameters.get(name) for name in ("weight", "bias")]
    if weights[0] is None or any(weight is not None and weight._backward_hooks for weight in weights):
        return False  # without a weight: a hook computes it from others
    return type(module) is nn.Linear or (type(module) is nn.Conv2d and module.padding_mode == "zeros")


def _names_of_cut(model: nn.Module) -> set[str]:
    """Of the layers that are cut. Those whose weights others use as well stay whole, on every rank."""
    used = Counter(storage_of(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    read = {id(layer) for encoder in encoders for layer in encoder.children()}
    return {
        name
        for name, module in model.named_modules()
        if is_cut(module)
        and id(module) not in read  # as its fast path does in evaluations, without a call
        and all(used[storage_of(weight)] == 1 for weight in module.parameters(recurse=False))
    }


def survey(name: str, shape: tuple[int, int, int], classes: int, shares: Sequence[int]) -> tuple[Layer, ...]:
    """In the order in which forward comes to them. shares: each rank's part, of a batch or in any other unit."""
    return layers_of(skeleton_of(name, shape, classes), torch.zeros(2, *shape, device="meta"), shares)


def layers_of(model: nn.Module, images: Tensor, shares: Sequence[int]) -> tuple[Layer, ...]:
    """images: two at least. Both on torch's meta device."""
    visits: list[tuple[str, nn.Module, Tensor, Tensor]] = []
    names = _names_of_cut(model)
    hooks = [
        module.register_forward_hook(_remember(name, visits)) for name, module in model.named_modules() if name in names
    ]
    try:
        model(images)
    except Exception as error:  # whatever the network itself, or torch's meta device, raises
        raise TrainError(f"strategy tensor: {type(model).__name__} {how_it_failed(error)}; use ddp") from error
    for hook in hooks:
        hook.remove()
    works = [_work(module, output) for _, module, _, output in visits]
    return tuple(
        Layer(
            name,
            _slices(module, shares),
            work / sum(works),
            tuple(inputs.shape[1:]),
            tuple(output.shape[1:]),
            1 if isinstance(module, nn.Conv2d) else output.dim() - 1,
        )
        for (name, module, inputs, output), work in zip(visits, works, strict=True)
    )


def _remember(name: str, visits: list[tuple[str, nn.Module, Tensor, Tensor]]) -> Any:
    def visit(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        visits.append((name, module, inputs[0], output))

    return visit


def _slices(module: Any, shares: Sequence[int]) -> Slices:
    groups = module.groups if isinstance(module, nn.Conv2d) else 1
    return cut_channels(len(module.weight), groups, shares)


def _work(module: Any, output: Tensor) -> float:
    """Its weights times the positions at which they are applied."""
    return float(module.weight.numel() * output.numel() / len(module.weight))
