"""An update of a rank that has the whole network, or its part of each layer: `Differentiated(run, batch, progress,
begin)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from trainer.compute.gradients import drop_gradients, leaves_of
from trainer.data.batch import moved, pieces
from trainer.shared.errors import TrainError
from trainer.strategies import Exchange, Strategy
from trainer.strategies.batch_norm import refuse_other_ways
from trainer.strategies.without_samples import without_effect
from trainer.training.progress import Progress
from trainer.training.random_state import random_state, set_random_state
from trainer.training.update import Update, kept

if TYPE_CHECKING:
    from trainer.training.run import Run


class Differentiated(Update):
    """Forward and backward, micro-batch by micro-batch, and the exchange of the last one. With `local_batch` each but
    the last is an update, too.
    """

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
        if self.run.graphs:
            self.run.graphs.enabled = not others or self.alone  # what several passes add up, a replay would write over
        for part in others:
            with self.strategy.without_sync():
                yield from self._given(part)
        yield from self._given(last)

    def _given(self, part: Any) -> Iterator[Any]:
        """To the loop's body. If it is empty only if ranks meet in the forward pass, and then with samples that count
        for nothing.
        """
        if self.sizes[len(self.losses)]:
            yield from self._handed(part)
        elif self.strategy.meets_in_forward:
            random, self._is_counted = random_state(), False
            with without_effect(self.run.model):
                yield from self._handed(moved(self.run.some_samples(), self.run.device))
            set_random_state(random)
            self._is_counted = True
        else:
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
        """Raises TrainError, with the rank, for a network whose parameters are not all used, or not the same on all."""
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
        """Was the loss that came last that of the last micro-batch?"""
        return len(self.losses) == len(self.sizes)

    def _hold_up(self, _: Tensor) -> None:
        """As a hook of backward it may give nothing back."""
        self.run.brake.pause("backward")
