"""Detects kernel out-of-memory kills, and makes ranks their first victims.

before = out_of_memory_kills()
...                                   # a process was killed by SIGKILL
out_of_memory_kills() > before        # then memory is the likely cause
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from .cgroups import folders

RANKS_FIRST = 500  # added to the ranks' score: the kernel ends a rank before launcher and supervisor, which report it
_FILES = ("memory.events", "memory.oom_control")  # cgroup v2 and v1


def out_of_memory_kills(proc: Path = Path("/proc")) -> int:
    """Kills in our cgroup; without a counter there, on the whole host since its start (proc(5), vmstat)."""
    for file in (*_counters(proc), proc / "vmstat"):
        with contextlib.suppress(OSError, ValueError):
            counts = [line.split()[1] for line in file.read_text().splitlines() if line.startswith("oom_kill ")]
            if counts:
                return int(counts[0])
    return 0


def let_go_first(pid: int) -> None:
    """Makes the kernel choose this process and its children before its launcher."""
    with contextlib.suppress(OSError, ValueError):
        score = Path(f"/proc/{pid}/oom_score_adj")
        score.write_text(str(min(1000, int(score.read_text()) + RANKS_FIRST)))


def _counters(proc: Path) -> list[Path]:
    return [folder / name for folder in folders("memory", proc) for name in _FILES]
