"""A run as a training loop sees it.

    for epoch in session.epochs():
        for inputs, targets in session.batches():          this rank's micro-batches
            session.step(loss(session.model(inputs), targets))
        session.evaluate(judge)
    session.end()

The loop's body may run less often on some ranks, or never (without samples; on a pipeline's earlier stages): put work
that all ranks do together outside it.
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
from trainer.compute.arithmetic import Full, widened
from trainer.compute.models import evaluated
from trainer.data.augment import mapped, moved
from trainer.data.loading import Batch, own_part
from trainer.data.script_data import judged_batches
from trainer.pipeline.pipeline_strategy import Pipeline
from trainer.pipeline.stage import Criterion, Part
from trainer.ranks import ending as interrupt
from trainer.ranks.agreement import gather_lines, sum_over_ranks
from trainer.ranks.ending import wait_for_threads
from trainer.ranks.process_group import for_all_ranks, leave
from trainer.setup.training_task import samples_of
from trainer.shared.errors import TrainError
from trainer.shared.metrics import MetricsWriter
from trainer.training.loss_sum import Weight, report_not_finite
from trainer.training.rates import samples_before
from trainer.training.run import Run, shared_network
from trainer.training.step_log import StepLog
from trainer.training.update import FullUpdate, StageUpdate, Update

RATES_COMPARED = frozenset(10**power for power in range(1, 10))
"""Updates after which ranks compare learning rates."""


class Session:
    def __init__(self, run: Run, ending: Ending | None = None) -> None:
        self.run, self._ending = run, ending
        self.model = Forward(lambda: run.strategy.model, run.precision, run.settings.amp, self._for_all_ranks)
        self.keeper = CheckpointKeeper(run)
        self.progress = self.keeper.resume()
        self.has_reached_target = False
        self.loss: float | None = None
        """Mean of the last epoch over all ranks; None before its end, and with paced ranks."""
        self._under_way: Update | None = None
        self._after_update: list[Callable[[], object]] = []
        self._are_rates_equal = True
        self._has_ended = False
        self._has_left_an_epoch = False
        """While other ranks train."""
        if ending:
            ending.place = self._place

    def _place(self) -> str:
        info = self.run.info
        return f"rank {info.rank} on {info.node}, after update {self.updates} of {self.run.last_step}"

    @property
    def optimizer(self) -> Any:
        # For the weights of this rank.
        return self.run.optimizer

    def after_update(self, function: Callable[[], object]) -> None:
        """Calls `function` once on every rank after each update: for a scheduler, a moving average, counters."""
        self._after_update.append(function)

    def keep(self, **things: Stateful) -> None:
        """Keeps objects with `state_dict` and `load_state_dict` in checkpoints, per rank; restores them at once if
        resumed.

        Raises TrainError if an object cannot be stored or restored.
        """
        with self._for_all_ranks():
            missing = self.keeper.kept.add(things)
        for name in missing:
            self.run.console.say(f"{name}: not in the checkpoint, started fresh")

    @property
    def updates(self) -> int:
        """The whole run's so far."""
        return self.progress.epoch * self.run.stream.steps + self.progress.step

    @property
    def is_over(self) -> bool:
        return self.has_reached_target or self.updates >= self.run.last_step

    def epochs(self) -> Iterator[int]:
        """The remaining epochs. Waits for transfers at the end."""
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
        self.run.timer.wait()  # otherwise a GPU's pending sum would fail when its process group ends

    def _check_whole_epochs(self) -> None:
        """Raises TrainError, instead of waiting for ranks in an epoch."""
        if self._has_left_an_epoch:
            raise TrainError(
                f"the script left run.batches() before its end ({self._place()}), while other ranks continue to train; "
                "for fewer updates pass `steps` or `epochs` to trainer.join, or --set them"
            )

    def batches(self) -> Iterator[Any]:
        """This rank's micro-batches to the end of the epoch, or of the run."""
        self._check_whole_epochs()
        run, progress, started_s = self.run, self.progress, time.monotonic()
        run.order.epoch, self.loss = progress.epoch, None
        with self._for_all_ranks(), StepLog(run, progress) as log, self._left_behind():
            begin = log.begin()
            for batch, following in self._drawn_ahead():
                self._under_way = update = self._begun(batch, following, begin)
                yield from update.parts()
                step = update.step
                assert step  # noqa: S101 - for the type checker
                begin = step.end  # time between steps counts as loading, so that steps add up to the epoch
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
        try:
            yield
        except GeneratorExit:
            self._has_left_an_epoch = True
            raise
        finally:
            self._under_way = None

    def step(self, loss_sum: Tensor, weight: Weight | None = None) -> None:
        """Backward, and after an update's last micro-batch the exchange and the optimiser.

        loss_sum: the SUM of the losses of this micro-batch's samples. weight: divisor of the losses instead of samples,
        like this micro-batch's tokens; the gradient is that of the mean over all ranks and micro-batches.
        """
        self.backward(loss_sum, weight)
        self.update()

    def learn(self, inputs: Tensor, labels: Tensor, loss_sum: Callable[[Tensor, Tensor], Tensor]) -> None:
        """`step` with loss_sum(outputs, labels), which CUDA graphs of a pipeline's last stage include."""
        if isinstance(self.run.strategy.model, Part):
            self.step(self.model(inputs, Criterion(loss_sum, labels)))
        else:
            self.step(loss_sum(self.model(inputs), labels))

    def backward(self, loss_sum: Tensor, weight: Weight | None = None) -> None:
        """The first half of `step`: leaves the final gradients."""
        update = self._current
        try:
            update.take(loss_sum, weight)
        except (TrainError, RuntimeError):
            with self._for_all_ranks():  # entered only here, because it costs 3 us
                raise

    def update(self) -> None:
        """The second half of `step`: moves the weights."""
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
            raise TrainError("there is no batch for this step: call step in the body of `for ... in batches()`")
        return self._under_way

    def _begun(self, batch: Batch, following: Batch | None, begin: Any) -> Update:
        if isinstance(self.run.strategy, Pipeline):
            return StageUpdate(self.run, batch, self.progress, begin, following)
        return FullUpdate(self.run, batch, self.progress, begin)

    def _drawn_ahead(self) -> Iterator[tuple[Batch, Batch | None]]:
        """Each batch, and the next one if a pipeline's late stages may begin it during this update."""
        drawn = self._drawn()
        for batch in drawn:
            while self._may_begin_next():
                following = moved(next(drawn), self.run.device)
                yield batch, following
                batch = following
            yield batch, None

    def _may_begin_next(self) -> bool:
        # Not before a checkpoint or an evaluation, which need the state between two updates.
        run, done = self.run, self.updates + 1
        is_late = run.settings.fidelity == "late" and done >= run.settings.exact_updates(run.last_step)
        return is_late and self.progress.step + 1 < self._epoch_ends and not self.keeper.is_due(done)

    @property
    def _epoch_ends(self) -> int:
        """Updates of this epoch, or fewer if the run ends in it."""
        return min(self.run.stream.steps, self.run.last_step - self.progress.epoch * self.run.stream.steps)

    def _drawn(self) -> Iterator[Batch]:
        """Drawn again after a change of shares."""
        run, progress = self.run, self.progress
        while progress.step < self._epoch_ends:
            run.order.first_step, stream = progress.step, run.stream
            batches = iter(run.batches)
            progress.restore_random()
            for batch in batches:
                yield batch
                if run.stream is not stream:
                    break
        progress.restore_random()  # a checkpoint at the very end of an epoch

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
        """Reports, once, that a script's schedule differs between ranks."""
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
        """The mean of each number of `judge` over the data set, with each sample once. A collective call.

        judge: of outputs and targets, numbers by name, each a SUM over samples. The report shows `loss` and `accuracy`.
        """
        self._check_whole_epochs()
        run, progress, started_s = self.run, self.progress, time.monotonic()
        samples = samples_of(dataset)
        own, at_once = own_part(samples, run.order), run.order.share or 1
        drawn = judged_batches(dataset, own, at_once, run.training_task.collate, run.settings.num_workers)
        with self._for_all_ranks("an evaluation"), shared_network(run, progress) as network:
            pairs = ((moved(inputs, run.device), moved(targets, run.device)) for inputs, targets in drawn)
            found = summed(network, run.strategy.outputs(network, pairs), judge, samples)
        of_epoch = {"epoch": progress.epoch, "step": self.updates - 1, "samples": samples}
        known: dict[str, Any] = {"accuracy": found.get("accuracy"), "per_class": [], "loss": found.get("loss")}
        known["bits_per_byte"] = None  # of text by an experiment
        run.metrics.write("eval", **of_epoch, **known, eval_s=round(time.monotonic() - started_s, 6))
        run.console.judged(progress.epoch, samples, found)
        self.judged(found.get("accuracy"), found.get("loss"))
        return found

    def judged(self, accuracy: float | None, loss: float | None) -> None:
        """Collective. Ends the run, with a checkpoint, at the target."""
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
        """Leaves together with the other ranks. All ranks may call it after the same earlier epoch. Repeated calls do
        nothing.
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


class Forward:
    """Calls the network, or this rank's stage, in the precision of the run; outputs are in 32 bits.

    network: returns the current one. failing: context for torch's errors.
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
        return mapped(outputs, widened)


Judge = Callable[[Any, Any], Mapping[str, Tensor | float]]
"""Returns SUMs over samples, by name."""


@torch.no_grad()
def summed(network: nn.Module, outputs: Iterable[tuple[Any, Any]], judge: Judge, samples: int) -> dict[str, float]:
    """Divides totals by `samples`. outputs: of this rank. A collective call."""
    sums: dict[str, Tensor | float] = {}
    with evaluated(network):
        for output, targets in outputs:
            for name, value in judge(output, targets).items():
                sums[name] = sums.get(name, 0.0) + value
    names = names_of_all(list(sums))
    totals = sum_over_ranks([float(sums.get(name, 0.0)) for name in names]) if names else []
    return {name: total / samples for name, total in zip(names, totals, strict=True)}


def names_of_all(own: list[str]) -> list[str]:
    """Ranks without outputs know no names."""
    return next((json.loads(line) for line in gather_lines(json.dumps(own) if own else "") if line), [])


LEFT_EARLY = (
    "the script ended before its run did ({}): by break, sys.exit() or a caught exception. To stop early, leave "
    "run.epochs() after the same epoch on every rank, and call run.end()"
)


class Ending:
    """Ends a script's process with a last record, without waiting for lost ranks."""

    # A script that ends before its run fails: with exit code 0 the waiting ranks would seem to be the cause.

    def __init__(self) -> None:
        self.metrics = MetricsWriter(None)
        self.complete: Callable[[], None] | None = None
        """None until the run is over."""
        self.place: Callable[[], str] = lambda: "before its first update"
        self._exit_code = 1
        self._has_left = False
        interrupt.watch(last_words=lambda: self.metrics.end("interrupted"))
        sys.excepthook = self._failed
        self._exit = sys.exit
        sys.exit = self._note_exit_code
        atexit.register(self.end)

    def end(self) -> None:
        if self._has_left:
            return
        self._has_left = True
        try:
            if signum := interrupt.received():  # the script caught it
                raise interrupt.Interrupted(signum)
            if not self.complete:
                self._failed(TrainError, TrainError(LEFT_EARLY.format(self.place())), None, self._exit_code)
            self.complete()
            wait_for_threads()
        except BaseException as error:  # Python would print it and exit with 0
            self._failed(type(error), error, error.__traceback__)

    def _note_exit_code(self, code: Any = None, /) -> NoReturn:
        # Python does not pass the exit code to `atexit` functions.
        self._exit_code = code if isinstance(code, int) and code % 256 else 1
        self._exit(code)

    def _failed(
        self, kind: type[BaseException], error: BaseException, where: TracebackType | None, exit_code: int = 1
    ) -> NoReturn:
        self._has_left = True
        if sys.__stderr__:  # torch holds back a hook's output until it returns, which this one never does
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
