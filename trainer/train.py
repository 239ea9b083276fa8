"""One rank's training run: `train(settings, rank_info, metrics)`.

For each update load, forward, backward with synchronisation, optimiser, record; at the end of an epoch its loss, and an
evaluation. Rank 0 speaks to people, one line a second; every rank writes its own records.

Where a rank stands in for a GPU that is not there (`standin`), all ranks keep time and nobody learns: no loss, no
evaluation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

from torch import Tensor

from trainer import ranks
from trainer.checkpoint import CheckpointKeeper, Progress
from trainer.config import Settings
from trainer.env import RankInfo
from trainer.evaluate import evaluate
from trainer.loading import Batch
from trainer.look import looked_at
from trainer.records import MetricsWriter
from trainer.setup import Run, set_up
from trainer.strategies import Exchange, local_loss
from trainer.timing import covered_ms


def train(settings: Settings, info: RankInfo, metrics: MetricsWriter) -> None:
    """Trains, records, prints. Raises TrainError for what a person can mend."""
    run = set_up(settings, info, metrics)
    settings = run.settings  # as they turned out on this host
    keeper = CheckpointKeeper(run)
    progress = keeper.resume()
    for epoch in range(progress.epoch, settings.epochs):
        started_s = time.monotonic()
        train_epoch(run, progress, keeper)
        total_loss, samples = ranks.sum_over_ranks([progress.loss_sum, float(progress.samples)])
        loss, epoch_s = total_loss / samples if run.learns else None, round(time.monotonic() - started_s, 6)
        metrics.write("epoch", epoch=epoch, steps=progress.step, samples=int(samples), loss=loss, epoch_s=epoch_s)

        step = epoch * run.stream.steps + progress.step
        is_last = step >= run.last_step
        if run.learns and settings.eval_every and (is_last or (epoch + 1) % settings.eval_every == 0):
            started_s = time.monotonic()
            with looked_at(run, progress) as network:
                result = evaluate(network, run.test_batches(), run.facts.classes, run.device)
            eval_s = round(time.monotonic() - started_s, 6)
            metrics.write("eval", epoch=epoch, step=step - 1, **dataclasses.asdict(result), eval_s=eval_s)
            run.console.evaluation(epoch, loss, result)
        if is_last:
            break
        progress.begin_epoch()
    if run.rebalancer:
        run.rebalancer.settle()
    run.strategy.settle()
    ranks.leave()
    metrics.end("succeeded")
    run.console.finished()


def train_epoch(run: Run, progress: Progress, keeper: CheckpointKeeper) -> None:
    """From where `progress` is in its epoch to the end of it, or to the last step."""
    timer, epoch = run.timer, progress.epoch
    run.order.epoch = epoch
    begin = timer.mark()
    for images, labels in drawn(run, progress):
        images, labels = images.to(run.device, non_blocking=True), labels.to(run.device, non_blocking=True)
        batch = run.stream.batch_at(progress.step)  # over all ranks
        loaded = timer.mark()

        run.brake.pause("start")
        run.optimizer.zero_grad(set_to_none=True)
        loss_sum, exchange = differentiate(run, images, labels, progress.step)
        run.precision.unscale(run.optimizer)
        computed, summed = exchange.computed, timer.mark()

        run.precision.step(run.optimizer)
        updated = timer.mark()
        run.strategy.after_update()
        end = timer.mark()
        timer.wait()

        marks = {"t_ms": (begin, end), "load_ms": (begin, loaded), "compute_ms": (loaded, computed)}
        marks |= {"exposed_ms": (computed, summed), "optim_ms": (summed, updated)}
        times = {name: timer.ms(*pair) for name, pair in marks.items()}
        averaging_ms = timer.ms(updated, end)
        held_up_ms = 1000 * exchange.held_up_s
        times["compute_ms"] += held_up_ms  # others wait for it as for computing
        times["exposed_ms"] += averaging_ms - held_up_ms
        sending = exchange.collectives or [(computed, summed)]
        times["comm_ms"] = covered_ms(timer, begin, sending) + averaging_ms - held_up_ms
        times = {name: round(ms, 3) for name, ms in times.items()}
        begin = end  # what follows counts as loading of the next step, so that the steps add up to the epoch
        step = epoch * run.stream.steps + progress.step
        loss, samples = loss_sum.item() if run.learns else None, len(labels)
        run.metrics.write("step", step=step, epoch=epoch, samples=samples, **times, loss=loss, wall=time.time())
        run.console.step(step, epoch, batch, samples, loss, times)
        progress.advance(loss or 0.0, samples)
        if run.rebalancer:
            run.rebalancer.after_update(step, times["compute_ms"], times["load_ms"], samples)
        if keeper.is_due(step + 1):
            keeper.save(progress)
            begin = timer.mark()
        if step + 1 == run.last_step:
            break


def drawn(run: Run, progress: Progress) -> Iterator[Batch]:
    """This rank's batches from where `progress` is to the end of the epoch, or of the run; drawn anew where the shares
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
    batch, shares = run.stream.batch_at(step), run.stream.shares_at(step, run.order.epoch)
    sizes = run.micro_batches.sizes(shares, run.info.rank)
    total, last = 0.0, len(sizes) - 1
    alone = run.settings.local_batch > 0 and run.strategy.updates_alone
    for number, part in enumerate(zip(images.split(sizes), labels.split(sizes), strict=True)):
        with contextlib.nullcontext() if number == last else run.strategy.without_sync():
            with run.precision.autocast():
                loss_sum = local_loss(run.strategy.model, *part)
            if number == 0:
                loss_sum.register_hook(lambda _: hold_up(run))
            total, scaled = total + loss_sum.detach(), run.precision.scaled(loss_sum)
            if number < last and alone:
                update_alone(run, scaled, len(part[1]))
            elif number < last:
                run.strategy.accumulate(scaled, len(labels), batch)
    return total, run.strategy.backward(scaled, len(part[1] if alone else labels), batch)


def update_alone(run: Run, loss_sum: Tensor, samples: int) -> None:
    run.strategy.backward_alone(loss_sum, samples)
    run.precision.step(run.optimizer)
    run.optimizer.zero_grad(set_to_none=True)


def hold_up(run: Run) -> None:
    """As a hook of backward it may give nothing back."""
    run.brake.pause("backward")
