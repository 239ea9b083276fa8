"""One update of the weights, with the body of the training loop in between.

    update = Differentiated(run, batch, progress, begin)        of a pipeline: Piped(...)
    for part in update.parts():         the micro-batches whose losses this rank computes
        update.take(loss_sum)           backward, and after the last one the exchange between ranks
        update.optimise()               moves the weights, where their gradients are ready
    update.step                         what it took

On a rank that computes no loss (a stage of a pipeline but its last one; a rank without samples) there are fewer
micro-batches, or none: what the others need of it is done in `parts`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer.compute.gradients import drop_gradients
from trainer.data.batch import moved
from trainer.shared.errors import TrainError
from trainer.strategies import Exchange
from trainer.training.loss_sum import Weight, checked, scale
from trainer.training.progress import Progress
from trainer.training.step_log import Step

if TYPE_CHECKING:
    from trainer.training.run import Run


class Update(ABC):
    """begin: the mark at which it began."""

    def __init__(self, run: Run, batch: Any, progress: Progress, begin: Any) -> None:
        timer, stream = run.timer, run.stream
        self.run, self.at, self._begin = run, progress, begin
        self.shares = stream.shares_at(progress.step, run.order.epoch)
        self.batch = moved(batch, run.device)
        self.is_ready = False
        """Whether gradients are what the optimiser shall use."""
        self._is_due = False
        """Whether the loss of the micro-batch that the loop's body has is still to come."""
        self._is_counted = True
        """Whether the samples that the body has are this rank's own."""
        self._is_whole = True
        """Not in the midst of a backward pass or of moving the weights, nor after one that failed."""
        self.number = progress.epoch * run.stream.steps + progress.step
        """In the whole run, from 0 on."""
        self.step: Step | None = None
        """When all is over."""
        self._loaded = timer.mark()

        run.brake.pause("start")
        drop_gradients(run.optimizer)
        run.rates.before_update(stream, progress)

    @abstractmethod
    def parts(self) -> Iterator[Any]:
        """Raises TrainError where the body has not done its part."""

    def take(self, loss_sum: Tensor, weight: Weight | None) -> None:
        """Of the micro-batch that came last. Raises TrainError for a second one, and for what is no sum."""
        if not self._is_due:
            raise TrainError("step was called twice for one batch: add the losses up, and call it with their sum")
        loss_sum = checked(loss_sum)
        self.run.weights.take(weight, is_counted=self._is_counted)
        self._is_due = self._is_whole = False
        self._backward(loss_sum)
        self._is_whole = True

    @abstractmethod
    def _backward(self, loss_sum: Tensor) -> None: ...

    def optimise(self) -> None:
        if self.is_ready:
            self.is_ready = self._is_whole = False
            self.run.precision.step(self.run.optimizer)
            self._end()
            self._is_whole = True

    def _handed(self, part: Any) -> Iterator[Any]:
        """To the loop's body. Raises TrainError where it has not done its part with it."""
        self._is_due = True
        yield part
        if self._is_due:
            raise TrainError("a batch's loss is missing: the loop's body calls step(loss_sum) for each batch")
        if not self._is_whole:
            raise TrainError("an update is not whole: the loop's body caught an error of step(loss_sum) and went on")
        if self.is_ready:
            raise TrainError("an update is missing: after backward(loss_sum) the loop's body calls update()")

    def _make_ready(self, loss_sum: Tensor | float, exchange: Exchange) -> None:
        """loss_sum: of this rank's samples, as `kept` gives it. exchange: what left the whole batch's gradient."""
        run = self.run
        run.precision.unscale(run.optimizer)
        factor = run.weights.factor(sum(self.shares))
        if factor is not None:
            scale((weight.grad for weight in run.model.parameters()), factor)
            loss_sum = loss_sum * (factor.item() if isinstance(loss_sum, float) else factor.to(loss_sum.device))
            if exchange.said:
                exchange = exchange._replace(said=(exchange.said[0] * factor, exchange.said[1]))
        self._loss_sum, self._exchange = loss_sum, exchange
        if run.clipping:
            run.clipping()
        self._summed = run.timer.mark()
        self.is_ready = True

    def _end(self) -> None:
        """When the weights have been moved."""
        run, timer, at, number = self.run, self.run.timer, self.at, self.number
        counts = run.strategy.counts
        if run.ema:
            run.ema.update(number + 1)
        updated = timer.mark()
        run.strategy.after_update()
        self.step = Step(
            number=number,
            epoch=at.epoch,
            batch=sum(self.shares),
            samples=self.shares[run.order.rank] * counts,
            loss=on_its_way(self._loss_sum if counts else self._loss_sum * 0) if run.learns else None,
            exchange=self._exchange,
            begin=self._begin,
            loaded=self._loaded,
            summed=self._summed,
            updated=updated,
            end=timer.mark(),
        )


def kept(loss_sum: Tensor) -> Tensor | float:
    """What is needed of it once it has been differentiated: its number, or on a GPU where that will be."""
    return loss_sum.item() if loss_sum.device.type == "cpu" else loss_sum.detach()


def on_its_way(loss_sum: Tensor | float) -> Tensor | float:
    """To the host: a copy, which the loop's body may not change any more."""
    return loss_sum if isinstance(loss_sum, float) else loss_sum.to("cpu", non_blocking=True, copy=True)
