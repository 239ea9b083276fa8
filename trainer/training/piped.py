"""An update of a pipeline: `loss_sum, exchange = yield from piped(run, run.strategy, batch, step)`."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer.pipeline.strategy import Pipeline
from trainer.strategies import Exchange

if TYPE_CHECKING:
    from trainer.training.run import Run


def piped(run: Run, strategy: Pipeline, batch: Any, step: int) -> Generator[Any, Any, tuple[Tensor, Exchange]]:
    """Forward and backward of a pipeline's micro-batches; of its last stage the loop computes their losses.

    step: within its epoch.
    """
    announce(run, strategy, step)
    inputs, labels = batch
    return (yield from strategy.update(inputs, labels, run.stream.batch_at(step)))


def announce(run: Run, strategy: Pipeline, step: int) -> None:
    """This update and the next one of the epoch: their first micro-batches come while this one is not over."""
    ends = min(run.stream.steps, run.last_step - run.order.epoch * run.stream.steps)
    for number in range(step + len(strategy.ahead), min(step + 2, ends)):
        strategy.announce(entering(run, strategy, number))


def entering(run: Run, strategy: Pipeline, step: int) -> Mapping[int, Sequence[int]]:
    """The micro-batches of each rank that reads samples for this rank's pipeline."""
    return strategy.layout.entering(strategy.pipeline, run.micro_batches, run.stream.shares_at(step, run.order.epoch))
