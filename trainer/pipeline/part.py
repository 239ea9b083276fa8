"""The part of a network that a stage holds.

part = part_of(model, stage)               of the model only these blocks keep their weights
part.state_dict()                          of these alone, under the names that the whole network gives them
own_names(model, stage)                    those names, of a whole network
StageParts(layout).held(rank, ...)         what of its state lies on which rank
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from trainer.compute.models import stages_of
from trainer.pipeline.stage_layout import Layout
from trainer.shared.stages import Stage


class Part(nn.Module):
    """Calls these blocks one after the other."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        super().__init__()
        for name, child in model._modules.items():  # all of them: a module that is used twice has two names
            self.add_module(name, child)
        self._blocks = tuple(blocks)  # modules of these children, and so not listed twice

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self._blocks:
            inputs = block(inputs)
        return inputs


def part_of(model: nn.Module, stage: Stage) -> Part:
    """Takes everything else's weights and buffers away from the model."""
    own = _modules_of(model, stage)
    blocks = stages_of(model)
    for block in blocks:
        for module in block.modules():
            if id(module) not in own:
                module._parameters = {}
                module._buffers = {}
    return Part(model, blocks[stage.first : stage.last + 1])


def own_names(model: nn.Module, stage: Stage) -> list[str]:
    """Of the weights and buffers of a stage, in the order of the whole network's state."""
    own = _modules_of(model, stage)
    holders = {name for name, module in model.named_modules(remove_duplicate=False) if id(module) in own}
    return [name for name in model.state_dict() if name.rpartition(".")[0] in holders]


class StageParts:
    """Which part of a whole network's state lies on which rank."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def held(self, rank: int, state: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
        return {name: state[name] for name in own_names(network, self.layout.stage(rank)) if name in state}

    def kept(self, rank: int, state: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
        is_first = self.layout.holders(self.layout.stage(rank).first)[0] == rank
        return self.held(rank, state, network) if is_first else {}


def _modules_of(model: nn.Module, stage: Stage) -> set[int]:
    blocks = stages_of(model)[stage.first : stage.last + 1]
    return {id(module) for block in blocks for module in block.modules()}
