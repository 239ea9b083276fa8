"""For `orch why`: a rank's log sizes, silence in seconds, newest step and longest step time.

progress_of(job, 0)         # RankProgress(sizes=(120, 0, 4096), quiet_s=3.1, step=120, step_s=0.4)
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from typing import Any, NamedTuple

from .layout import JobFolder
from .stillness import FILES

TAIL_BYTES = 1 << 14  # read from the end of the metrics
MOST_STEP, MOST_S = 2**53, 1e9


class RankProgress(NamedTuple):
    sizes: tuple[int, ...]
    quiet_s: float  # since its last write, by the clock of its disk
    step: int | None  # the last step in its metrics
    step_s: float | None  # longest of the last steps, in seconds


def progress_of(job: JobFolder, rank: int) -> RankProgress:
    sizes, times = list[int](), list[float]()
    for name in FILES:
        try:
            found = os.stat(job.rank(rank) / name, follow_symlinks=False)
        except OSError:
            sizes.append(-1)
        else:
            sizes.append(found.st_size)
            times.append(found.st_mtime)
    quiet_s = min(MOST_S, max(0.0, time.time() - max(times))) if times else 0.0
    return RankProgress(tuple(sizes), quiet_s, *_steps(job, rank))


def _steps(job: JobFolder, rank: int) -> tuple[int | None, float | None]:
    last, longest_s = None, None
    for line in _tail(job, rank).split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict) and event.get("event") == "step":
                last = _step(event.get("step"), last)
                longest_s = _longest(event.get("t_ms"), longest_s)
    return last, longest_s


def _tail(job: JobFolder, rank: int) -> bytes:
    try:
        with open(job.rank(rank) / "metrics.jsonl", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read(TAIL_BYTES)
    except OSError:
        return b""


def _step(value: Any, before: int | None) -> int | None:
    return value if isinstance(value, int) and 0 <= value < MOST_STEP else before


def _longest(t_ms: Any, before: float | None) -> float | None:
    if not isinstance(t_ms, (int, float)) or not math.isfinite(t_ms) or not 0 <= t_ms < 1000 * MOST_S:
        return before
    return max(t_ms / 1000, before or 0.0)
