"""What any network is made of, as a forecast of its speed needs it, seen in its first forward pass.

>>> network = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
>>> seen = Visited(network)
>>> _ = network(torch.zeros(3, 8))
>>> seen.blocks(samples=3)[0]           # work: multiplications of one sample; outputs: numbers that leave the block
{'layers': [{'shapes': [[4, 8], [4]], 'work': 32.0}], 'outputs': 4}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer.compute.meta_pass import numbers, work_of
from trainer.compute.models import skeleton_of, stages_of
from trainer.shared.metrics import LINE_LIMIT

LARGEST = LINE_LIMIT // 3
"""Characters of all blocks in JSON: the rest of a line is for the blocks' times, and what else a profile says."""


def blocks_on_paper(name: str, shape: tuple[int, int, int], classes: int) -> list[dict[str, Any]] | None:
    """The blocks of one of our networks, without a computation. None where it cannot do without numbers, and as
    `Visited.blocks`.
    """
    network = skeleton_of(name, shape, classes).eval()  # a part that only training has computes nothing that counts
    visited, samples = Visited(network), 2
    try:
        network(torch.zeros(samples, *shape, device="meta"))
    except (RuntimeError, NotImplementedError):
        return None
    return visited.blocks(samples)


class Visited:
    """From now until the end of the network's first forward pass. Blocks are those between which it may be cut: a
    network that cannot be cut (may_cut: False if something else forbids it) is a single one.
    """

    def __init__(self, network: nn.Module, *, may_cut: bool = True) -> None:
        self._network, self._chain = network, (stages_of(network) if may_cut else []) or [network]
        self._layers: list[tuple[nn.Module, float]] = []
        """Those with weights of their own in the order of forward, and each one's work for all samples."""
        self._outputs: dict[int, int] = {}
        self._is_over = False
        self._hooks = [*self._watch()]

    def _watch(self) -> Iterator[RemovableHandle]:
        for layer in self._network.modules():
            if any(True for _ in layer.parameters(recurse=False)):
                yield layer.register_forward_hook(self._visit)
        called = {id(module) for module in self._network.modules()}
        for number, block in enumerate(self._chain):
            last = block if id(block) in called else list(cast(nn.Sequential, block))[-1]
            yield last.register_forward_hook(self._leave(number))
        yield self._network.register_forward_hook(self._end)

    def _visit(self, layer: nn.Module, inputs: Any, outputs: Any) -> None:
        self._layers.append((layer, work_of(layer, numbers(inputs), numbers(outputs))))

    def _leave(self, number: int) -> Callable[[nn.Module, Any, Any], None]:
        def left(block: nn.Module, inputs: Any, outputs: Any) -> None:
            self._outputs[number] = numbers(outputs)

        return left

    def _end(self, network: nn.Module, inputs: Any, outputs: Any) -> None:
        self._is_over = True
        for hook in self._hooks:
            hook.remove()

    def blocks(self, samples: int) -> list[dict[str, Any]] | None:
        """samples: of that pass. None before it, where gradients are not of 32 bits, as a forecast has them, and where
        there are more layers than fit into a record.
        """
        trained = [weight for weight in self._network.parameters() if weight.requires_grad]
        if not self._is_over or any(weight.dtype != torch.float32 for weight in trained):
            return None
        seen = set[int]()
        blocks = [self._block(number, samples, seen) for number in range(len(self._chain))]
        return blocks if len(json.dumps(blocks)) <= LARGEST else None

    def _block(self, number: int, samples: int, seen: set[int]) -> dict[str, Any]:
        """seen: weights that have been counted, which a layer may share with another."""
        inside, layers = {id(module) for module in self._chain[number].modules()}, list[dict[str, Any]]()
        for layer, work in [each for each in self._layers if id(each[0]) in inside]:
            shapes = _fresh(layer.parameters(recurse=False), seen)
            if shapes or not layers:
                layers.append({"shapes": shapes, "work": 0.0})
            layers[-1]["work"] += work / samples
        if beside := _fresh(self._chain[number].parameters(), seen):  # whoever computes with them was not called
            layers.append({"shapes": beside, "work": 0.0})
        whole = [layer for layer in layers if layer["shapes"]]
        return {"layers": whole, "outputs": self._outputs.get(number, 0) // samples}


def _fresh(weights: Iterator[nn.Parameter], seen: set[int]) -> list[list[int]]:
    """The shapes of those that are trained and that nobody has counted."""
    found = [weight for weight in weights if weight.requires_grad and id(weight) not in seen]
    seen.update(map(id, found))
    return [list(weight.shape) for weight in found]
