"""One update of the weights: gives the loop's body its micro-batches, then runs backward, exchange, optimiser.

for part in update.parts():         micro-batches whose losses this rank computes
    update.take(loss_sum)           backward, and after the last one the exchange
    update.optimise()               moves the weights if gradients are ready
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from trainer.compute.buffers import drop_gradients, leaves_of
from trainer.data.augment import moved, pieces
from trainer.pipeline.pipeline_strategy import Pipeline
from trainer.shared.errors import TrainError
from trainer.strategies import Exchange, Strategy
from trainer.strategies.base import without_effect
from trainer.strategies.sync_batch_norm import refuse_other_ways
from trainer.training.loss_sum import Weight, checked, scale
from trainer.training.rates import Progress, random_state, set_random_state
from trainer.training.step_log import Step

if TYPE_CHECKING:
    from trainer.training.run import Run


class Update(ABC):
    """begin: a mark."""

    def __init__(self, run: Run, batch: Any, progress: Progress, begin: Any) -> None:
        timer, stream = run.timer, run.stream
        self.run, self.at, self._begin = run, progress, begin
        self.shares = stream.shares_at(progress.step, run.order.epoch)
        self.batch = moved(batch, run.device)
        self.is_ready = False
        """Gradients are final."""
        self._is_due = False
        """The current micro-batch's loss is missing."""
        self._is_counted = True
        """The body's samples are this rank's own."""
        self._is_whole = True
        """False during backward or a change of weights, and after one failed."""
        self.number = progress.epoch * run.stream.steps + progress.step
        """In the whole run, from 0."""
        self.step: Step | None = None
        """Set at the end."""
        self._loaded = timer.mark()

        run.delay.pause("start")
        drop_gradients(run.optimizer)
        for weight in run.not_optimised:
            weight.grad = None  # or ranks would add up again what they have added up, and clipping counts it
        run.rates.before_update(stream, progress)

    @abstractmethod
    def parts(self) -> Iterator[Any]:
        """Raises TrainError if the body is faulty."""

    def take(self, loss_sum: Tensor, weight: Weight | None) -> None:
        """Raises TrainError for a second loss, or no sum."""
        if not self._is_due:
            raise TrainError("step was called twice for one batch: add the losses, and call it once with their sum")
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
        """Raises TrainError if the body is faulty."""
        self._is_due = True
        yield part
        if self._is_due:
            raise TrainError("a batch's loss is missing: call step(loss_sum) for each batch in the loop's body")
        if not self._is_whole:
            raise TrainError("an update is incomplete: the loop's body caught an error of step(loss_sum) and continued")
        if self.is_ready:
            raise TrainError("an update is missing: call update() after backward(loss_sum) in the loop's body")

    def _make_ready(self, loss_sum: Tensor | float, exchange: Exchange) -> None:
        """loss_sum: from `kept`."""
        run = self.run
        run.precision.unscale(run.optimizer)
        factor = run.weights.factor(sum(self.shares))
        if factor is not None:
            scale((weight.grad for weight in run.model.parameters()), factor)
            if isinstance(loss_sum, Tensor):
                loss_sum = loss_sum * factor.to(loss_sum.device)
            elif loss_sum:  # not on a pipeline's earlier stages: it would wait for the GPU
                loss_sum *= factor.item()
            if exchange.said:
                exchange = exchange._replace(said=(exchange.said[0] * factor, exchange.said[1]))
        self._loss_sum, self._exchange = loss_sum, exchange
        if run.clipping:
            run.clipping()
        self._summed = run.timer.mark()
        self.is_ready = True

    def _end(self) -> None:
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
    """A number, or on a GPU a detached tensor."""
    return loss_sum.item() if loss_sum.device.type == "cpu" else loss_sum.detach()


def on_its_way(loss_sum: Tensor | float) -> Tensor | float:
    """In transfer to the host, safe from the loop's body."""
    return loss_sum if isinstance(loss_sum, float) else loss_sum.to("cpu", non_blocking=True, copy=True)


class FullUpdate(Update):
    """The whole network, or slices of it. With `local_batch` each micro-batch is an update."""

    def __init__(self, run: Run, batch: Any, progress: Progress, begin: Any) -> None:
        super().__init__(run, batch, progress, begin)
        self.strategy = cast(Strategy, run.strategy)
        self.sizes = run.micro_batches.sizes(self.shares, run.order.rank)
        self.alone = run.settings.local_batch > 0 and self.strategy.updates_alone
        self.losses: list[Tensor | float] = []
        averages = run.settings.fidelity == "local" and self.strategy.updates_alone
        self.unused = None if averages else run.unused

    def parts(self) -> Iterator[Any]:
        *others, last = pieces(self.batch, self.sizes)
        graphs = self.run.graphs
        if graphs:
            graphs.begin(adds=bool(others) and not self.alone)
        for part in others:
            with self.strategy.without_sync():
                yield from self._given(part)
        if graphs:
            graphs.is_last = True
        yield from self._given(last)

    def _given(self, part: Any) -> Iterator[Any]:
        """Without samples, runs the body only if ranks exchange in forward."""
        if self.sizes[len(self.losses)]:
            yield from self._handed(part)
        elif self.strategy.meets_in_forward:
            random, self._is_counted = random_state(), False
            with without_effect(self.run.model):
                yield from self._handed(moved(self.run.some_samples(), self.run.device))
            set_random_state(random)
            self._is_counted = True
        else:
            if self.run.graphs:
                self.run.graphs.hand_over()
            self._backward(self.strategy.no_loss())
            self.optimise()

    def _backward(self, loss_sum: Tensor) -> None:
        size = self.sizes[len(self.losses)]
        if self.run.settings.slow and not self.losses:
            loss_sum.register_hook(self._hold_up)
        self.losses.append(kept(loss_sum) if size else 0.0)
        samples, batch = sum(self.sizes), sum(self.shares)
        scaled = self.run.precision.scaled(loss_sum)
        if self._is_last:
            if self.unused:
                scaled = self.unused.covered(scaled, is_counted=size > 0)
            exchange = self._exchanged(scaled, size if self.alone else samples, batch)
            if self.unused:
                self.unused.forget()
            self._make_ready(sum(self.losses[1:], self.losses[0]), exchange)
        elif self.alone:
            self.strategy.backward_alone(scaled, size)
            if self.run.clipping:
                self.run.precision.unscale(self.run.optimizer)
                self.run.clipping()
            self.is_ready = True
        else:
            if self.unused and size:
                self.unused.note(leaves_of(scaled))
            self.strategy.accumulate(scaled, samples, batch)

    def _exchanged(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        """Raises TrainError, naming the rank."""
        try:
            if self.run.settings.sync_bn:
                refuse_other_ways(self.run.model)
            return self.strategy.backward(loss_sum, samples, batch)
        except TrainError as error:
            info = self.run.info
            raise TrainError(f"rank {info.rank} on {info.node}, update {self.number + 1}: {error}") from error

    def _end(self) -> None:
        if self._is_last:
            super()._end()
        else:
            drop_gradients(self.run.optimizer)

    @property
    def _is_last(self) -> bool:
        """Whether the last loss belongs to the last micro-batch."""
        return len(self.losses) == len(self.sizes)

    def _hold_up(self, _: Tensor) -> None:
        self.run.delay.pause("backward")


class StageUpdate(Update):
    """A pipeline's rank. The loop computes losses on the last stage."""

    def __init__(self, run: Run, batch: Any, progress: Progress, begin: Any, following: Any) -> None:
        """following: the next update's batch, if late stages may begin it during this update."""
        super().__init__(run, batch, progress, begin)
        self._following = following
        self._next: Any = None
        """Its loss is needed next."""

    def parts(self) -> Iterator[Any]:
        strategy, step = cast(Pipeline, self.run.strategy), self.at.step
        announce(self.run, strategy, step)
        inputs, labels = self.batch
        batch = self.run.stream.batch_at(step)
        self._tasks: Any = strategy.update(inputs, labels, batch, self.number, self._following)
        self._backward(None)
        self.optimise()  # on a stage without losses
        while self._next is not None:
            yield from self._handed(self._next)

    def _backward(self, loss_sum: Tensor | None) -> None:
        """To the next micro-batch that needs a loss, or the end."""
        try:
            self._next = self._tasks.send(loss_sum)
        except StopIteration as end:
            self._next = None
            loss_sum, exchange = end.value
            self._make_ready(kept(loss_sum), exchange)


def announce(run: Run, strategy: Pipeline, step: int) -> None:
    """Also announces the next update, whose micro-batches come early."""
    ends = min(run.stream.steps, run.last_step - run.order.epoch * run.stream.steps)
    for number in range(step + len(strategy.ahead), min(step + 2, ends)):
        strategy.announce(entering(run, strategy, number))


def entering(run: Run, strategy: Pipeline, step: int) -> Mapping[int, Sequence[int]]:
    """Micro-batches of each rank that reads samples for this pipeline."""
    return strategy.layout.entering(strategy.pipeline, run.micro_batches, run.stream.shares_at(step, run.order.epoch))
