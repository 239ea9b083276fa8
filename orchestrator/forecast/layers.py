"""Networks as lists of layers: parameter shapes and work (weights times positions, in multiplications), without torch.
Pure.

    layers = layers_of("resnet152", (3, 32, 32), classes=10)
    layers[-1].shapes                       ((10, 2048), (10,))
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

from orchestrator.errors import UsageError
from trainer.shared.experiments import CHOSEN, DATA_SETS, TEXT_MODELS, GptSize, gpt_size
from trainer.shared.settings import Settings

FLOAT_BYTES = 4
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    shapes: tuple[Shape, ...]
    """In the order of `model.parameters()`."""
    work: float
    """Forward, per image."""
    inputs: int = 0
    """Numbers per image; 0 if unused, as for BatchNorm."""
    batch_norm: bool | None = None
    """None: by its shapes."""
    kept: int | None = None
    """Numbers kept for backward, per image; None: its outputs."""

    @cached_property
    def is_batch_norm(self) -> bool:
        if self.batch_norm is not None:
            return self.batch_norm
        return len(self.shapes) == 2 and all(len(shape) == 1 for shape in self.shapes)

    @property
    def outputs(self) -> float:
        """Per image."""
        return self.shapes[0][0] * self.work / prod(self.shapes[0])

    @cached_property
    def bytes(self) -> int:
        return FLOAT_BYTES * sum(prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Block:
    """outputs: to the next block, per image."""

    layers: tuple[Layer, ...]
    outputs: int


def layers_of(model: str, image: tuple[int, int, int], classes: int) -> tuple[Layer, ...]:
    """In the order of forward. Raises KeyError for an unknown model."""
    return layers_in(blocks_of(model, image, classes))


def layers_in(blocks: Sequence[Block]) -> tuple[Layer, ...]:
    return tuple(layer for block in blocks for layer in block.layers)


def blocks_of(model: str, image: tuple[int, int, int], classes: int) -> tuple[Block, ...]:
    """Like `trainer.compute.models.stages_of`."""
    if model in TEXT_MODELS:
        return tuple(_gpt(gpt_size(model, classes), image[2]))
    if not is_written_here(model):
        return _recorded(model, image[1], classes)
    blocks = _lenet if model == "lenet" else partial(_resnet, _RESNETS[model])
    return tuple(blocks(*image[:2], classes))


def is_written_here(model: str) -> bool:
    """With the inputs of each layer, which `tensor` needs."""
    return model == "lenet" or model in _RESNETS


def is_resnet(model: str) -> bool:
    return model in _RESNETS


def is_known(settings: Settings) -> bool:
    model = settings.model
    if is_written_here(model) or model in TEXT_MODELS:
        return True
    return model in _records() and settings.data_set.shape[1] in PIXELS


def network_of(settings: Settings) -> tuple[Block, ...]:
    """Raises UsageError for an unknown network."""
    if not is_known(settings):
        written_here, sizes = ", ".join(["lenet", *_RESNETS, *TEXT_MODELS]), " or ".join(map(str, PIXELS))
        raise UsageError(
            f"{settings.model}: its layers are not known here, so that nothing is predicted",
            f"known: {written_here}, and {len(_records())} of torchvision's for {sizes} pixels, and others after "
            "`orch profile` has measured them on your hosts, with the same --set; `orch run` trains it all the same",
        )
    return blocks_of(settings.model, settings.data_set.shape, settings.data_set.classes)


def has_depthwise(layers: Sequence[Layer]) -> bool:
    """Convolutions of one channel each, which are limited by memory and take far longer than their work."""
    return any(len(shape) == 4 and shape[1] == 1 for layer in layers[1:] for shape in layer.shapes)


def network_like(exp: str) -> tuple[Block, ...]:
    """By the experiment's name. Raises KeyError for one without training."""
    facts = DATA_SETS[CHOSEN[exp]["data"]]
    return blocks_of(CHOSEN[exp]["model"], facts.shape, facts.classes)


def gradient_bytes(layers: Sequence[Layer]) -> int:
    return sum(layer.bytes for layer in layers)


# torchvision's networks, written by deploy/networks.py.
NETWORKS = Path(__file__).with_name("networks.json.gz")
PIXELS = (32, 224)
WRITTEN_CLASSES = 1000


@cache
def _records() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(gzip.decompress(NETWORKS.read_bytes()))["networks"]
    return found


def _recorded(model: str, pixels: int, classes: int) -> tuple[Block, ...]:
    """Raises KeyError for an unknown model or size."""
    *others, last = _records()[model][str(pixels)]
    blocks = [Block(tuple(map(_seen, block["layers"])), block["outputs"]) for block in others]
    blocks.append(Block(tuple(_for_classes(_seen(layer), classes) for layer in last["layers"]), classes))
    first, *rest = blocks[0].layers
    known = replace(first, inputs=3 * pixels * pixels)  # other layers' inputs were not recorded
    return (Block((known, *rest), blocks[0].outputs), *blocks[1:])


def _for_classes(layer: Layer, classes: int) -> Layer:
    """No other layer has as many outputs as classes were written."""
    if not any(shape[0] == WRITTEN_CLASSES for shape in layer.shapes):
        return layer
    kept = tuple((classes, *shape[1:]) if shape[0] == WRITTEN_CLASSES else shape for shape in layer.shapes)
    return replace(layer, shapes=kept, work=layer.work * classes / WRITTEN_CLASSES)


def _seen(layer: dict[str, Any]) -> Layer:
    return Layer(tuple(map(tuple, layer["shapes"])), layer["work"], batch_norm=layer.get("batch_norm"))


def _weights(shape: Shape, inputs: int, positions: int = 1, bias: bool = True) -> Layer:
    return Layer((shape, shape[:1]) if bias else (shape,), prod(shape) * positions, inputs)


def _lenet(channels: int, size: int, classes: int) -> Iterator[Block]:
    """For 32x32: 28x28 positions for the first kernel, 10x10 for the second."""
    first = _weights((6, channels, 5, 5), channels * size * size, 28 * 28)
    yield Block((first, _weights((16, 6, 5, 5), 6 * 14 * 14, 10 * 10)), 400)
    maps = ((120, 400), (84, 120), (classes, 84))
    yield Block(tuple(_weights((outputs, inputs), inputs) for outputs, inputs in maps), classes)


def _gpt(size: GptSize, tokens: int) -> Iterator[Block]:
    """Like `trainer.compute.gpt`. The products of attention have no weights: they count with the layer behind them."""
    width, numbers = size.width, size.width * tokens

    def norm() -> Layer:
        return Layer(((width,), (width,)), numbers, batch_norm=False, kept=2 * numbers)  # inputs and outputs

    def linear(inputs: int, outputs: int, kept: int) -> Layer:
        return Layer(((outputs, inputs), (outputs,)), inputs * outputs * tokens, kept=kept)

    embeddings = (Layer(((size.vocabulary, width),), 0.0), Layer(((tokens, width),), 0.0))
    yield Block(embeddings, numbers)
    for _ in range(size.layers):
        attended = linear(width, width, numbers)
        attended = replace(attended, work=attended.work + 2 * tokens**2 * width)
        attention = norm(), linear(width, 3 * width, 3 * numbers), attended
        mlp = norm(), linear(width, 4 * width, 4 * numbers), linear(4 * width, width, 4 * numbers)
        yield Block((*attention, *mlp), numbers)
    logits = size.vocabulary * tokens
    head = Layer(((size.vocabulary, width),), logits * width, kept=2 * logits)  # and their logarithms in the loss
    yield Block((norm(), head), logits)


_RESNETS = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3), "resnet152": (3, 8, 36, 3)}
"""Blocks by width."""


def _resnet(counts: Sequence[int], channels: int, size: int, classes: int) -> Iterator[Block]:
    """He et al. 2016 as torchvision builds it: the stride is in the 3x3 convolution."""
    image, size = size, -(-size // 2)
    stem = tuple(_convolution(channels, 64, 7, image, stride=2))
    size, inputs = -(-size // 2), 64
    yield Block(stem, inputs * size * size)
    for width, blocks, stride in zip((64, 128, 256, 512), counts, (1, 2, 2, 2), strict=True):
        for block in range(blocks):
            step = stride if block == 0 else 1
            outside, size = size, -(-size // step)
            layers = [*_convolution(inputs, width, 1, outside), *_convolution(width, width, 3, outside, step)]
            layers += _convolution(width, 4 * width, 1, size)
            if block == 0:
                layers += _convolution(inputs, 4 * width, 1, outside, step)
            inputs = 4 * width
            yield Block(tuple(layers), inputs * size * size)
    yield Block((_weights((classes, inputs), inputs),), classes)


def _convolution(inputs: int, outputs: int, kernel: int, size: int, stride: int = 1) -> Iterator[Layer]:
    """With its BatchNorm. size: input pixels."""
    taken, size = inputs * size * size, -(-size // stride)
    yield _weights((outputs, inputs, kernel, kernel), taken, size * size, bias=False)
    yield Layer(((outputs,), (outputs,)), outputs * size * size)
