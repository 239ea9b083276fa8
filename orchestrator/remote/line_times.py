"""Times at which the bytes of a rank's log were printed, from the file that `print_times` writes.

    times = LineTimes(job.rank(0) / "stdout.times")
    times.at(5000)                      # (1764100000.123, 6144): printed then, as all bytes up to 6144
    times.since(1764100000.0)           # 4096: the first byte that was printed then or later

Binary search, with one part of the file in memory: a log of weeks has a million entries.
"""

from __future__ import annotations

import bisect
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .pieces import opened
from .print_times import EACH_S

WINDOW_BYTES = 1 << 16
LINE_BYTES = 64  # longest entry
_ENTRY = re.compile(rb"^(\d{1,15}) (\d{1,12}\.\d{3})\n", re.MULTILINE)


class Entry(NamedTuple):
    offset: int
    wall: float


class LineTimes:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._window: list[Entry] = []

    def at(self, offset: int) -> tuple[float | None, int | None]:
        """Print time of this byte, and the end of the range it holds for; None: unknown, and open-ended."""
        if not (self._window and self._window[0].offset <= offset < self._window[-1].offset):
            self._window = self._around(lambda entry: entry.offset > offset)
        place = bisect.bisect_right(self._window, Entry(offset, math.inf))
        wall = self._window[place - 1].wall if place else None
        return wall, self._window[place].offset if place < len(self._window) else None

    def since(self, wall: float) -> int | None:
        """The first byte printed then or later, to a second; None if unknown."""

        def is_late(entry: Entry) -> bool:
            return entry.wall > wall - EACH_S

        return next((entry.offset for entry in self._around(is_late) if is_late(entry)), None)

    @property
    def is_empty(self) -> bool:
        return not self._around(lambda entry: True)

    def _around(self, is_late: Callable[[Entry], bool]) -> list[Entry]:
        """In the file's order, the last entries that are not late and the first that are."""
        with opened(self._path) as handle:
            if handle is None:
                return []
            size = os.fstat(handle).st_size
            begin, end = 0, size  # bytes; the first late entry begins between them
            while end - begin > WINDOW_BYTES // 4:
                middle = (begin + end) // 2
                entry = next(iter(_entries(handle, middle, 16 * LINE_BYTES)), None)
                if entry is None or is_late(entry):
                    end = middle
                else:
                    begin = middle
            return _entries(handle, max(0, begin - 16 * LINE_BYTES), WINDOW_BYTES)


def _entries(handle: int, begin: int, size: int) -> list[Entry]:
    data = os.pread(handle, size, begin)
    if begin:
        data = data[data.find(b"\n") + 1 :]  # the rest of an entry
    return [Entry(int(offset), float(wall)) for offset, wall in _ENTRY.findall(data)]
