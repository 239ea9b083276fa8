"""Gloo's own threads, so that they spin no more while ranks share few cores.

The thread that watches a group's sockets asks again and again while another thread of its rank holds the socket. Where
it has taken the core of that thread, it asks for as long as it may keep it: half the processor time of a small sum, and
of the time that a sum takes. As SCHED_BATCH it takes no core from a thread that runs.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_NAME = "gloo_tcp_loop"
_TASKS = Path("/proc/self/task")


def calm_gloo() -> None:
    """Of all groups that this process has made so far."""
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            if (task / "comm").read_text().strip() == _NAME:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))
