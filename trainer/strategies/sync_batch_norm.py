"""BatchNorm over the whole batch of all ranks, for any shares, on CPUs and GPUs.

    synchronise_batch_norm(model, group)        in place; the state_dict keeps its form

A rank without samples passes an empty batch, or samples that do not count.
"""

from __future__ import annotations

import copy
import zlib
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from trainer.compute import batch_norm_kernels as fused_batch_norm
from trainer.ranks.agreement import differing
from trainer.shared.errors import TrainError


class SynchronisedBatchNorm(nn.modules.batchnorm._BatchNorm):
    group: dist.ProcessGroup
    counts = True
    """Whether the samples count in the statistics."""
    name: str
    passed: list[str]
    """BatchNorms of this pass so far; one list per network."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SynchronisedBatchNorm:
        # A copy keeps the group: a script may average by copying its network.
        memo[id(self.group)] = self.group
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def _check_input_dim(self, _: Tensor) -> None:
        pass

    def forward(self, images: Tensor) -> Tensor:
        if not self.training:
            return super().forward(images)
        self.passed.append(self.name)
        if images.is_cuda:
            return fused_batch_norm.normalise(self, images)
        counted = images.detach() if self.counts else images.detach()[:0]
        count, mean, variance = whole_batch_statistics(counted, self.group)
        self._keep(count, mean, variance)
        normalised: Tensor = _Normalise.apply(
            images, self.weight, self.bias, mean, variance, count, self.eps, self.group, self.counts
        )
        return normalised

    @torch.no_grad()
    def _keep(self, count: Tensor, mean: Tensor, variance: Tensor) -> None:
        """Moves the running statistics like torch, with the unbiased variance."""
        if self.num_batches_tracked is None or self.running_mean is None or self.running_var is None:
            return  # track_running_stats=False
        self.num_batches_tracked += 1
        part = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, batch in ((self.running_mean, mean), (self.running_var, variance * count / (count - 1))):
            running += part * (batch.to(running.dtype) - running)


def synchronise_batch_norm(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Does nothing in a group of one rank."""
    if group.size() == 1:
        return
    passed: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            synchronised = cast(SynchronisedBatchNorm, module)
            synchronised.__class__ = SynchronisedBatchNorm  # keeps parameters, buffers and hooks
            synchronised.group, synchronised.name, synchronised.passed = group, name, passed


def refuse_other_ways(model: nn.Module) -> None:
    """A collective call after forward. Raises TrainError if ranks used different BatchNorms, equally many on each."""
    # With different numbers, some ranks would wait until the timeout.
    synchronised = [module for module in model.modules() if isinstance(module, SynchronisedBatchNorm)]
    if not synchronised:
        return
    passed = synchronised[0].passed
    left_out = [module.name for module in synchronised if module.name not in passed]
    others = differing(zlib.crc32("\n".join(passed).encode()), ", ".join(left_out) or "none", synchronised[0].group)
    passed.clear()
    if others:
        raise TrainError(
            f"sync_bn: ranks use different BatchNorm layers in one update (left out on a rank: {others}), but all must "
            "use the same layers: leave sync_bn out"
        )


def is_synchronised(model: nn.Module) -> bool:
    return any(isinstance(module, SynchronisedBatchNorm) for module in model.modules())


def whole_batch_statistics(images: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Values per channel (a tensor), mean and biased variance over all ranks."""
    # Merges counts, means and squared distances (Chan, Golub and LeVeque 1979): sums of squares lose precision in
    # float32 if a mean is large.
    images = _at_least_float32(images)
    channels = images.shape[1]
    own = images.new_zeros(1 + 2 * channels)
    if values := images.numel() // channels:
        variance, mean = torch.var_mean(images, _all_but_channels(images), correction=0)
        own[0], own[1 : 1 + channels], own[1 + channels :] = values, mean, variance * values
    of_ranks = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(of_ranks, own, group=group)
    counts, means, squares = torch.stack(of_ranks).split([1, channels, channels], dim=1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    return count, mean, (squares + counts * (means - mean) ** 2).sum(0) / count


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, with mean and variance as functions of x."""

    @staticmethod
    def forward(
        context: Any,
        images: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        eps: float,
        group: dist.ProcessGroup,
        counts: bool,
    ) -> Tensor:
        context.group, context.counts = group, counts
        context.save_for_backward(images, weight, mean, torch.rsqrt(variance + eps), count)
        if not len(images):
            return torch.empty_like(images)
        return batch_norm(images, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    def backward(context: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        """With y = (x - mean) / std: dx = weight / std * (dy - mean(dy) - y * mean(dy * y)), with means over all ranks.

        Gradients of weight and bias are this rank's sums.
        """
        images, weight, mean, inverse_std, count = context.saved_tensors
        gradient, channel = _at_least_float32(output_gradient), [1, -1, *[1] * (images.dim() - 2)]
        normalised = (_at_least_float32(images) - mean.view(channel)) * inverse_std.view(channel)
        dimensions = _all_but_channels(images)
        own = torch.cat([gradient.sum(dimensions), (gradient * normalised).sum(dimensions)])
        if not context.counts:
            own = torch.zeros_like(own)
        total = own.clone()
        dist.all_reduce(total, group=context.group)
        mean_gradient, mean_product = (part.view(channel) for part in (total / count).chunk(2))
        scale = inverse_std if weight is None else inverse_std * weight
        inner = (gradient - mean_gradient - normalised * mean_product) * scale.view(channel)
        bias_gradient, weight_gradient = own.chunk(2)
        if weight is None:
            return inner.to(images.dtype), *[None] * 8
        return inner.to(images.dtype), weight_gradient.to(weight.dtype), bias_gradient.to(weight.dtype), *[None] * 6


def _at_least_float32(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _all_but_channels(images: Tensor) -> list[int]:
    return [dimension for dimension in range(images.dim()) if dimension != 1]
