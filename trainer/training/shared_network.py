"""Lends the whole network to evaluations and checkpoints, then restores its buffers and random generators.

with shared_network(run, progress) as network:           on every rank
    result = judged(network, run.strategy.outputs(network, batches), classes, run.device)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from trainer.compute.batch_norm_kernels import BATCHES, average_running_statistics, estimate_running_statistics
from trainer.compute.models import has_batch_norm, moves_statistics
from trainer.training.rates import random_state, set_random_state

if TYPE_CHECKING:
    from trainer.training.rates import Progress
    from trainer.training.run import Run


@contextlib.contextmanager
def shared_network(run: Run, progress: Progress) -> Iterator[nn.Module]:
    """The common weights (with `ema` their average) with matching BatchNorm statistics. Do not change them."""
    with run.ema.in_place() if run.ema else contextlib.nullcontext(), trained_network(run, progress) as network:
        yield network


@contextlib.contextmanager
def trained_network(run: Run, progress: Progress, *, own_weights: bool = False) -> Iterator[nn.Module]:
    """own_weights: the trained weights even if `ema` is on."""
    random, network, again = random_state(), run.strategy.whole(), bool(run.ema) and not own_weights
    own = [
        (module, name, buffer, buffer.clone())
        for module in network.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        if run.strategy.parts:
            run.strategy.average_statistics(network, training_images(run), again=again)
        elif has_batch_norm(network):
            keeps = (run.strategy.keeps_statistics and not again) or not moves_statistics(network)
            samples = progress.recent if keeps else estimated_again(run, network)
            average_running_statistics(network, run.group, samples)
        yield network
    finally:
        for module, name, buffer, kept in own:
            module._buffers[name] = buffer  # some forward passes replace the tensor
            buffer.copy_(kept)
        set_random_state(random)


def estimated_again(run: Run, network: nn.Module) -> int:
    return estimate_running_statistics(network, training_images(run))


def training_images(run: Run) -> Iterator[Tensor]:
    """This rank's, of the epoch's first updates."""
    for step, (images, *_) in enumerate(run.batches_of(run.order.first(BATCHES))):
        sizes = run.micro_batches.sizes(run.stream.shares_at(step, run.order.epoch), run.order.rank)
        yield from (part for part in images.to(run.device).split(sizes) if len(part))
