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

import atexit
import contextlib
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from trainer.checkpoints.checkpoint import CheckpointKeeper
from trainer.checkpoints.kept_state import Stateful
from trainer.compute.arithmetic import DTYPES, Full
from trainer.compute.models import evaluated
from trainer.data.augment import mapped, moved
from trainer.data.loading import Batch, own_part
from trainer.data.own import judged_batches
from trainer.pipeline.pipeline_strategy import Pipeline
from trainer.ranks import ending as interrupt
from trainer.ranks.agreement import gather_lines, sum_over_ranks
from trainer.ranks.ending import let_others_rest
from trainer.ranks.process_group import for_all_ranks, leave
from trainer.setup.material import samples_of
from trainer.shared.errors import TrainError
from trainer.shared.metrics import MetricsWriter
from trainer.training.loss_sum import Weight, report_not_finite
from trainer.training.rates import samples_before
from trainer.training.run import Run
from trainer.training.shared_network import shared_network
from trainer.training.step_log import StepLog
from trainer.training.update import Differentiated, Piped, Update

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


# The network as a training loop calls it: `outputs = Forward(lambda: network, precision, settings.amp)(inputs)`.


class Forward:
    """Forward in the precision of the run (`amp`); what comes of it is in 32 bits again, as losses want it. On the last
    stage of a pipeline it is that stage's part.

    network: gives the one of now. Exact first updates have another than those that follow. failing: torch's errors are
    raised again in it, since ranks may meet in a forward pass.
    """

    def __init__(
        self,
        network: Callable[[], Callable[..., Any]],
        precision: Full,
        amp: str,
        failing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._network, self._precision, self._amp, self._failing = network, precision, amp, failing

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        try:
            return self._forward(inputs, named)
        except RuntimeError:
            with self._failing():
                raise

    def _forward(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self._amp == "none":
            return self._network()(*inputs, **named)
        with self._precision.autocast():
            outputs = self._network()(*inputs, **named)
        return mapped(outputs, _widened)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.dtype in DTYPES.values() else tensor


# What a script's own judgement of the test data adds up to, over all ranks, each sample once.

Judge = Callable[[Any, Any], Mapping[str, Tensor | float]]
"""Of outputs and targets: numbers by name, each a SUM over their samples."""


@torch.no_grad()
def summed(network: nn.Module, outputs: Iterable[tuple[Any, Any]], judge: Judge, samples: int) -> dict[str, float]:
    """Each number over all `samples`, by that number of samples. outputs: outputs and targets of what this rank is to
    judge, which may be nothing. Waits for all ranks.
    """
    sums: dict[str, Tensor | float] = {}
    with evaluated(network):
        for output, targets in outputs:
            for name, value in judge(output, targets).items():
                sums[name] = sums.get(name, 0.0) + value
    names = names_of_all(list(sums))
    totals = sum_over_ranks([float(sums.get(name, 0.0)) for name in names]) if names else []
    return {name: total / samples for name, total in zip(names, totals, strict=True)}


def names_of_all(own: list[str]) -> list[str]:
    """Ranks that judge nothing do not know them."""
    return next((json.loads(line) for line in gather_lines(json.dumps(own) if own else "") if line), [])


# How the process of a script ends: with a last record, whatever happens, and without waiting for lost ranks.

LEFT_EARLY = (
    "the script ended before its run did ({}): by break, sys.exit() or a caught exception. To stop early, leave "
    "run.epochs() after the same epoch on every rank, and call run.end()"
)


class Ending:
    """From now on until the process ends.

    A script that ends before its run is over fails: the other ranks wait for it, and an exit code of 0 would name them
    as the cause.
    """

    def __init__(self) -> None:
        self.metrics = MetricsWriter(None)
        self.complete: Callable[[], None] | None = None
        """Completes the run when the process ends; None until the run is over."""
        self.place: Callable[[], str] = lambda: "before its first update"
        """How far the run has come, on which rank and host."""
        self._exit_code = 1
        self._has_left = False
        interrupt.watch(last_words=lambda: self.metrics.end("interrupted"))
        sys.excepthook = self._failed
        self._exit = sys.exit
        sys.exit = self._note_exit_code
        atexit.register(self.end)

    def end(self) -> None:
        """The orderly end, once: leaves the other ranks together with them."""
        if self._has_left:
            return
        self._has_left = True
        try:
            if signum := interrupt.received():  # the script caught it
                raise interrupt.Interrupted(signum)
            if not self.complete:
                self._failed(TrainError, TrainError(LEFT_EARLY.format(self.place())), None, self._exit_code)
            self.complete()
            let_others_rest()
        except BaseException as error:  # Python itself would print it, and end with 0
            self._failed(type(error), error, error.__traceback__)

    def _note_exit_code(self, code: Any = None, /) -> NoReturn:
        """Python gives the exit code to no `atexit` function, which has to end the process with it."""
        self._exit_code = code if isinstance(code, int) and code % 256 else 1
        self._exit(code)

    def _failed(
        self, kind: type[BaseException], error: BaseException, where: TracebackType | None, exit_code: int = 1
    ) -> NoReturn:
        self._has_left = True
        if sys.__stderr__:  # torch keeps what a hook prints until it returns, and this one never does
            sys.stderr = sys.__stderr__
        if isinstance(error, interrupt.Interrupted):
            self.metrics.end("interrupted", str(error))
            sys.stderr.write(f"interrupted by {error}: {self.place()}\n")
            interrupt.leave(128 + error.signum)
        if isinstance(error, TrainError):
            self.metrics.end("failed", str(error))
            sys.stderr.write("".join(f"error: {line}\n" for line in str(error).splitlines()))
        else:
            self.metrics.end("failed", traceback.format_exception_only(kind, error)[-1].strip().splitlines()[0][:300])
            traceback.print_exception(kind, error, where)
        interrupt.leave(exit_code)
