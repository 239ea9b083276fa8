"""Notes when what is in a log was printed: beside it, a line for each second in which something was.

    times = PrintTimes(job.rank(0) / "stdout.times")
    if times.is_due():
        times.note(log)                 # what is printed now will stand from the end of this log on: a descriptor

A line is "OFFSET WALL\\n", by this host's clock. It stands there before the bytes that it tells of. Offsets and times
never fall: where the log was cut, what was noted of it is cut, too.
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
        self._path, self._due_s, self._offset = path, 0.0, 0
        self._handle: int | None = None
        self._is_torn = False

    def is_due(self) -> bool:
        return not 0.0 <= self._due_s - time.time() <= EACH_S  # a clock that was set back is not waited for

    def note(self, log: int) -> None:
        now_s = time.time()
        self._due_s = now_s + EACH_S
        with contextlib.suppress(OSError):
            if self._handle is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
                self._handle = os.open(self._path, flags, 0o600)
            offset = os.fstat(log).st_size
            if offset == 0 or offset < self._offset:
                os.ftruncate(self._handle, 0)
                self._is_torn = False
            self._offset = offset
            line = b"\n" * self._is_torn + b"%d %.3f\n" % (offset, now_s)
            self._is_torn = os.write(self._handle, line) < len(line)
