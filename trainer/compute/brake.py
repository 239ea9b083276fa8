"""The brake that holds a rank up where the setting `slow` says so."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainer.compute.timer import Timer
from trainer.shared.slow import Slow


class Brake:
    """Holds this rank up where the setting `slow` says so, and nowhere without it. postpone: called with the seconds by
    which a stand-in's deadlines are due later; otherwise it would make up for the pause.
    """

    def __init__(
        self,
        slow: Slow | None = None,
        rank: int = 0,
        timer: Timer | None = None,
        postpone: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.slow = slow if slow and slow.rank == rank else None
        self.timer = timer
        self.postpone = postpone

    def pause(self, where: str) -> float:
        """The seconds for which this held the rank up; 0 where it should not."""
        if not self.slow or self.slow.at != where:
            return 0.0
        if self.timer:
            self.timer.wait()  # a GPU that still has work queued would not notice
        time.sleep(self.slow.ms / 1000)
        self.postpone(self.slow.ms / 1000)
        return self.slow.ms / 1000


NO_BRAKE = Brake()
