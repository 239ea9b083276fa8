"""Records when a log's bytes were printed: one line per second with output, in a file next to the log.

    times = PrintTimes(job.rank(0) / "stdout.times")
    if times.is_due():
        times.note(log)                 # a descriptor; what is printed now will begin at its end

A line is "OFFSET WALL\\n", by this host's clock, written before its bytes. Offsets and times never fall: if the log is
truncated, so is this file.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

EACH_S = 1.0


class PrintTimes:
    def __init__(self, path: Path) -> None:
        self._path, self._due_s, self._offset = path, 0.0, 0
        self._handle: int | None = None
        self._is_torn = False

    def is_due(self) -> bool:
        return not 0.0 <= self._due_s - time.time() <= EACH_S  # also due after the clock was set back

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
