"""What each rank has for itself, beside the weights that all share, and what of it other ranks can begin with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainer.checkpoints.file import BUFFERS, Checkpoint

_IN_THE_MEAN = {"statistics", "optimizer", "weights", "round", "travelling", "scale", "buffers"}
"""What ranks have for themselves: other ranks begin with the mean of it, or with rank 0's loss scale and buffers."""


def by_others(saved: Checkpoint) -> str:
    shares = ",".join(map(str, saved.shares))
    in_round = ", local updates with that of their weights" if "round.counts" in saved.own[0] else ""
    return (
        f"; they were made by {saved.world_size} ranks with shares {shares}: the samples stay the same, "
        f"BatchNorm begins with the mean of the ranks' statistics{in_round}"
    )


def numbered(kind: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"{kind}.{number}": tensor for number, tensor in enumerate(tensors)}


def fill(tensors: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> str:
    """Copies what has the same name and shape. Returns the words for what was not there, and for what was not used."""
    fits = {name for name, tensor in tensors.items() if name in kept and kept[name].shape == tensor.shape}
    for name in fits:
        tensors[name].copy_(kept[name])
    fresh, dropped = ({name.partition(".")[0] for name in {*of} - fits} - _IN_THE_MEAN for of in (tensors, kept))
    words = f"; {', '.join(sorted(fresh))}: not in the checkpoint, started fresh" if fresh else ""
    return words + (f"; {', '.join(sorted(dropped - fresh))}: left out" if dropped - fresh else "")


def for_other_ranks(saved: Checkpoint, world_size: int) -> dict[str, Tensor]:
    """What each of so many ranks begins with: of BatchNorm's statistics the mean by samples, of what compressing still
    owes an equal part of the sum, of all else the mean; the mean of the weights stands in `model`.
    """
    if saved.settings.get("stages"):
        return {}  # what each rank had belongs to a part of the network
    samples = torch.tensor([of_rank[2] for of_rank in saved.sums], dtype=torch.float64)
    parts = samples / samples.sum() if samples.sum() > 0 else torch.eye(saved.world_size)[0]
    found = {}
    for name in [name for name in saved.own[0] if not name.startswith(BUFFERS)]:  # they begin with those in `model`
        of_ranks = torch.stack([own[name] for own in saved.own])
        kind = name.partition(".")[0]
        if kind in ("round", "travelling"):  # the same on all, or of no use to others
            found[name] = of_ranks[0]
        elif kind == "scale":  # the one with which none of them overflowed
            found[name] = of_ranks.amin(0)
        elif kind == "statistics":
            counted = parts > 0  # not 0 times what others have: that may be infinite
            found[name] = torch.tensordot(parts[counted].to(of_ranks.dtype), of_ranks[counted], dims=1)
        elif kind != "weights":
            found[name] = of_ranks.sum(0) / (world_size if kind == "memory" else saved.world_size)
    return found
