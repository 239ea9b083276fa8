"""Notes when what is in a log was printed: beside it, a line for each second in which something was.

    times = PrintTimes(job.rank(0) / "stdout.times")
    if times.is_due():
        times.note(offset=4096)         # what is printed now will stand from this byte of the log on

A line is "OFFSET WALL\\n", by this host's clock. It stands there before the bytes that it tells of.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

EACH_S = 1.0


class PrintTimes:
    """Where the disk takes no times, nothing is lost but these."""

    def __init__(self, path: Path) -> None:
        self._path, self._due_s = path, 0.0
        self._handle: int | None = None

    def is_due(self) -> bool:
        return not 0.0 <= self._due_s - time.time() <= EACH_S  # a clock that was set back is not waited for

    def note(self, offset: int) -> None:
        now_s = time.time()
        self._due_s = now_s + EACH_S
        with contextlib.suppress(OSError):
            if self._handle is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
                self._handle = os.open(self._path, flags, 0o600)
            os.write(self._handle, b"%d %.3f\n" % (offset, now_s))
