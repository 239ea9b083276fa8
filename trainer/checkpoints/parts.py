"""A whole network's state out of what ranks hold of it, and the other way round: checkpoints know nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.checkpoints.optimizer_state import State
from trainer.strategies.base import Parts

if TYPE_CHECKING:
    from trainer.training.run import Run


def skeleton(run: Run) -> nn.Module:
    """The whole network without numbers."""
    skeleton: nn.Module = run.material.skeleton()
    return skeleton


def to_be_kept(run: Run, network: nn.Module, parts: Parts, whole: nn.Module, state: State) -> dict[str, Tensor]:
    """This rank's part of the network, and of what the optimiser remembers, less what a lower rank has as well.
    network: what all that hold this part share of it.
    """
    wanted = parts.kept(run.info.rank, whole.state_dict(), whole)
    names, own = [name for name, _ in run.model.named_parameters()], network.state_dict()
    found = {name: own[name] for name in wanted}
    for kind, tensors in state.items():
        of_names = dict(zip(names, tensors, strict=True))
        found |= {remembered(kind, name): one for name in wanted if (one := of_names.get(name)) is not None}
    return found


def joined(
    of_ranks: Sequence[Mapping[str, Tensor]], parts: Parts, whole: nn.Module
) -> tuple[dict[str, Tensor], dict[str, list[Tensor | None]]]:
    """The whole network's state and its optimiser's. of_ranks: what each has kept."""
    like = whole.state_dict()
    weights = [name for name, _ in whole.named_parameters()]
    kinds = dict.fromkeys(name.partition(" ")[0] for kept in of_ranks for name in kept if " " in name)
    state = _assembled(of_ranks, parts, whole, {name: name for name in like})
    of_optimizer: dict[str, list[Tensor | None]] = {}
    for kind in kinds:
        found = _assembled(of_ranks, parts, whole, {name: remembered(kind, name) for name in weights})
        of_optimizer[kind] = [found.get(name) for name in weights]
    return state, of_optimizer


def _assembled(
    of_ranks: Sequence[Mapping[str, Tensor]], parts: Parts, whole: nn.Module, called: Mapping[str, str]
) -> dict[str, Tensor]:
    """called: what stands in `of_ranks` for each weight or buffer of the network, by its name."""
    of_whole, found = whole.state_dict(), dict[str, Tensor]()
    for name, key in called.items():
        one = next((kept[key] for kept in of_ranks if key in kept), None)
        if one is not None:
            found[name] = torch.empty(of_whole[name].shape if one.dim() else (), dtype=one.dtype)
    for rank, kept in enumerate(of_ranks):
        for name, tensor in parts.kept(rank, found, whole).items():
            tensor.copy_(kept[called[name]])
    return found


def remembered(kind: str, name: str) -> str:
    """What an optimiser remembers of the weight of this name, among other tensors."""
    return f"{kind} {name}"


def take(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """state: what a rank holds, or more of it."""
    for name, tensor in model.state_dict().items():  # load_state_dict would miss what a stage has taken away
        tensor.copy_(state[name])


def own_state(run: Run, parts: Parts, state: State) -> dict[str, list[Tensor | None]]:
    """Of what a whole network's optimiser remembers that of this rank's weights."""
    whole = skeleton(run)
    names, own = [name for name, _ in whole.named_parameters()], [name for name, _ in run.model.named_parameters()]
    found: dict[str, list[Tensor | None]] = {}
    for kind, tensors in state.items():
        known = {name: one for name, one in zip(names, tensors, strict=True) if one is not None}
        held = parts.held(run.info.rank, known, whole)
        found[kind] = [held.get(name) for name in own]
    return found
