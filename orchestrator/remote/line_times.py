"""When the bytes of a rank's log were printed, as `print_times` has noted it beside the log.

times = LineTimes(job.rank(0) / "stdout.times")
times.at(5000)                      # (1764100000.123, 6144): printed then, as all bytes up to 6144
times.since(1764100000.0)           # 4096: the first byte that was printed then or later
"""

from __future__ import annotations

import bisect
import os
import re
from pathlib import Path

from .pieces import opened
from .print_times import EACH_S

LOOK_BYTES = 1 << 24
"""At a look: more than a week of a log that never rests."""
_ENTRY = re.compile(rb"(\d{1,15}) (\d{1,12}\.\d{3})")


class LineTimes:
    """Read again where more of it is wanted than was there."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self._offsets: list[int] = []
        self._walls: list[float] = []

    def at(self, offset: int) -> tuple[float | None, int | None]:
        """When the byte there was printed, and up to which byte that holds; None: unknown, and without an end."""
        place = bisect.bisect_right(self._offsets, offset)
        if place == len(self._offsets):
            self._look()
            place = bisect.bisect_right(self._offsets, offset)
        wall = self._walls[place - 1] if place else None
        return wall, self._offsets[place] if place < len(self._offsets) else None

    def since(self, wall: float) -> int | None:
        """The first byte that was printed then or later, to a second; None where no time is known, or none so late."""
        self._look()
        late = (offset for offset, at in zip(self._offsets, self._walls, strict=True) if at > wall - EACH_S)
        return next(late, None)

    @property
    def is_empty(self) -> bool:
        self._look()
        return not self._offsets

    def _look(self) -> None:
        """Takes in the whole lines that are new."""
        with opened(self._path) as handle:
            if handle is None:
                return
            whole, newline, _ = os.pread(handle, LOOK_BYTES, self._read).rpartition(b"\n")
        self._read += len(whole) + len(newline)
        for line in whole.split(b"\n"):
            entry = _ENTRY.fullmatch(line)
            if entry and (not self._offsets or int(entry[1]) >= self._offsets[-1]):
                self._offsets.append(int(entry[1]))
                self._walls.append(float(entry[2]))
