"""BatchNorm's running statistics of a network that all ranks share: averaged over them, or estimated again.

    average_running_statistics(network, group, samples)     where each rank's have followed the shared weights

    >>> network = nn.BatchNorm1d(2)
    >>> estimate_running_statistics(network, [torch.ones(4, 2), torch.zeros(4, 2)])     # they have followed others
    8
    >>> network.running_mean                                                            # then average these
    tensor([0.5000, 0.5000])

An average of weights that have gone apart, or an outer step, is a network that no rank has trained: its activations
have means and variances of their own, which some forward passes find (Izmailov et al. 2018, section 3.2).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.compute.flat_buffer import flatten, unflatten
from trainer.compute.models import batch_norms, running_statistics

REMEMBERED = 0.9
"""What torch's BatchNorm keeps of its running statistics at an update by default."""
BATCHES = 50
"""Updates whose samples decide what is estimated again."""


def average_running_statistics(model: nn.Module, group: dist.ProcessGroup, samples: float) -> None:
    """Leaves on every rank of the group the mean of all its ranks' BatchNorm statistics, each counted by its samples.

    samples: of this rank, that its statistics come from; where no rank has any, all stay as they are. The spread
    between the ranks' means is left out of the variance: with shuffled samples it is small, and in the batches' own,
    which are those of a population, already.
    """
    statistics = running_statistics(model)
    if not statistics:
        return
    total = torch.tensor([float(samples)], dtype=torch.float64, device=statistics[0].device)
    dist.all_reduce(total, group=group)
    if total.item() == 0:
        return
    flat = flatten(statistics) * (samples / total.item()) if samples else torch.zeros_like(flatten(statistics))
    dist.all_reduce(flat, group=group)
    unflatten(flat, statistics)


@torch.no_grad()
def estimate_running_statistics(model: nn.Module, batches: Iterable[Tensor]) -> int:
    """Makes them the means over these images, each counted alike, and gives their number; leaves the counts of updates
    as they are. batches: of the size that BatchNorm sees in training, none of them empty.
    """
    with estimating(model) as seen:
        for images in batches:
            seen(images)
    return seen.samples


class Seen:
    """Calls a network whose statistics are being estimated. samples: so far."""

    def __init__(self, model: nn.Module, norms: Sequence[Any]) -> None:
        self.model, self.norms, self.samples = model, norms, 0

    def __call__(self, inputs: Tensor) -> Tensor:
        self.samples += len(inputs)
        for norm in self.norms:
            norm.momentum = len(inputs) / self.samples
        output: Tensor = self.model(inputs)
        return output


@contextlib.contextmanager
def estimating(model: nn.Module) -> Iterator[Seen]:
    """The same for whoever passes the batches on by himself. Statistics of modules in eval mode stay as they are."""
    norms = [norm for norm in batch_norms(model) if norm.training]
    kept = [
        (norm, norm.momentum, tracked, tracked.clone())
        for norm in norms
        if (tracked := getattr(norm, "num_batches_tracked", None)) is not None  # which other stages' have not
    ]
    for norm, *_ in kept:
        norm.reset_running_stats()
    yield Seen(model, [norm for norm, *_ in kept])
    for norm, momentum, tracked, updates in kept:
        norm.momentum = momentum
        tracked.copy_(updates)
