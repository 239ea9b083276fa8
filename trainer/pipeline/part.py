"""The part of a network that a stage holds, and the shapes of what crosses its cuts.

part = part_of(model, stage)               of the model only these blocks keep their weights
shapes = cut_shapes("resnet152", (3, 32, 32), classes=10)        of one sample, behind each block
"""

from __future__ import annotations

from torch import Tensor, nn

from trainer.compute.models import stages_of
from trainer.shared.stages import Stage


class Part(nn.Module):
    """Calls these blocks one after the other. Weights and buffers keep the names that the whole network gives them."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.whole = model
        self._blocks = tuple(blocks)  # modules of `whole`, and so not listed twice

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self._blocks:
            inputs = block(inputs)
        return inputs

    def own_names(self) -> list[str]:
        """Of weights and buffers, as the whole network's state has them."""
        return [name.removeprefix("whole.") for name in self.state_dict()]


def part_of(model: nn.Module, stage: Stage) -> Part:
    """Takes everything else's weights and buffers away from the model."""
    blocks = stages_of(model)
    own = blocks[stage.first : stage.last + 1]
    kept = {id(module) for block in own for module in block.modules()}
    for block in blocks:
        for module in block.modules():
            if id(module) not in kept:
                module._parameters = {}
                module._buffers = {}
    return Part(model, own)
