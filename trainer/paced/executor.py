"""Work on gradients that takes a GPU's time and changes no number."""

from __future__ import annotations

from collections.abc import Callable

from trainer.compute.executor import Executor
from trainer.paced.stage_clock import StageClock
from trainer.paced.stopwatch import Stopwatch
from trainer.shared.gpu_work import Work


class StandInExecutor(Executor):
    """Keeps the time that a GPU takes for its work, one after the other."""

    SHORT_S = 0.5e-3
    """No sleep is as exact as this; what is shorter is made up for with the work that follows."""

    def __init__(self, stopwatch: Stopwatch | StageClock, is_beside: bool = False) -> None:
        self.stopwatch, self.is_beside = stopwatch, is_beside
        self.free_s = 0.0

    def __call__(self, work: Work, arithmetic: Callable[[], object]) -> None:
        clock = self.stopwatch.clock
        began_s = clock.now()
        self.do(arithmetic)
        self.free_s = max(self.free_s, began_s) + work.seconds(self.stopwatch.pace.gb_per_s)
        if self.free_s - began_s < self.SHORT_S:
            return
        if not self.is_beside:
            self.stopwatch.keep(self.free_s)
        elif (left_s := self.free_s - clock.now()) > 0:
            clock.sleep(left_s)

    def do(self, arithmetic: Callable[[], object]) -> None:
        """None of it."""

    def beside(self) -> StandInExecutor:
        return StandInExecutor(self.stopwatch, is_beside=True)
