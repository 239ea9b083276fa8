"""The wiring around torch's fused kernels for BatchNorm over all ranks, which exist for GPUs alone: here the formulas
of ATen's cuda/Normalization.cuh take their place; tests/gpu holds the kernels themselves against torch's BatchNorm.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from tests.support.gloo_ranks import Gang, group_of
from trainer.compute import batch_norm_kernels
from trainer.strategies import SynchronisedBatchNorm

SHARES = (0, 3, 0, 5)
CHANNELS, EPS = 2, 1e-5
ALL_BUT_CHANNELS = [0, 2, 3]


def stats(images, eps):
    variance, mean = torch.var_mean(images, ALL_BUT_CHANNELS, correction=0)
    return mean, torch.rsqrt(variance + eps)


def gather_stats(_, means, inverse_stds, running_mean, running_var, momentum, eps, counts):
    """Rank by rank, as the kernel merges them."""
    total, mean, squares = torch.zeros(()), torch.zeros(CHANNELS), torch.zeros(CHANNELS)
    for count, own, inverse_std in zip(counts, means, inverse_stds, strict=True):
        part = 1 / (total + count)
        squares = squares + (inverse_std**-2 - eps) * count + (own - mean) ** 2 * total * count * part
        mean, total = total * part * mean + count * part * own, total + count
    running_mean.lerp_(mean, momentum)
    running_var.lerp_(squares / (total - 1), momentum)
    return mean, torch.rsqrt(squares / total + eps)


def wide(values):
    return values.view(1, -1, 1, 1)


def elemt(images, weight, bias, mean, inverse_std, _):
    return (images - wide(mean)) * wide(inverse_std * weight) + wide(bias)


def backward_reduce(gradient, images, mean, inverse_std, *_):
    sums, products = gradient.sum(ALL_BUT_CHANNELS), (gradient * (images - wide(mean))).sum(ALL_BUT_CHANNELS)
    return sums, products, products * inverse_std, sums


def backward_elemt(gradient, images, mean, inverse_std, weight, sums, products, counts):
    count = counts.sum()
    product = (images - wide(mean)) * wide(inverse_std**2 * products / count)
    return (gradient - wide(sums / count) - product) * wide(inverse_std * weight)


KERNELS = {
    "batch_norm_stats": stats,
    "batch_norm_gather_stats_with_counts": gather_stats,
    "batch_norm_elemt": elemt,
    "batch_norm_backward_reduce": backward_reduce,
    "batch_norm_backward_elemt": backward_elemt,
}


def data():
    generator = torch.Generator().manual_seed(3)
    return 4 + torch.randn(sum(SHARES), CHANNELS, 3, 3, generator=generator)


def computed(norm, forward, images, images_of_loss):
    """What a step makes of the layer: output, gradients, statistics."""
    nn.init.constant_(norm.weight, 1.5)
    own = images.clone().requires_grad_()
    output = forward(own)
    (output.square() * images_of_loss).sum().backward()
    return [output, own.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var]


def fused(rank, _):
    for name, kernel in KERNELS.items():
        setattr(torch, name, kernel)
    norm = nn.BatchNorm2d(CHANNELS, eps=EPS)
    norm.__class__, norm.group = SynchronisedBatchNorm, group_of(len(SHARES))
    begin = sum(SHARES[:rank])
    own = data()[begin : begin + SHARES[rank]]
    found = computed(norm, lambda images: batch_norm_kernels.normalise(norm, images), own, own)
    return [tensor.detach() for tensor in found], int(norm.num_batches_tracked)


@pytest.fixture
def of_ranks(tmp_path):
    gang = Gang(tmp_path)
    yield gang.run(fused, None)
    gang.end()


def test_ranks_with_few_or_no_samples_compute_what_one_process_does_with_all(of_ranks):
    whole, images = nn.BatchNorm2d(CHANNELS, eps=EPS), data()
    output, gradient, weight, bias, mean, variance = computed(whole, whole, images, images)
    found, updates = zip(*of_ranks, strict=True)
    expected = (output, gradient, weight, bias)
    joined = [torch.cat([own[part] for own in found]) for part in (0, 1)]
    summed = [sum(own[part] for own in found) for part in (2, 3)]
    for one, other in zip(expected, [*joined, *summed], strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)
    for own in found:
        assert torch.allclose(own[4], mean, rtol=1e-5)
        assert torch.allclose(own[5], variance, rtol=1e-4)
    assert updates == (1,) * len(SHARES)
