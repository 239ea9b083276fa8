"""A whole network's state out of what ranks hold of it, and the other way round: checkpoints know nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.strategies.base import Parts

if TYPE_CHECKING:
    from trainer.training.run import Run


def skeleton(run: Run) -> nn.Module:
    """The whole network without numbers."""
    skeleton: nn.Module = run.material.skeleton()
    return skeleton


def to_be_kept(
    run: Run, network: nn.Module, parts: Parts, whole: nn.Module, momentum: Sequence[Tensor | None]
) -> dict[str, Tensor]:
    """This rank's part of the network, and of SGD's momentum, less what a lower rank has as well. network: what all
    that hold this part share of it.
    """
    wanted = parts.kept(run.info.rank, whole.state_dict(), whole)
    names = [name for name, _ in run.model.named_parameters()]
    moved = {of_momentum(name): one for name, one in zip(names, momentum, strict=True) if one is not None}
    own = network.state_dict()
    return {name: own[name] for name in wanted} | {
        name: moved[name] for name in map(of_momentum, wanted) if name in moved
    }


def like_that_of(rank: int, parts: Parts, whole: nn.Module, *, moves: bool) -> dict[str, Tensor]:
    """What `to_be_kept` gives on a rank, as far as names and shapes go. moves: has SGD a momentum yet?"""
    kept, weights = parts.kept(rank, whole.state_dict(), whole), dict(whole.named_parameters())
    return kept | {of_momentum(name): tensor for name, tensor in kept.items() if moves and name in weights}


def joined(
    of_ranks: Sequence[Mapping[str, Tensor]], parts: Parts, whole: nn.Module
) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    """The whole network's state and momentum. of_ranks: what each has kept."""
    state = {name: torch.empty_like(tensor, device="cpu") for name, tensor in whole.state_dict().items()}
    moves = any(of_momentum(name) in kept for kept in of_ranks for name in state)
    momentum = {name: torch.empty_like(state[name]) for name, _ in whole.named_parameters()} if moves else {}
    for rank, kept in enumerate(of_ranks):
        for name, tensor in parts.kept(rank, state, whole).items():
            tensor.copy_(kept[name])
        for name, tensor in parts.kept(rank, momentum, whole).items():
            tensor.copy_(kept[of_momentum(name)])
    return state, [momentum.get(name) for name, _ in whole.named_parameters()]


def of_momentum(name: str) -> str:
    return f"momentum {name}"


def take(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """state: what a rank holds, or more of it."""
    for name, tensor in model.state_dict().items():  # load_state_dict would miss what a stage has taken away
        tensor.copy_(state[name])


def own_momentum(run: Run, parts: Parts, momentum: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Of a whole network's momentum that of this rank's weights, in their order."""
    whole = skeleton(run)
    known = zip((name for name, _ in whole.named_parameters()), momentum, strict=bool(momentum))
    held = parts.held(run.info.rank, {name: one for name, one in known if one is not None}, whole)
    return [held.get(name) for name, _ in run.model.named_parameters()]
