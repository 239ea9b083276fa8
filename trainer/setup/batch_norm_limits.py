"""What BatchNorm asks of how a batch is split: no group of a single sample."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from trainer.compute.microbatches import MicroBatches
from trainer.compute.models import moves_statistics, needs_pairs_of_samples
from trainer.data.sample_stream import SampleStream
from trainer.setup.material import Material
from trainer.shared.errors import TrainError
from trainer.shared.settings import Settings
from trainer.training.progress import random_state, set_random_state


def check_batch_norm(model: nn.Module, stream: SampleStream, whole_batch: bool = False, may_sync: bool = True) -> None:
    """A single sample has no variance: torch's BatchNorm refuses it where the picture has shrunk to one point.

    whole_batch: does it see the samples of all ranks (sync_bn)? may_sync: could it?
    """
    or_sync = ", or sync_bn=true" if may_sync and not whole_batch else ""
    for step in {0, stream.steps - 1}:
        split = stream.shares_at(step) if stream.batch_at(step) < stream.batch else stream.shares
        groups = (stream.batch_at(step),) if whole_batch else split
        if needs_pairs_of_samples(model) and 1 in groups:
            raise TrainError(
                f"batch: of {stream.batch_at(step)} samples one rank gets a single one, and BatchNorm needs two; "
                f"choose another batch than {stream.batch}{or_sync}"
            )


def batch_norm_groups(
    model: nn.Module, settings: Settings, shares: Sequence[int], own: Sequence[int]
) -> list[tuple[int, int]] | None:
    """(samples, how many groups of so many) that this rank's BatchNorm sees in an update with a full batch; None
    without one in training mode, and for `dp`, which cuts the batch by itself.
    """
    if not needs_pairs_of_samples(model) or settings.strategy == "dp":
        return None
    sizes = [sum(shares)] if settings.sync_bn else own
    return sorted(Counter(size for size in sizes if size).items(), reverse=True)


def check_pairs(model: nn.Module, micro_batches: MicroBatches, shares: Sequence[int]) -> None:
    """The same for what a rank takes at once."""
    sizes = {size for rank in range(len(shares)) for size in micro_batches.sizes(shares, rank)}
    if needs_pairs_of_samples(model) and 1 in sizes:
        raise TrainError("a micro-batch has a single sample, and BatchNorm needs two: local_batch=2, or more memory")


def check_estimated(settings: Settings, material: Material, model: nn.Module) -> None:
    """Raises TrainError for a script's batches from which statistics cannot be estimated again, as other weights than
    those of training ask for: the network is called with a batch's first tensor then.
    """
    name = "ema" if settings.ema else "fidelity=local" if settings.fidelity == "local" else ""
    if not settings.is_own or not name or not moves_statistics(model):
        return
    random = random_state()
    try:
        example = torch.zeros_like(material.example(), device="cpu")
        with torch.no_grad():
            copy.deepcopy(model)(example)
    except Exception as error:  # whatever the network itself raises
        raise TrainError(
            f"{name}: BatchNorm's statistics are estimated again by calling the network with the first tensor of each "
            f"batch, and {type(model).__name__} fails with it: have `collate` give inputs and labels, or leave out "
            f"{name}"
        ) from error
    finally:
        set_random_state(random)


def check_whole_batch(settings: Settings, micro_batches: MicroBatches, shares: Sequence[int]) -> None:
    if settings.sync_bn and micro_batches.largest(shares) > 1:
        raise TrainError("sync_bn sees the whole batch at once, in micro-batches it cannot: leave out one of the two")
