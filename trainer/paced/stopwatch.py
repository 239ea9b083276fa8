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
