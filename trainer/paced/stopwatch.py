"""When each part of a paced rank's step is due, and how late it was."""

from __future__ import annotations

import statistics
import time
from typing import Any

from trainer.shared.pace import BACKWARD, FORWARD, OPTIMISER, Pace


class Clock:
    """Where the time comes from; a test may bring its own."""

    now = staticmethod(time.perf_counter)
    sleep = staticmethod(time.sleep)


class Stopwatch:
    """One step after the other: when its parts have to be ready, and how late they were."""

    def __init__(self, pace: Pace, seed: object = 0, clock: Any = Clock) -> None:
        self.pace, self.seed, self.clock = pace, seed, clock
        self.step = 0
        self.step_s = 0.0
        self.update_s = 0.0  # of all micro-batches so far
        self.began_s = 0.0
        self.started = False
        self.updating = False
        self.late_s: list[float] = []  # of each micro-batch, and as a part of what it should have taken
        self.lateness: list[float] = []

    def start(self) -> None:
        """The step begins now; without this, with its forward pass."""
        self.began_s = self.clock.now()
        self.started = True

    def begin(self, samples: int) -> None:
        """The forward pass begins; that of a further micro-batch of the update, when the one before is due."""
        if self.updating and not self.started:
            self.began_s += (FORWARD + BACKWARD) * self.step_s
        else:
            if not self.started:
                self.start()
            self.step += 1
            self.update_s = 0.0
        self.started, self.updating = False, True
        self.step_s = self.pace.step_s(samples, self.step - 1, self.seed)
        self.update_s += self.step_s

    def postpone(self, held_up_s: float) -> None:
        """What is left of this step is due so much later: otherwise it would make up for a pause made on purpose."""
        self.began_s += held_up_s

    def until(self, part: float) -> None:
        """Waits until so much of the step has passed, 0..1."""
        self._wait(self.began_s + part * self.step_s)

    def backward_ended(self) -> None:
        late_s = max(0.0, self.clock.now() - self.began_s - (FORWARD + BACKWARD) * self.step_s)
        self.late_s.append(late_s)
        self.lateness.append(late_s / self.step_s)

    def keep(self, deadline_s: float) -> None:
        """Work beside the step is over then; what the CPU is late counts for the step whose backward ended last."""
        self._wait(deadline_s)
        late_s = max(0.0, self.clock.now() - deadline_s)
        if self.late_s:
            self.late_s[-1] += late_s
            self.lateness[-1] += late_s / self.step_s

    def optimise(self, began_s: float | None = None) -> None:
        """The update begins when the gradients of all ranks are there, whenever that is: now, or so long ago."""
        self.updating = False
        self._wait((self.clock.now() if began_s is None else began_s) + OPTIMISER * self.update_s)

    def median_lateness(self, warmup_steps: int) -> float | None:
        """Over the steps after the warm-up, as a part of a step; None where there was none."""
        measured = self.lateness[warmup_steps:] or self.lateness
        return statistics.median(measured) if measured else None

    def _wait(self, deadline_s: float) -> None:
        left_s = deadline_s - self.clock.now()
        if left_s > 0:
            self.clock.sleep(left_s)


# When each task of a paced rank's stage is due, and how late it was.
#
# A GPU does one task after the other: a task begins when the one before it is over and its data are there, and is due
# after its time. What the CPU spends on it lies within; what it is late does not add up.


class StageClock:
    def __init__(self, pace: Pace, work: float, kernels: float, seed: object = 0, clock: Any = Clock) -> None:
        """work, kernels: the stage's parts of the network's multiplications and of its layers with weights, 0..1."""
        self.pace, self.work, self.kernels, self.seed, self.clock = pace, work, kernels, seed, clock
        self.free_s = clock.now()
        self.update = -1
        self.busy_s = self.latest_s = 0.0
        self.late_s: list[float] = []  # of each update, and as a part of its work
        self.lateness: list[float] = []

    def start(self) -> None:
        """An update begins."""
        self.update += 1
        self.busy_s = self.latest_s = 0.0
        self.free_s = max(self.free_s, self.clock.now())

    def run(self, part: float, samples: int, there_s: float = 0.0) -> None:
        """Returns when a task is due that takes this part of a whole step with so many samples. there_s: when its data
        came.
        """
        self.take(part * self.task_s(samples, self.work, self.kernels), there_s)

    def task_s(self, samples: int, work: float, kernels: float) -> float:
        """Seconds of a whole step for such parts of the network, as the pace has them in this update."""
        return self.pace.part_s(samples, self.update, self.seed, work=work, kernels=kernels)

    def take(self, task_s: float, there_s: float = 0.0) -> None:
        """Returns when a task of so many seconds is due."""
        self.free_s = max(self.free_s, there_s) + task_s
        self.busy_s += task_s
        self._wait()
        self.latest_s = max(self.latest_s, self.clock.now() - self.free_s)

    def keep(self, deadline_s: float) -> None:
        """Work beside the tasks is over then."""
        self.free_s = max(self.free_s, deadline_s)
        self._wait()

    def postpone(self, held_up_s: float) -> None:
        """What follows is due so much later: otherwise it would make up for a pause made on purpose."""
        self.free_s += held_up_s

    def optimise(self, began_s: float | None = None) -> None:
        """began_s: when the gradients of all ranks were there; None: now."""
        if self.busy_s:
            self.late_s.append(self.latest_s)
            self.lateness.append(self.latest_s / self.busy_s)
        self.free_s = max(self.free_s, self.clock.now() if began_s is None else began_s) + OPTIMISER * self.busy_s
        self._wait()

    def median_lateness(self, warmup_steps: int) -> float | None:
        """Over the updates after the warm-up, as a part of an update's work; None where there was none."""
        measured = self.lateness[warmup_steps:] or self.lateness
        return statistics.median(measured) if measured else None

    def _wait(self) -> None:
        left_s = self.free_s - self.clock.now()
        if left_s > 0:
            self.clock.sleep(left_s)
