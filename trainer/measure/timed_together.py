"""Timing work that all ranks begin at once."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from trainer.compute.timer import Timer


def timed_together(timer: Timer, work: Callable[[], object]) -> float:
    """Seconds of this rank's work, which all ranks begin at once."""
    timer.wait()
    dist.barrier()  # over Gloo, between the hosts' programs
    begin = timer.mark()
    work()
    end = timer.mark()
    timer.wait()
    return timer.ms(begin, end) / 1000
