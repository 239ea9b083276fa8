"""How many samples a rank's memory holds at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from trainer.compute.microbatches import MicroBatches
from trainer.data.sample_stream import RankBatches
from trainer.paced.memory import most_samples
from trainer.paced.standin import StandIn
from trainer.ranks.rank_info import RankInfo


def room_of(
    model: nn.Module, info: RankInfo, micro_batches: MicroBatches, order: RankBatches, device: torch.device
) -> Callable[[], int | None]:
    """The most samples that this rank's memory holds at once: of a GPU, by what the largest micro-batch so far took."""
    if isinstance(model, StandIn) and info.pace:
        room = most_samples(model.anatomy, info.pace)
        return lambda: room
    if device.type != "cuda":
        return lambda: None

    largest = 0

    def estimate() -> int | None:
        """Between two updates, when all that is held is what stays: weights, gradients, momentum, images, ..."""
        nonlocal largest
        largest = max(largest, *micro_batches.sizes(order.stream.shares, order.rank))
        state_bytes = torch.cuda.memory_allocated(device)
        taken = torch.cuda.max_memory_allocated(device) - state_bytes
        free = 0.9 * torch.cuda.get_device_properties(device).total_memory - state_bytes
        return int(largest * free / taken) if largest and taken > 0 else None

    return estimate
