"""An update of one rank of a pipeline: `Piped(run, batch, progress, begin)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from trainer.pipeline.strategy import Pipeline
from trainer.training.update import Update, kept

if TYPE_CHECKING:
    from trainer.training.run import Run


class Piped(Update):
    """Forward and backward of a pipeline's micro-batches; of its last stage the loop computes their losses."""

    _next: Any = None
    """The micro-batch whose loss is needed."""

    def parts(self) -> Iterator[Any]:
        strategy, step = cast(Pipeline, self.run.strategy), self.at.step
        announce(self.run, strategy, step)
        inputs, labels = self.batch
        self._tasks: Any = strategy.update(inputs, labels, self.run.stream.batch_at(step))
        self._backward(None)
        self.optimise()  # on a stage that computes no loss
        while self._next is not None:
            yield from self._handed(self._next)

    def _backward(self, loss_sum: Tensor | None) -> None:
        """To the next micro-batch whose loss is needed, or the end."""
        try:
            self._next = self._tasks.send(loss_sum)
        except StopIteration as end:
            self._next = None
            loss_sum, exchange = end.value
            self._make_ready(kept(loss_sum), exchange)


def announce(run: Run, strategy: Pipeline, step: int) -> None:
    """This update and the next one of the epoch: their first micro-batches come while this one is not over."""
    ends = min(run.stream.steps, run.last_step - run.order.epoch * run.stream.steps)
    for number in range(step + len(strategy.ahead), min(step + 2, ends)):
        strategy.announce(entering(run, strategy, number))


def entering(run: Run, strategy: Pipeline, step: int) -> Mapping[int, Sequence[int]]:
    """The micro-batches of each rank that reads samples for this rank's pipeline."""
    return strategy.layout.entering(strategy.pipeline, run.micro_batches, run.stream.shares_at(step, run.order.epoch))
