"""Whether the kernel ended a process of ours for want of memory, and who is to go first.

    before = out_of_memory_kills()
    ...                                   # somebody was killed by SIGKILL
    out_of_memory_kills() > before        # then most likely for that

Counted where our own processes are: a cgroup that ran out of its own memory says nothing about the others.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from .cgroups import folders

RANKS_FIRST = 500
"""Added to the ranks' score, so that the kernel ends a rank before launcher and supervisor, which report it."""
_FILES = ("memory.events", "memory.oom_control")  # of cgroup v2 and v1


def out_of_memory_kills(proc: Path = Path("/proc")) -> int:
    """So many processes of our cgroup has the kernel ended for want of memory; where no cgroup counts them, of the
    whole host since it started (proc(5), vmstat).
    """
    for file in (*_counters(proc), proc / "vmstat"):
        with contextlib.suppress(OSError, ValueError):
            counts = [line.split()[1] for line in file.read_text().splitlines() if line.startswith("oom_kill ")]
            if counts:
                return int(counts[0])
    return 0


def let_go_first(pid: int) -> None:
    """Has the kernel choose this process, and what it starts, before its launcher. Any user may, of their own."""
    with contextlib.suppress(OSError, ValueError):
        score = Path(f"/proc/{pid}/oom_score_adj")
        score.write_text(str(min(1000, int(score.read_text()) + RANKS_FIRST)))


def _counters(proc: Path) -> list[Path]:
    """Where our cgroup's kills may be counted, the nearest first: its own file, else that of one above it."""
    return [folder / name for folder in folders("memory", proc) for name in _FILES]
