"""BatchNorm over the whole batch of all ranks by torch's own kernels for it: on GPUs, in a third of the launches.

    normalised = normalise(norm, images)            norm: a SynchronisedBatchNorm; moves its running statistics

The kernels are those of torch.nn.SyncBatchNorm. Its own way around them waits for the GPU in every layer, to see which
ranks had no samples; here such a rank sends NOTHING as its count, which needs no look.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.compute.buffers import flatten, unflatten
from trainer.compute.models import batch_norms, running_statistics

NOTHING = 1e-20
"""The count of a rank without samples: the kernel divides by the first ranks' sum of counts, which may not be 0, and
this vanishes beside any other."""


def normalise(norm: Any, images: Tensor) -> Tensor:
    """images: contiguous or channels_last, of one rank, maybe none."""
    images = _dense(images)
    counted = images.detach() if norm.counts else images.detach()[:0]
    of_ranks = _gathered(_own_statistics(counted, norm.eps), norm.group)
    channels = images.shape[1]
    means, inverse_stds, counts = of_ranks.split([channels, channels, 1], dim=1)
    with torch.no_grad():
        mean, inverse_std = torch.batch_norm_gather_stats_with_counts(
            images, means, inverse_stds, *_running(norm), _part(norm), norm.eps, counts.reshape(-1)
        )
    counts = counts.to(torch.int32)
    normalised: Tensor = _Normalise.apply(
        images, norm.weight, norm.bias, mean, inverse_std, counts, norm.eps, norm.group, norm.counts
    )
    return normalised


def _own_statistics(images: Tensor, eps: float) -> Tensor:
    """The mean and 1 / sqrt(variance + eps) of each channel, and the number of values that they come from."""
    channels = images.shape[1]
    values = images.numel() // channels
    if not values:
        nothing = torch.zeros(2 * channels + 1, device=images.device)
        nothing[channels:] = 1.0
        nothing[-1] = NOTHING
        return nothing
    mean, inverse_std = torch.batch_norm_stats(images, eps)
    return torch.cat([mean, inverse_std, mean.new_full((1,), values)])


def _gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A row of each rank."""
    if dist.get_backend(group) == "nccl":
        found = own.new_empty(group.size(), len(own))
        dist.all_gather_into_tensor(found, own, group=group)
        return found
    rows = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(rows, own, group=group)
    return torch.stack(rows)


def _running(norm: Any) -> tuple[Tensor | None, Tensor | None]:
    return (norm.running_mean, norm.running_var) if norm.track_running_stats else (None, None)


def _part(norm: Any) -> float:
    """How far the running statistics move at an update."""
    if not norm.track_running_stats:
        return 0.0
    norm.num_batches_tracked += 1
    return 1 / float(norm.num_batches_tracked) if norm.momentum is None else float(norm.momentum)


class _Normalise(torch.autograd.Function):
    """The gradients of weight and bias are this rank's own sums: the strategy adds them up with all others."""

    @staticmethod
    def forward(
        context: Any,
        images: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        inverse_std: Tensor,
        counts: Tensor,
        eps: float,
        group: dist.ProcessGroup,
        is_counted: bool,
    ) -> Tensor:
        context.group, context.has_samples = group, is_counted and len(images) > 0
        context.save_for_backward(images, weight, mean, inverse_std, counts)
        if not len(images):
            return torch.empty_like(images)
        return torch.batch_norm_elemt(images, weight, bias, mean, inverse_std, eps)

    @staticmethod
    def backward(context: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, weight, mean, inverse_std, counts = context.saved_tensors
        if not context.has_samples:
            dist.all_reduce(mean.new_zeros(2 * len(mean)), group=context.group)
            zero = None if weight is None else torch.zeros_like(weight)
            return torch.zeros_like(images), zero, zero, *[None] * 6
        gradient, learns = _dense(output_gradient), weight is not None
        sums, products, of_weight, of_bias = torch.batch_norm_backward_reduce(
            gradient, images, mean, inverse_std, weight, True, learns, learns
        )
        total = torch.cat([sums, products])
        dist.all_reduce(total, group=context.group)
        sums, products = total.chunk(2)
        inner = torch.batch_norm_backward_elemt(gradient, images, mean, inverse_std, weight, sums, products, counts)
        return inner, (of_weight if learns else None), (of_bias if learns else None), *[None] * 6


def _dense(images: Tensor) -> Tensor:
    is_channels_last = images.dim() == 4 and images.is_contiguous(memory_format=torch.channels_last)
    return images if is_channels_last else images.contiguous()


# BatchNorm's running statistics of a network that all ranks share: averaged over them, or estimated again.
#
#     average_running_statistics(network, group, samples)     where each rank's have followed the shared weights
#
#     >>> network = nn.BatchNorm1d(2)
#     >>> estimate_running_statistics(network, [torch.ones(4, 2), torch.zeros(4, 2)])     # they have followed others
#     8
#     >>> network.running_mean                                                            # then average these
#     tensor([0.5000, 0.5000])
#
# An average of weights that have gone apart, or an outer step, is a network that no rank has trained: its activations
# have means and variances of their own, which some forward passes find (Izmailov et al. 2018, section 3.2).

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
