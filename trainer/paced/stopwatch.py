"""The deadlines of a paced rank's step or stage tasks, and how late they were."""

from __future__ import annotations

import statistics
import time
from typing import Any

from trainer.shared.pace import BACKWARD, FORWARD, OPTIMISER, Pace


class Clock:
    now = staticmethod(time.perf_counter)
    sleep = staticmethod(time.sleep)


class Stopwatch:
    def __init__(self, pace: Pace, seed: object = 0, clock: Any = Clock) -> None:
        self.pace, self.seed, self.clock = pace, seed, clock
        self.step = 0
        self.step_s = 0.0
        self.update_s = 0.0  # of all micro-batches so far
        self.began_s = 0.0
        self.started = False
        self.updating = False
        self.late_s: list[float] = []  # per micro-batch; also as a part of its time
        self.lateness: list[float] = []

    def start(self) -> None:
        """Begins a step; otherwise its forward pass does."""
        self.began_s = self.clock.now()
        self.started = True

    def begin(self, samples: int) -> None:
        """A further micro-batch begins when the one before is due."""
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
        """Moves deadlines, which would otherwise absorb an injected delay."""
        self.began_s += held_up_s

    def until(self, part: float) -> None:
        """Waits. part: of the step, 0..1."""
        self._wait(self.began_s + part * self.step_s)

    def backward_ended(self) -> None:
        late_s = max(0.0, self.clock.now() - self.began_s - (FORWARD + BACKWARD) * self.step_s)
        self.late_s.append(late_s)
        self.lateness.append(late_s / self.step_s)

    def keep(self, deadline_s: float) -> None:
        """Ends work outside the step, whose lateness counts for the last backward."""
        self._wait(deadline_s)
        late_s = max(0.0, self.clock.now() - deadline_s)
        if self.late_s:
            self.late_s[-1] += late_s
            self.lateness[-1] += late_s / self.step_s

    def optimise(self, began_s: float | None = None) -> None:
        """began_s: when all ranks' gradients were there; None: now."""
        self.updating = False
        self._wait((self.clock.now() if began_s is None else began_s) + OPTIMISER * self.update_s)

    def median_lateness(self, warmup_steps: int) -> float | None:
        """As a part of a step; None if unknown."""
        measured = self.lateness[warmup_steps:] or self.lateness
        return statistics.median(measured) if measured else None

    def _wait(self, deadline_s: float) -> None:
        left_s = deadline_s - self.clock.now()
        if left_s > 0:
            self.clock.sleep(left_s)


class StageClock:
    def __init__(self, pace: Pace, work: float, kernels: float, seed: object = 0, clock: Any = Clock) -> None:
        """work, kernels: the stage's parts, 0..1."""
        # Like a GPU, it does one task after the other. Lateness does not add up.
        self.pace, self.work, self.kernels, self.seed, self.clock = pace, work, kernels, seed, clock
        self.free_s = clock.now()
        self.update = -1
        self.busy_s = self.latest_s = 0.0
        self.late_s: list[float] = []  # per update; also as a part of its work
        self.lateness: list[float] = []

    def start(self) -> None:
        self.update += 1
        self.busy_s = self.latest_s = 0.0
        self.free_s = max(self.free_s, self.clock.now())

    def run(self, part: float, samples: int, there_s: float = 0.0) -> None:
        """Returns when a task is due. part: of a whole step. there_s: arrival of its data."""
        self.take(part * self.task_s(samples, self.work, self.kernels), there_s)

    def task_s(self, samples: int, work: float, kernels: float) -> float:
        """A whole step for these parts of the network."""
        return self.pace.part_s(samples, self.update, self.seed, work=work, kernels=kernels)

    def take(self, task_s: float, there_s: float = 0.0) -> None:
        """Returns when a task of `task_s` is due."""
        self.free_s = max(self.free_s, there_s) + task_s
        self.busy_s += task_s
        self._wait()
        self.latest_s = max(self.latest_s, self.clock.now() - self.free_s)

    def keep(self, deadline_s: float) -> None:
        self.free_s = max(self.free_s, deadline_s)
        self._wait()

    def postpone(self, held_up_s: float) -> None:
        self.free_s += held_up_s

    def optimise(self, began_s: float | None = None) -> None:
        """began_s: when all ranks' gradients were there; None: now."""
        if self.busy_s:
            self.late_s.append(self.latest_s)
            self.lateness.append(self.latest_s / self.busy_s)
        self.free_s = max(self.free_s, self.clock.now() if began_s is None else began_s) + OPTIMISER * self.busy_s
        self._wait()

    def median_lateness(self, warmup_steps: int) -> float | None:
        """By an update's work; None if unknown."""
        measured = self.lateness[warmup_steps:] or self.lateness
        return statistics.median(measured) if measured else None

    def _wait(self) -> None:
        left_s = self.free_s - self.clock.now()
        if left_s > 0:
            self.clock.sleep(left_s)
