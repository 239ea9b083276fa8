"""BatchNorm over all ranks' samples with torch's own kernels: a third of the launches on GPUs.

torch.nn.SyncBatchNorm waits for the GPU in every layer to learn which ranks had no samples; here they send NOTHING.
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
"""A rank's count without samples: negligible, but the kernel may divide by it."""


def normalise(norm: Any, images: Tensor) -> Tensor:
    """norm: a SynchronisedBatchNorm, whose running statistics move. images: maybe none."""
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
    """Mean and 1 / sqrt(variance + eps) per channel, and the number of values."""
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
    """A row per rank."""
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
    """The weight of this update in the running statistics."""
    if not norm.track_running_stats:
        return 0.0
    norm.num_batches_tracked += 1
    return 1 / float(norm.num_batches_tracked) if norm.momentum is None else float(norm.momentum)


class _Normalise(torch.autograd.Function):
    """Gradients of weight and bias are this rank's sums."""

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


# Running statistics of averaged weights. No rank has trained an average of diverged weights, or the result of an outer
# step, so the activations have other means and variances; a few forward passes find them (Izmailov et al. 2018, section
# 3.2).

REMEMBERED = 0.9
"""torch's default weight of old statistics."""
BATCHES = 50
"""Updates whose samples are used."""


def average_running_statistics(model: nn.Module, group: dist.ProcessGroup, samples: float) -> None:
    """Sets the statistics of all ranks to their mean by samples. If all have 0 samples, nothing changes."""
    # The variance leaves out the spread between the ranks' means: it is small with shuffled samples.
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
    """Replaces the statistics by their mean over these images; returns their number. batches: not empty."""
    with estimating(model) as estimator:
        for images in batches:
            estimator(images)
    return estimator.samples


class Estimator:
    """Calls a network whose statistics are being estimated; counts samples."""

    def __init__(self, model: nn.Module, norms: Sequence[Any]) -> None:
        self.model, self.norms, self.samples = model, norms, 0

    def __call__(self, inputs: Tensor) -> Tensor:
        self.samples += len(inputs)
        for norm in self.norms:
            norm.momentum = len(inputs) / self.samples
        output: Tensor = self.model(inputs)
        return output


@contextlib.contextmanager
def estimating(model: nn.Module) -> Iterator[Estimator]:
    """For callers with another loop. Modules in eval mode keep their statistics."""
    norms = [norm for norm in batch_norms(model) if norm.training]
    kept = [
        (norm, norm.momentum, tracked, tracked.clone())
        for norm in norms
        if (tracked := getattr(norm, "num_batches_tracked", None)) is not None  # absent in modules of other stages
    ]
    for norm, *_ in kept:
        norm.reset_running_stats()
    yield Estimator(model, [norm for norm, *_ in kept])
    for norm, momentum, tracked, updates in kept:
        norm.momentum = momentum
        tracked.copy_(updates)
