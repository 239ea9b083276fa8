"""Marks on a device's own time line, and the milliseconds between them.

A GPU runs behind the program that feeds it: the host's clock, read after a call, says when the work was queued. So on
CUDA a mark is an event in the stream that computes, stamped by the GPU when it gets there, and the host waits for a
step's last mark when it has queued the next step. Waiting for the whole device at every mark would be wrong as well as
slow: it would wait for the gradients that DDP is sending at that moment in a stream of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainer.shared.pace import Slow

Mark = Any
"""A moment on a device's time line: seconds of the host's clock, or an event of the GPU's."""


class CpuTimer:
    """behind: steps that the device may lag behind the program."""

    behind = 0

    mark = mark_computing = staticmethod(time.perf_counter)

    def wait(self) -> None:
        """Nothing to wait for: on a CPU work is done when the call returns."""

    def wait_for(self, mark: Mark) -> None:
        pass

    def is_over(self, mark: Mark) -> bool:
        return True

    def ms(self, begin: Mark, end: Mark) -> float:
        return float(end - begin) * 1000


class CudaTimer:
    behind = 1

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark_computing(self) -> Mark:
        """In the stream that computes, from wherever another one is the current one."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.default_stream())
        return event

    def wait(self) -> None:
        """Until the stream that computes has nothing left, so that its marks may be read."""
        torch.cuda.current_stream().synchronize()

    def wait_for(self, mark: Mark) -> None:
        """Until the device has come to it; what was queued behind it goes on."""
        mark.synchronize()

    def is_over(self, mark: Mark) -> bool:
        return bool(mark.query())

    def ms(self, begin: Mark, end: Mark) -> float:
        return float(begin.elapsed_time(end))


Timer = CpuTimer | CudaTimer


def covered_ms(timer: Timer, begin: Mark, spans: Sequence[tuple[Mark, Mark]]) -> float:
    """Milliseconds that lie in at least one span, in whatever order they come. begin: a mark before all of them."""
    if not spans:
        return 0.0
    covered, reached = 0.0, 0.0
    for first_ms, to_ms in sorted((timer.ms(begin, first), timer.ms(begin, last)) for first, last in spans):
        covered += max(0.0, to_ms - max(first_ms, reached))
        reached = max(reached, to_ms)
    return covered


def timer_for(device: torch.device) -> Timer:
    return CudaTimer() if device.type == "cuda" else CpuTimer()


# The brake that holds a rank up where the setting `slow` says so.


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
