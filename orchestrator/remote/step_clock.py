"""Marks on a device's time line, for a process that only looks on.

    clock = clock_of(torch, "cuda")
    first, last = clock.mark(), clock.mark()
    clock.is_over(last) and clock.ms(first, last)

A GPU runs behind the program that feeds it, so a mark there is an event that the GPU stamps. Nobody waits for it: it is
asked whether it is over, and read later.
"""

from __future__ import annotations

import time
from typing import Any

Mark = Any


class HostClock:
    """Of the processor: what it was told to do is done when the call returns."""

    def mark(self) -> Mark:
        return time.perf_counter()

    def is_over(self, mark: Mark) -> bool:
        return True

    def ms(self, begin: Mark, end: Mark) -> float:
        return float(end - begin) * 1000


class CudaClock:
    """Of the stream that is the current one when a mark is made."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._capturing = getattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def mark(self) -> Mark:
        if self._capturing():
            raise RuntimeError("a CUDA graph is being captured, and its replays cannot be seen")
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_over(self, mark: Mark) -> bool:
        return bool(mark.query())

    def ms(self, begin: Mark, end: Mark) -> float:
        return float(begin.elapsed_time(end))


Clock = HostClock | CudaClock


def clock_of(torch: Any, device: str) -> Clock | None:
    """device: its type; None where nothing is known of the time line of such devices."""
    if device == "cuda":
        return CudaClock(torch)
    return HostClock() if device == "cpu" else None
