"""A network as a pipeline sees it: blocks in a row, with the time, the memory and the bytes of each. Pure.

    chain = chain_of("resnet152", (3, 32, 32), classes=10)
    chain.work(0, 20), chain.cut_bytes(20)          0.36, 16384: blocks 0 to 19, and what crosses behind them a sample

Times are parts of what the whole network takes, so that one speed of a host gives the time of any stretch of blocks;
`stage_host` takes a host's own times of each block in their place, where it has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from orchestrator.forecast.gpus import activation_bytes
from orchestrator.forecast.layers import FLOAT_BYTES, Block, blocks_of

THIRD = 1 / 3
"""Of a block's time, for each of FORWARD, BACKWARD (for its inputs) and WEIGHTS: a layer's forward is one product of
matrices, and its two gradients are one each of the same size (`trainer.shared.pace`: 0.33 and 0.66)."""


@dataclass(frozen=True)
class ChainBlock:
    """forward, backward, weights: parts of the time that the whole network takes for a sample, 0..1; over all blocks
    and the three they add up to 1. fixed: its part of what a micro-batch costs whatever its size. kept_bytes: held for
    backward, a sample. cut_bytes: what goes to the next block, a sample; gradients that come back have as many.
    """

    forward: float
    backward: float
    weights: float
    fixed: float
    weight_bytes: int
    kept_bytes: int
    cut_bytes: int


@dataclass(frozen=True)
class Chain:
    """Sums over blocks `first` to `last - 1`."""

    blocks: tuple[ChainBlock, ...]

    @cached_property
    def _hash(self) -> int:
        return hash(self.blocks)

    def __hash__(self) -> int:
        """Formed once: whoever remembers what a chain takes on a host asks for it thousands of times."""
        return self._hash

    @cached_property
    def forwards(self) -> tuple[float, ...]:
        """Sums of the blocks before each, and of all."""
        return _sums([block.forward for block in self.blocks])

    @cached_property
    def backwards(self) -> tuple[float, ...]:
        return _sums([block.backward for block in self.blocks])

    @cached_property
    def of_weights(self) -> tuple[float, ...]:
        return _sums([block.weights for block in self.blocks])

    @cached_property
    def fixed(self) -> tuple[float, ...]:
        return _sums([block.fixed for block in self.blocks])

    @cached_property
    def works(self) -> tuple[float, ...]:
        return _sums([block.forward + block.backward + block.weights for block in self.blocks])

    @cached_property
    def weight_sums(self) -> tuple[float, ...]:
        return _sums([block.weight_bytes for block in self.blocks])

    @cached_property
    def kept_sums(self) -> tuple[float, ...]:
        return _sums([block.kept_bytes for block in self.blocks])

    def work(self, first: int, last: int) -> float:
        return self.works[last] - self.works[first]

    def weight_bytes(self, first: int, last: int) -> int:
        return round(self.weight_sums[last] - self.weight_sums[first])

    def kept_bytes(self, first: int, last: int) -> int:
        return round(self.kept_sums[last] - self.kept_sums[first])

    def cut_bytes(self, first: int) -> int:
        """What crosses a cut before block `first`, a sample, each way."""
        return self.blocks[first - 1].cut_bytes


def _sums(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(accumulate(values, initial=0.0))


def chain_of(model: str, image: tuple[int, int, int], classes: int, *, sent_bytes: int = FLOAT_BYTES) -> Chain:
    """Of one of our networks. Raises KeyError for a model that is not known here."""
    return chain_from(blocks_of(model, image, classes), sent_bytes)


def chain_from(blocks: Sequence[Block], sent_bytes: int) -> Chain:
    """By arithmetic: a block's time is its part of the multiplications, and of the fixed cost, which starts kernels
    layer by layer, its part of the layers with weights. sent_bytes: of each number that crosses a cut.
    """
    total = sum(layer.work for block in blocks for layer in block.layers)
    layers = sum(len(block.layers) for block in blocks)
    found = []
    for block in blocks:
        part = THIRD * sum(layer.work for layer in block.layers) / total
        weight_bytes = sum(layer.bytes for layer in block.layers)
        kept_bytes, cut_bytes = activation_bytes(block.layers), sent_bytes * block.outputs
        found.append(ChainBlock(part, part, part, len(block.layers) / layers, weight_bytes, kept_bytes, cut_bytes))
    return Chain(tuple(found))
