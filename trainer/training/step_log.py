"""Writes `step` records, each after the device has finished the step.

with StepLog(run, progress) as log:
    begin = log.begin()
    log.add(Step(...))                   writes the step before
    log.flush()
"""
# Reading a step's marks at its end would make host and GPU wait for each other, so they are read one step late; not on
# a CPU, nor with `shares=auto`, whose ranks decide after each step.

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from trainer.compute.timer import Timer, covered_ms
from trainer.shared.metrics import MOST_TASKS, STAGE_TIMES
from trainer.shared.stages import Task
from trainer.strategies import Exchange
from trainer.training.loss_sum import report_not_finite
from trainer.training.rates import Progress

if TYPE_CHECKING:
    from trainer.training.run import Run


MOMENT_S = 1.0


class Step(NamedTuple):
    """Marks are in the device's order; `exchange` has the one between `loaded` and `summed`."""

    number: int
    """In the whole run."""
    epoch: int
    batch: int
    """Samples of all ranks."""
    samples: int
    """This rank's."""
    loss: Tensor | float | None
    """Sum over these samples, possibly in transfer until `end`; None if paced."""
    exchange: Exchange
    begin: Any
    loaded: Any
    summed: Any
    updated: Any
    end: Any

    def times(self, timer: Timer) -> dict[str, float]:
        """Fields of the `step` record."""
        computed, held_up_ms = self.exchange.computed, 1000 * self.exchange.held_up_s
        waited_ms = covered_ms(timer, self.begin, self.exchange.waits)
        averaging_ms, sum_ms = timer.ms(self.updated, self.end), timer.ms(computed, self.summed)
        beside = self.exchange.collectives
        under_way_ms = covered_ms(timer, self.begin, beside) if beside else sum_ms
        # Others wait for an injected delay as for computing.
        compute_ms = timer.ms(self.loaded, computed) - waited_ms + held_up_ms
        return {
            "t_ms": round(timer.ms(self.begin, self.end), 3),
            "load_ms": round(timer.ms(self.begin, self.loaded), 3),
            "compute_ms": round(compute_ms, 3),
            "exposed_ms": round(sum_ms + waited_ms + averaging_ms - held_up_ms, 3),
            "comm_ms": round(under_way_ms + waited_ms + averaging_ms - held_up_ms, 3),
            "optim_ms": round(timer.ms(self.summed, self.updated), 3),
        }


class StepLog:
    """For one epoch. After an exception writes only steps that finish within MOMENT_S."""

    def __init__(self, run: Run, progress: Progress) -> None:
        self.run, self.progress = run, progress
        self.behind = 0 if run.rebalancer else run.timer.behind
        self.left: deque[Step] = deque()

    def begin(self) -> Any:
        """The mark of the next step's begin."""
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
        with contextlib.suppress(RuntimeError):  # a failed GPU raises at every call
            while self.left and time.monotonic() < deadline_s:
                if self.run.timer.is_over(self.left[0].end):
                    self._write(len(self.left) - 1)
                else:
                    time.sleep(0.001)

    def _write(self, keep: int) -> None:
        """All but the newest `keep`."""
        while len(self.left) > keep:
            step = self.left.popleft()
            self.run.timer.wait_for(step.end)
            self._record(step)

    def _record(self, step: Step) -> None:
        run, timer = self.run, self.run.timer
        loss = None if step.loss is None else float(step.loss)
        if loss is not None and not math.isfinite(loss):
            report_not_finite(run, step.number, step.epoch, loss)
        line = partial(line_of, timer, step, loss, self.began)
        if timer.behind:  # a failed GPU raises here, ending the run
            run.metrics.write("step", **line())
        else:
            run.metrics.write_beside("step", line)
        self.progress.loss_sum += loss or 0.0
        run.console.count(step.number, step.batch, timer.ms(step.begin, step.end))
        if run.console.is_due(step.number):
            self._say(step, loss)
        if step.exchange.tasks:
            self._record_tasks(step)
        if run.rebalancer:
            took = step.times(timer)
            run.rebalancer.after_update(step.number, took["compute_ms"], took["load_ms"], step.samples)

    def _say(self, step: Step, loss: float | None) -> None:
        said, samples = (loss, step.samples) if step.exchange.said is None else step.exchange.said
        said = None if said is None or loss is None else float(said)
        self.run.console.step(step.number, step.epoch, samples, said, step.times(self.run.timer))

    def _record_tasks(self, step: Step) -> None:
        """For some steps: times of a pipeline stage's tasks."""
        console = self.run.console
        if console.first_step is not None and has_marks(step.number - console.first_step, console.warmup_steps):
            rows = task_rows(self.run.timer, step.exchange, step.begin, step.summed, step.updated)
            left_out = max(0, len(rows) - MOST_TASKS)
            self.run.metrics.write("tasks", step=step.number, tasks=rows[:MOST_TASKS], left_out=left_out)


def line_of(timer: Timer, step: Step, loss: float | None, began: tuple[Any, float]) -> dict[str, Any]:
    """began: a mark, and the time of day then."""
    mark, wall_s = began
    return {
        "step": step.number,
        "epoch": step.epoch,
        "samples": step.samples,
        **step.times(timer),
        **stage_times(timer, step.exchange),
        "loss": loss,
        "wall": wall_s + timer.ms(mark, step.end) / 1000,
    }


Row = list[Any]


def stage_times(timer: Timer, exchange: Exchange) -> dict[str, float | None]:
    """Fields of the `step` record; None without a pipeline."""
    if exchange.wire_ms is None:
        return dict.fromkeys(STAGE_TIMES)
    before_ms, behind_ms = (
        sum(
            (
                timer.ms(done.since, done.begin)
                for done in exchange.tasks
                if done.task is task and done.since is not None
            ),
            0.0,
        )
        for task in (Task.FORWARD, Task.BACKWARD)
    )
    return dict(zip(STAGE_TIMES, (round(ms, 3) for ms in (before_ms, behind_ms, exchange.wire_ms)), strict=True))


def has_marks(updates: int, warmup_steps: int) -> bool:
    """For the first update after the warm-up, the 10th, 100th and so on. updates: earlier ones of this process."""
    # Readers use the latest, so a run of any length has one.
    is_power_of_ten = updates >= 10 and str(updates).rstrip("0") == "1"
    return updates == warmup_steps or (updates > warmup_steps and is_power_of_ten)


def task_rows(timer: Timer, exchange: Exchange, begin: Any, summed: Any, updated: Any) -> list[Row]:
    """On the device's clock. begin, summed, updated: marks of the step."""
    now = timer.mark()
    timer.wait_for(now)
    now_s, now_ms = time.perf_counter(), timer.ms(begin, now)

    def of_mark(mark: Any) -> float | None:
        return None if mark is None else round(timer.ms(begin, mark), 3)

    def of_host(moment_s: float | None) -> float | None:
        return None if moment_s is None else round(now_ms + 1000 * (moment_s - now_s), 3)

    tasks: list[Row] = [
        [task.task.value, task.number, of_mark(task.begin), of_mark(task.end), of_host(task.came_s), of_mark(task.sent)]
        for task in (*exchange.early, *exchange.tasks)
    ]
    return [
        *tasks,
        ["sum", None, of_mark(exchange.computed), of_mark(summed), None, None],
        ["optimiser", None, of_mark(summed), of_mark(updated), None, None],
    ]
