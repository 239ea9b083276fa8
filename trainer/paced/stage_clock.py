"""When each task of a paced rank's stage is due, and how late it was.

A GPU does one task after the other: a task begins when the one before it is over and its data are there, and is due
after its time. What the CPU spends on it lies within; what it is late does not add up.
"""

from __future__ import annotations

import statistics
from typing import Any

from trainer.paced.stopwatch import Clock
from trainer.shared.pace import OPTIMISER, Pace


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
