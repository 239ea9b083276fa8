"""Time stamps on the device, and an injected delay (`slow`).

A GPU runs behind the program, so on CUDA a mark is an event in the computing stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainer.shared.pace import Slow

Mark = Any
"""Host seconds, or a CUDA event."""


class CpuTimer:
    """behind: steps by which the device may lag."""

    behind = 0

    mark = mark_computing = staticmethod(time.perf_counter)

    def wait(self) -> None:
        """On a CPU the work is done already."""

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
        """In the computing stream, even if another is current."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.default_stream())
        return event

    def wait(self) -> None:
        # Not for the whole device, whose other streams may still be sending gradients.
        torch.cuda.current_stream().synchronize()

    def wait_for(self, mark: Mark) -> None:
        """Waits for this mark only."""
        mark.synchronize()

    def is_over(self, mark: Mark) -> bool:
        return bool(mark.query())

    def ms(self, begin: Mark, end: Mark) -> float:
        return float(begin.elapsed_time(end))


Timer = CpuTimer | CudaTimer


def covered_ms(timer: Timer, begin: Mark, spans: Sequence[tuple[Mark, Mark]]) -> float:
    """Milliseconds covered by at least one span. begin: before all of them."""
    if not spans:
        return 0.0
    covered, reached = 0.0, 0.0
    for first_ms, to_ms in sorted((timer.ms(begin, first), timer.ms(begin, last)) for first, last in spans):
        covered += max(0.0, to_ms - max(first_ms, reached))
        reached = max(reached, to_ms)
    return covered


def timer_for(device: torch.device) -> Timer:
    return CudaTimer() if device.type == "cuda" else CpuTimer()


class InjectedDelay:
    """Delays this rank as `slow` asks. postpone: moves a stand-in's deadlines, or it would catch up."""

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
        """Returns seconds."""
        if not self.slow or self.slow.at != where:
            return 0.0
        if self.timer:
            self.timer.wait()  # a GPU with queued work would not notice the pause
        time.sleep(self.slow.ms / 1000)
        self.postpone(self.slow.ms / 1000)
        return self.slow.ms / 1000


NO_DELAY = InjectedDelay()
