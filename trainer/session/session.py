"""A run as a training loop sees it.

    for epoch in session.epochs():
        for inputs, targets in session.batches():          this rank's micro-batches
            session.step(loss(session.model(inputs), targets))
        session.evaluate(judge)
    session.end()

What a rank is given differs: its part of each batch, in micro-batches of what its memory holds; nothing where another
rank computes the loss of what it reads (in a pipeline all but the last stage) or where it has no samples. The body of
the loop is for what belongs to a loss; what all ranks do together stands outside it.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from trainer.checkpoints.checkpoint import CheckpointKeeper
from trainer.checkpoints.kept_state import Stateful
from trainer.data.batch import moved
from trainer.data.loading import Batch, own_part
from trainer.data.own import judged_batches
from trainer.pipeline.strategy import Pipeline
from trainer.ranks.agreement import gather_lines, sum_over_ranks
from trainer.ranks.process_group import for_all_ranks, leave
from trainer.session.ending import Ending
from trainer.session.forward import Forward
from trainer.session.judging import Judge, summed
from trainer.setup.own import samples_of
from trainer.shared.errors import TrainError
from trainer.training.differentiated import Differentiated
from trainer.training.loss_sum import Weight, report_not_finite
from trainer.training.piped import Piped
from trainer.training.rates import samples_before
from trainer.training.run import Run
from trainer.training.shared_network import shared_network
from trainer.training.step_log import StepLog
from trainer.training.update import Update

RATES_COMPARED = frozenset(10**power for power in range(1, 10))
"""Updates after which the ranks compare their learning rates, as at each epoch's end."""


class Session:
    """From the run's beginning, or the checkpoint that it resumes."""

    def __init__(self, run: Run, ending: Ending | None = None) -> None:
        self.run, self._ending = run, ending
        self.model = Forward(lambda: run.strategy.model, run.precision, run.settings.amp, self._for_all_ranks)
        self.keeper = CheckpointKeeper(run)
        self.progress = self.keeper.resume()
        self.has_reached_target = False
        self.loss: float | None = None
        """Mean over the samples of the last epoch, of all ranks (with weights the mean of its updates'); None
        before its end, and where nobody learns.
        """
        self._under_way: Update | None = None
        self._after_update: list[Callable[[], object]] = []
        self._are_rates_equal = True
        self._has_ended = False
        self._has_left_an_epoch = False
        """Did the script leave `batches` before its end, where other ranks still train?"""
        if ending:
            ending.place = self._place

    def _place(self) -> str:
        info = self.run.info
        return f"rank {info.rank} on {info.node}, after update {self.updates} of {self.run.last_step}"

    @property
    def optimizer(self) -> Any:
        """The one whose weights this rank moves: of a script that gave a function, what this made."""
        return self.run.optimizer

    def after_update(self, function: Callable[[], object]) -> None:
        """Has every rank call it after each update, once, whatever samples the rank had: the place for the step of a
        scheduler of the script's own, for its moving average, for its counters.
        """
        self._after_update.append(function)

    def keep(self, **things: Stateful) -> None:
        """Has checkpoints keep what has `state_dict` and `load_state_dict`, each rank's own; in a run that was resumed
        it has the state of then as soon as this returns. With a scheduler the rates that it has set are kept.

        Raises TrainError for what cannot be stored, or does not fit what the checkpoint has by that name.
        """
        with self._for_all_ranks():
            missing = self.keeper.kept.add(things)
        for name in missing:
            self.run.console.say(f"{name}: not in the checkpoint, started fresh")

    @property
    def updates(self) -> int:
        """Of the whole run so far."""
        return self.progress.epoch * self.run.stream.steps + self.progress.step

    @property
    def is_over(self) -> bool:
        return self.has_reached_target or self.updates >= self.run.last_step

    def epochs(self) -> Iterator[int]:
        """The numbers of those that are left; at the end what still travels between ranks has arrived."""
        for epoch in range(self.progress.epoch, self.run.settings.epochs):
            yield epoch
            self._check_whole_epochs()
            if self.is_over:
                break
            self.progress.begin_epoch()
        self._settle()
        if self._ending:
            self._ending.complete = self.end

    def _settle(self) -> None:
        self._check_whole_epochs()
        if self.run.rebalancer:
            self.run.rebalancer.settle()
        self.run.strategy.settle()
        self.run.timer.wait()  # a sum that a GPU still works on would be broken off with its process group

    def _check_whole_epochs(self) -> None:
        """Raises TrainError, rather than wait for ranks that are in the midst of an epoch."""
        if self._has_left_an_epoch:
            raise TrainError(
                f"the script left run.batches() before its end ({self._place()}), while other ranks train on; "
                "for fewer updates give `steps` or `epochs` to trainer.join, or --set them"
            )

    def batches(self) -> Iterator[Any]:
        """This rank's micro-batches, from where the run is in its epoch to the end of it, or of the run: for each the
        body calls `step` with the sum of its samples' losses.
        """
        self._check_whole_epochs()
        run, progress, started_s = self.run, self.progress, time.monotonic()
        kind = Piped if isinstance(run.strategy, Pipeline) else Differentiated
        run.order.epoch, self.loss = progress.epoch, None
        with self._for_all_ranks(), StepLog(run, progress) as log, self._left_behind():
            begin = log.begin()
            for batch in self._drawn():
                self._under_way = update = kind(run, batch, progress, begin)
                yield from update.parts()
                step = update.step
                assert step  # noqa: S101 - for the type checker
                begin = step.end  # what follows counts as loading of the next step, so that they add up to the epoch
                progress.advance(step.samples)
                log.add(step)
                for function in self._after_update:
                    function()
                if run.settings.is_own and step.number + 1 in RATES_COMPARED:
                    self._compare_rates()
                if self.keeper.is_due(step.number + 1):
                    log.flush()
                    self.keeper.save(progress)
                    begin = log.begin()
                if step.number + 1 == run.last_step:
                    break
        with self._for_all_ranks("the end of an epoch"):
            self._end_epoch(started_s)

    @contextlib.contextmanager
    def _left_behind(self) -> Iterator[None]:
        """Outside of the loop there is no update, nor its batch."""
        try:
            yield
        except GeneratorExit:
            self._has_left_an_epoch = True
            raise
        finally:
            self._under_way = None

    def step(self, loss_sum: Tensor, weight: Weight | None = None) -> None:
        """Backward, and after the last micro-batch of an update the exchange between ranks and the optimiser.

        loss_sum: the SUM of the losses of this micro-batch's samples: it is weighted here, so that each sample of the
        whole batch counts alike on whichever rank it is. weight: what the losses are to be divided by in place of the
        samples, like this micro-batch's tokens: the gradient is that of the mean over all ranks and micro-batches.
        """
        self.backward(loss_sum, weight)
        self.update()

    def backward(self, loss_sum: Tensor, weight: Weight | None = None) -> None:
        """The first half of `step`: after an update's last micro-batch gradients are what the optimiser will use."""
        update = self._current
        try:
            update.take(loss_sum, weight)
        except (TrainError, RuntimeError):
            with self._for_all_ranks():  # entered only here: it would cost each step 3 us
                raise

    def update(self) -> None:
        """The second half of `step`: moves the weights, where this was an update's last micro-batch."""
        update = self._current
        try:
            update.optimise()
        except (TrainError, RuntimeError):
            with self._for_all_ranks():
                raise

    def _for_all_ranks(self, doing: str = "") -> contextlib.AbstractContextManager[None]:
        return for_all_ranks(self.run.info, lambda: doing or f"update {self.updates + 1}")

    @property
    def _current(self) -> Update:
        if self._under_way is None:
            raise TrainError("there is no batch to make a step with: call step in the body of `for ... in batches()`")
        return self._under_way

    def _drawn(self) -> Iterator[Batch]:
        """This rank's batches from where the run is to the end of the epoch, or of the run. They are drawn again where
        the shares have changed, since what a loader has prepared by then is cut by the old ones.
        """
        run, progress = self.run, self.progress
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

    def _end_epoch(self, started_s: float) -> None:
        run, progress = self.run, self.progress
        if run.settings.is_own:
            self._compare_rates()
        total_loss, samples = sum_over_ranks([progress.loss_sum, float(progress.samples)])
        self.loss = total_loss / samples if run.learns else None
        epoch_s = round(time.monotonic() - started_s, 6)
        done = {"epoch": progress.epoch, "steps": progress.step, "samples": int(samples)}
        run.metrics.write("epoch", **done, loss=self.loss, epoch_s=epoch_s)

    def _compare_rates(self) -> None:
        """Reports, once, that a script's own schedule has left the ranks with different learning rates."""
        rates = [float(group["lr"]) for group in self.run.optimizer.param_groups]
        info = self.run.info
        of_ranks = [json.loads(line) for line in gather_lines(json.dumps([info.node, rates]))]
        unlike = [(rank, node, theirs) for rank, (node, theirs) in enumerate(of_ranks) if theirs != of_ranks[0][1]]
        if unlike and self._are_rates_equal:
            self._are_rates_equal = False
            rank, node, theirs = unlike[0]
            self.run.console.say(
                f"warning: by update {self.updates} the learning rates differ: {of_ranks[0][1]} on rank 0 "
                f"({of_ranks[0][0]}), {theirs} on rank {rank} ({node}); so do the weights. Step the scheduler by "
                "run.after_update(scheduler.step), not in the loop's body, which a rank without samples does not run"
            )

    def evaluate(self, judge: Judge, dataset: Any) -> dict[str, float]:
        """What `judge` says of each sample of the data set, on average: every sample once, over all ranks, which call
        this together, and with the weights that all share.

        judge: of outputs and targets, numbers by name, each a SUM over their samples. A `loss` and an `accuracy` among
        them stand in the report.
        """
        self._check_whole_epochs()
        run, progress, started_s = self.run, self.progress, time.monotonic()
        samples = samples_of(dataset)
        own, at_once = own_part(samples, run.order), run.order.share or 1
        drawn = judged_batches(dataset, own, at_once, run.material.collate, run.settings.num_workers)
        with self._for_all_ranks("an evaluation"), shared_network(run, progress) as network:
            pairs = ((moved(inputs, run.device), moved(targets, run.device)) for inputs, targets in drawn)
            found = summed(network, run.strategy.outputs(network, pairs), judge, samples)
        of_epoch = {"epoch": progress.epoch, "step": self.updates - 1, "samples": samples}
        known: dict[str, Any] = {"accuracy": found.get("accuracy"), "per_class": [], "loss": found.get("loss")}
        run.metrics.write("eval", **of_epoch, **known, eval_s=round(time.monotonic() - started_s, 6))
        run.console.judged(progress.epoch, samples, found)
        self.judged(found.get("accuracy"), found.get("loss"))
        return found

    def judged(self, accuracy: float | None, loss: float | None) -> None:
        """After an evaluation, on every rank: the run is over where that is the target. Its checkpoint is the last."""
        run, progress = self.run, self.progress
        if loss is not None and not math.isfinite(loss) and (run.info.rank == 0 or run.settings.not_finite == "stop"):
            report_not_finite(run, max(0, self.updates - 1), progress.epoch, loss, "test loss")
        if not run.settings.target_accuracy or accuracy is None or accuracy < run.settings.target_accuracy:
            return
        self.has_reached_target = True
        samples = samples_before(run.stream, progress.epoch, progress.step)
        of_update = {"epoch": progress.epoch, "step": self.updates - 1, "samples": samples}
        run.metrics.write("target", **of_update, accuracy=accuracy, total_s=run.metrics.total_s)
        run.console.reached(accuracy, self.updates, samples)
        if self.keeper.every and not self.keeper.is_due(self.updates):
            self.keeper.save(progress)

    def end(self) -> None:
        """Leaves the other ranks, together with them: after the last epoch, or an earlier one if all ranks call it
        then. Later calls do nothing.
        """
        if self._has_ended:
            return
        self._has_ended = True
        self._settle()
        if self._ending:
            self._ending.complete = self.end
        self.keeper.copies.settle()
        leave()
        self.run.metrics.end("succeeded")
        self.run.console.finished(self.updates)
