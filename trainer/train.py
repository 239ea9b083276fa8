"""One rank's training run: `train(settings, rank_info, metrics)`.

For each update load, forward, backward with synchronisation, optimiser, record; at the end of an epoch its loss, and an
evaluation. Rank 0 speaks to people, one line a second; every rank writes its own records.

Where a rank stands in for a GPU that is not there (`paced`), all ranks keep time and nobody learns: no loss, no
evaluation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from trainer.checkpoints.checkpoint import CheckpointKeeper
from trainer.data.loading import Batch
from trainer.pipeline.strategy import Pipeline
from trainer.ranks.agreement import sum_over_ranks
from trainer.ranks.process_group import leave
from trainer.ranks.rank_info import RankInfo
from trainer.setup.assemble import set_up
from trainer.shared.config import Settings
from trainer.shared.metrics import MetricsWriter
from trainer.strategies import Exchange, local_loss
from trainer.training.evaluate import judged
from trainer.training.piped import piped
from trainer.training.progress import Progress
from trainer.training.run import Run
from trainer.training.shared_network import shared_network
from trainer.training.step_log import Step, StepLog


def train(settings: Settings, info: RankInfo, metrics: MetricsWriter) -> None:
    """Trains, records, prints. Raises TrainError for what a person can mend."""
    run = set_up(settings, info, metrics)
    keeper = CheckpointKeeper(run)
    progress = keeper.resume()
    for epoch in range(progress.epoch, run.settings.epochs):
        started_s = time.monotonic()
        train_epoch(run, progress, keeper)
        total_loss, samples = sum_over_ranks([progress.loss_sum, float(progress.samples)])
        loss, epoch_s = total_loss / samples if run.learns else None, round(time.monotonic() - started_s, 6)
        metrics.write("epoch", epoch=epoch, steps=progress.step, samples=int(samples), loss=loss, epoch_s=epoch_s)

        updates, every = epoch * run.stream.steps + progress.step, run.settings.eval_every
        is_last = updates >= run.last_step
        if loss is not None and every and (is_last or (epoch + 1) % every == 0):
            evaluate_epoch(run, progress, updates, loss)
        if is_last:
            break
        progress.begin_epoch()
    if run.rebalancer:
        run.rebalancer.settle()
    run.strategy.settle()
    run.timer.wait()  # a sum that a GPU still works on would be broken off with its process group
    leave()
    metrics.end("succeeded")
    run.console.finished()


def evaluate_epoch(run: Run, progress: Progress, updates: int, train_loss: float) -> None:
    """updates: of the whole run so far."""
    if run.test_batches is None:  # a paced rank, and no run with one of these evaluates
        return
    started_s = time.monotonic()
    with shared_network(run, progress) as network:
        batches = ((images.to(run.device), labels) for images, labels in run.test_batches())
        result = judged(network, run.strategy.outputs(network, batches), run.facts.classes, run.device)
    eval_s = round(time.monotonic() - started_s, 6)
    fields = dataclasses.asdict(result)
    run.metrics.write("eval", epoch=progress.epoch, step=updates - 1, **fields, eval_s=eval_s)
    run.console.evaluation(progress.epoch, train_loss, result)


def train_epoch(run: Run, progress: Progress, keeper: CheckpointKeeper) -> None:
    """From where `progress` is in its epoch to the end of it, or to the last step."""
    run.order.epoch = progress.epoch
    with StepLog(run, progress) as log:
        begin = log.begin()
        for images, labels in drawn(run, progress):
            step = update(run, images, labels, progress, begin)
            begin = step.end  # what follows counts as loading of the next step, so that the steps add up to the epoch
            progress.advance(step.samples)
            log.add(step)
            if keeper.is_due(step.number + 1):
                log.flush()
                keeper.save(progress)
                begin = log.begin()
            if step.number + 1 == run.last_step:
                break


def update(run: Run, images: Tensor, labels: Tensor, progress: Progress, begin: Any) -> Step:
    """One update of the weights, queued on the device. begin: the mark at which it began."""
    timer = run.timer
    images, labels = images.to(run.device, non_blocking=True), labels.to(run.device, non_blocking=True)
    loaded = timer.mark()

    run.brake.pause("start")
    run.optimizer.zero_grad(set_to_none=True)
    loss_sum, exchange = differentiate(run, images, labels, progress.step)
    run.precision.unscale(run.optimizer)
    summed = timer.mark()

    run.precision.step(run.optimizer)
    updated = timer.mark()
    run.strategy.after_update()
    return Step(
        number=progress.epoch * run.stream.steps + progress.step,
        epoch=progress.epoch,
        batch=run.stream.batch_at(progress.step),
        samples=len(labels) * run.strategy.counts,
        loss=(loss_sum * run.strategy.counts).to("cpu", non_blocking=True) if run.learns else None,
        exchange=exchange,
        begin=begin,
        loaded=loaded,
        summed=summed,
        updated=updated,
        end=timer.mark(),
    )


def drawn(run: Run, progress: Progress) -> Iterator[Batch]:
    """This rank's batches from where `progress` is to the end of the epoch, or of the run; drawn again where the shares
    have changed, since what a loader has prepared by then is cut by the old ones.
    """
    epoch_ends = min(run.stream.steps, run.last_step - progress.epoch * run.stream.steps)
    while progress.step < epoch_ends:
        run.order.first_step, stream = progress.step, run.stream
        batches = iter(run.batches)
        progress.restore_random()
        for batch in batches:
            yield batch
            if run.stream is not stream:
                break
    progress.restore_random()  # where the checkpoint was written at the very end


def differentiate(run: Run, images: Tensor, labels: Tensor, step: int) -> tuple[Tensor, Exchange]:
    """Forward and backward, micro-batch by micro-batch: this rank's sum of losses, and the exchange of the last one.
    With `local_batch` each but the last is an update, too.

    step: within its epoch.
    """
    if isinstance(run.strategy, Pipeline):
        return piped(run, run.strategy, images, labels, step)
    batch, shares = run.stream.batch_at(step), run.stream.shares_at(step, run.order.epoch)
    sizes = run.micro_batches.sizes(shares, run.order.rank)
    losses: list[Tensor] = []
    last = len(sizes) - 1
    alone = run.settings.local_batch > 0 and run.strategy.updates_alone
    if run.graphs:
        run.graphs.enabled = last == 0 or alone  # what several passes add up, a replay would write over
    for number, part in enumerate(zip(images.split(sizes), labels.split(sizes), strict=True)):
        with contextlib.nullcontext() if number == last else run.strategy.without_sync():
            with run.precision.autocast():
                loss_sum = local_loss(run.strategy.model, *part)
            if number == 0:
                loss_sum.register_hook(lambda _: hold_up(run))
            losses.append(loss_sum.detach())
            scaled = run.precision.scaled(loss_sum)
            if number < last and alone:
                update_alone(run, scaled, len(part[1]))
            elif number < last:
                run.strategy.accumulate(scaled, len(labels), batch)
    return sum(losses[1:], losses[0]), run.strategy.backward(scaled, len(part[1] if alone else labels), batch)


def update_alone(run: Run, loss_sum: Tensor, samples: int) -> None:
    run.strategy.backward_alone(loss_sum, samples)
    run.precision.step(run.optimizer)
    run.optimizer.zero_grad(set_to_none=True)


def hold_up(run: Run) -> None:
    """As a hook of backward it may give nothing back."""
    run.brake.pause("backward")
