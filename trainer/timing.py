"""Marks on a device's own time line, and the milliseconds between them.

A GPU runs behind the program that feeds it: the host's clock, read after a call, says when the work was queued. So on
CUDA a mark is an event in the stream that computes, stamped by the GPU when it gets there, and the host waits once a
step, at its end. Waiting for the whole device at every mark would be wrong as well as slow: it would wait for the
gradients that DDP is sending at that moment in a stream of their own.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class CpuTimer:
    def mark(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        """Nothing to wait for: on a CPU work is done when the call returns."""

    def ms(self, begin: float, end: float) -> float:
        return (end - begin) * 1000


class CudaTimer:
    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Until the stream that computes has nothing left, so that its marks may be read."""
        torch.cuda.current_stream().synchronize()

    def ms(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end)


def timer_for(device: torch.device) -> CpuTimer | CudaTimer:
    return CudaTimer() if device.type == "cuda" else CpuTimer()
