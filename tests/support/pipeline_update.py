"""An update of a pipeline outside a run: `loss_sum, exchange = updated(pipeline, images, labels, batch)`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from trainer.pipeline import Criterion, Pipeline
from trainer.strategies import Exchange


def summed(outputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(outputs, labels, reduction="sum")


def updated(
    pipeline: Pipeline, images: Tensor, labels: Tensor, batch: int, number: int = 0, following: Any = None
) -> tuple[Tensor, Exchange]:
    """With the cross entropy as loss. The arguments are those of `Pipeline.update`."""
    making = pipeline.update(images, labels, batch, number, following)
    try:
        inputs, targets = next(making)
        while True:
            inputs, targets = making.send(pipeline.model(inputs, Criterion(summed, targets)))
    except StopIteration as end:
        return end.value
