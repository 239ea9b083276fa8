"""The `step` records, each written when the device has come to the end of its step.

    with StepLog(run, progress) as log:
        begin = log.begin()                  a mark, with the time of day
        ...
        log.add(Step(...))                   writes the step before, whose marks the device has reached by now
        log.flush()                          writes all

A GPU runs behind the program that feeds it. Whoever reads a step's marks and loss at its end waits for the GPU, which
then waits for the host to queue the next step; so they are read one step late, when that has been queued. On a CPU they
are read at once, and with `shares=auto`, whose ranks decide together after each step.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from trainer.compute.timer import Timer, covered_ms
from trainer.shared.metrics import MOST_TASKS
from trainer.strategies import Exchange
from trainer.training.progress import Progress
from trainer.training.stage_times import has_marks, stage_times, task_rows

if TYPE_CHECKING:
    from trainer.training.run import Run


MOMENT_S = 1.0


class Step(NamedTuple):
    """One update: what it trained on, and its marks in the order in which the device comes to them. The exchange holds
    the one between `loaded` and `summed`.
    """

    number: int
    """In the whole run."""
    epoch: int
    batch: int
    """Samples over all ranks."""
    samples: int
    """Samples of this rank."""
    loss: Tensor | float | None
    """The sum over these samples, or on its way to the host, where it is by `end`; None in a paced run."""
    exchange: Exchange
    begin: Any
    loaded: Any
    summed: Any
    updated: Any
    end: Any

    def times(self, timer: Timer) -> dict[str, float]:
        """In milliseconds, as the `step` record names them."""
        computed, held_up_ms = self.exchange.computed, 1000 * self.exchange.held_up_s
        waited_ms = covered_ms(timer, self.begin, self.exchange.waits)
        averaging_ms, sum_ms = timer.ms(self.updated, self.end), timer.ms(computed, self.summed)
        beside = self.exchange.collectives
        under_way_ms = covered_ms(timer, self.begin, beside) if beside else sum_ms
        # Others wait for a pause made on purpose as they wait for computing.
        compute_ms = timer.ms(self.loaded, computed) - waited_ms + held_up_ms
        times = {
            "t_ms": timer.ms(self.begin, self.end),
            "load_ms": timer.ms(self.begin, self.loaded),
            "compute_ms": compute_ms,
            "exposed_ms": sum_ms + waited_ms + averaging_ms - held_up_ms,
            "comm_ms": under_way_ms + waited_ms + averaging_ms - held_up_ms,
            "optim_ms": timer.ms(self.summed, self.updated),
        }
        return {name: round(ms, 3) for name, ms in times.items()}


class StepLog:
    """Around one epoch's steps. Left by an exception it writes those that the device finishes within a moment: what the
    others wait for may never come.
    """

    def __init__(self, run: Run, progress: Progress) -> None:
        self.run, self.progress = run, progress
        self.behind = 0 if run.rebalancer else run.timer.behind
        self.left: deque[Step] = deque()

    def begin(self) -> Any:
        """Where the next step begins."""
        mark = self.run.timer.mark()
        self.run.timer.wait_for(mark)
        self.began = mark, time.time()
        return mark

    def add(self, step: Step) -> None:
        self.left.append(step)
        self._write(self.behind)

    def flush(self) -> None:
        self._write(0)

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.flush()
            return
        deadline_s = time.monotonic() + MOMENT_S
        with contextlib.suppress(RuntimeError):  # a GPU that failed says so again to whoever asks it anything
            while self.left and time.monotonic() < deadline_s:
                if self.run.timer.is_over(self.left[0].end):
                    self._write(len(self.left) - 1)
                else:
                    time.sleep(0.001)

    def _write(self, keep: int) -> None:
        """All but the newest so many."""
        while len(self.left) > keep:
            step = self.left.popleft()
            self.run.timer.wait_for(step.end)
            self._record(step)

    def _record(self, step: Step) -> None:
        run, times = self.run, step.times(self.run.timer)
        mark, wall_s = self.began
        fields = {"step": step.number, "epoch": step.epoch, "samples": step.samples, **times}
        loss = None if step.loss is None else float(step.loss)
        of_stage = stage_times(run.timer, step.exchange)
        run.metrics.write("step", **fields, **of_stage, loss=loss, wall=wall_s + run.timer.ms(mark, step.end) / 1000)
        said, samples = (loss, step.samples) if step.exchange.said is None else step.exchange.said
        said = None if said is None or loss is None else float(said)
        run.console.step(step.number, step.epoch, step.batch, samples, said, times)
        self._record_tasks(step)
        self.progress.loss_sum += loss or 0.0
        if run.rebalancer:
            run.rebalancer.after_update(step.number, times["compute_ms"], times["load_ms"], step.samples)

    def _record_tasks(self, step: Step) -> None:
        """Of one step in many: what a stage of a pipeline did when."""
        console = self.run.console
        if not step.exchange.tasks or console.first_step is None:
            return
        if has_marks(step.number - console.first_step, console.warmup_steps):
            rows = task_rows(self.run.timer, step.exchange, step.begin, step.summed, step.updated)
            left_out = max(0, len(rows) - MOST_TASKS)
            self.run.metrics.write("tasks", step=step.number, tasks=rows[:MOST_TASKS], left_out=left_out)
