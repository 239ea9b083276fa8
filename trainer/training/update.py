"""One update of the weights, with the body of the training loop in between.

    making = update(run, batch, progress, begin)
    due = next(making)               a micro-batch, of which the loop computes the sum of its samples' losses
    due = making.send(loss_sum)      the next one; None where gradients are ready and the optimiser's turn comes
    due = next(making)               after None
                                     StopIteration.value: the Step

On a rank that computes no loss (a stage of a pipeline but its last one; a rank without samples) there are fewer
micro-batches, or none: what the others need of it is done here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer.data.batch import moved, pieces
from trainer.pipeline.strategy import Pipeline
from trainer.strategies import Exchange, Strategy, no_loss
from trainer.strategies.batch_norm import is_synchronised
from trainer.training.piped import piped
from trainer.training.progress import Progress
from trainer.training.rates import middle_of_update
from trainer.training.step_log import Step

if TYPE_CHECKING:
    from trainer.training.run import Run

Due = Any
"""A micro-batch, or None."""
AT_ONCE = contextlib.nullcontext()
"""Around the last micro-batch, whose gradients are exchanged."""


def update(run: Run, batch: Any, progress: Progress, begin: Any) -> Generator[Due, Any, Step]:
    """begin: the mark at which it began."""
    timer, stream = run.timer, run.stream
    shares = stream.shares_at(progress.step, run.order.epoch)
    batch = moved(batch, run.device)
    loaded = timer.mark()

    run.brake.pause("start")
    run.optimizer.zero_grad(set_to_none=True)
    run.rates.set(middle_of_update(stream, progress))
    if isinstance(run.strategy, Pipeline):
        loss_sum, exchange = yield from piped(run, run.strategy, batch, progress.step)
    else:
        loss_sum, exchange = yield from differentiated(run, run.strategy, batch, shares)
    run.precision.unscale(run.optimizer)
    if run.clipping:
        run.clipping()
    summed = timer.mark()
    yield None

    run.precision.step(run.optimizer)
    number, counts = progress.epoch * stream.steps + progress.step, run.strategy.counts
    if run.ema:
        run.ema.update(number + 1)
    updated = timer.mark()
    run.strategy.after_update()
    return Step(
        number=number,
        epoch=progress.epoch,
        batch=sum(shares),
        samples=shares[run.order.rank] * counts,
        loss=on_its_way(loss_sum if counts else loss_sum * 0) if run.learns else None,
        exchange=exchange,
        begin=begin,
        loaded=loaded,
        summed=summed,
        updated=updated,
        end=timer.mark(),
    )


def differentiated(
    run: Run, strategy: Strategy, batch: Any, shares: Sequence[int]
) -> Generator[Due, Any, tuple[Tensor, Exchange]]:
    """Forward and backward, micro-batch by micro-batch: gives this rank's sum of losses, and the exchange of the last
    one. With `local_batch` each but the last is an update, too.

    shares: samples of this update for each rank.
    """
    sizes = run.micro_batches.sizes(shares, run.order.rank)
    losses: list[Tensor] = []
    last, samples, whole = len(sizes) - 1, sum(sizes), sum(shares)
    alone = run.settings.local_batch > 0 and strategy.updates_alone
    if run.graphs:
        run.graphs.enabled = last == 0 or alone  # what several passes add up, a replay would write over
    for number, (size, part) in enumerate(zip(sizes, pieces(batch, sizes), strict=True)):
        with AT_ONCE if number == last else strategy.without_sync():
            if size or is_synchronised(strategy.model):
                loss_sum = yield part
            else:
                with run.precision.autocast():
                    loss_sum = no_loss(strategy.model, part)
            if number == 0 and run.settings.slow:
                loss_sum.register_hook(lambda _: hold_up(run))
            losses.append(loss_sum.detach())
            scaled = run.precision.scaled(loss_sum)
            if number < last and alone:
                strategy.backward_alone(scaled, size)
                if run.clipping:
                    run.precision.unscale(run.optimizer)
                    run.clipping()
                yield None
                run.precision.step(run.optimizer)
                run.optimizer.zero_grad(set_to_none=True)
            elif number < last:
                strategy.accumulate(scaled, samples, whole)
    return sum(losses[1:], losses[0]), strategy.backward(scaled, size if alone else samples, whole)


def on_its_way(loss_sum: Tensor) -> Tensor | float:
    """To the host: a copy, which the loop's body may not change any more."""
    return loss_sum.item() if loss_sum.device.type == "cpu" else loss_sum.to("cpu", non_blocking=True, copy=True)


def hold_up(run: Run) -> None:
    """As a hook of backward it may give nothing back."""
    run.brake.pause("backward")
