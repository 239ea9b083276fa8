"""Batches without content, for ranks that compute nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.data.sample_stream import RankBatches


class BlankBatches:
    """As many images as the rank's share and nothing in them: a paced rank has no use for data."""

    def __init__(self, order: RankBatches, shape: tuple[int, int, int]) -> None:
        self.order, self.shape = order, shape

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        blank = torch.zeros(1)
        stream = self.order.stream
        for step in range(self.order.first_step, stream.steps):
            samples = stream.shares_at(step, self.order.epoch)[self.order.rank]
            yield blank.expand(samples, *self.shape), torch.zeros(samples, dtype=torch.long)
