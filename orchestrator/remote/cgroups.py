"""This process's control groups (cgroup v1 and v2), their limits, and kernel out-of-memory kills.

folders("memory")     # [Path("/sys/fs/cgroup/user.slice/..."), ..., Path("/sys/fs/cgroup")]: the nearest first
limits()              # {"memory_bytes": 8589934592, "pids": None, "cpus": 4.0}: None if unlimited
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes a number above this for "no limit"


def limits(proc: Path = Path("/proc")) -> dict[str, Any]:
    memory = [
        size for size in _figures("memory", ("memory.max", "memory.limit_in_bytes"), proc) if size < NO_LIMIT_BYTES
    ]
    return {
        "memory_bytes": min(memory, default=None),
        "pids": min(_figures("pids", ("pids.max",), proc), default=None),
        "cpus": min(_cpus(proc), default=None),
    }


def folders(controller: str, proc: Path = Path("/proc")) -> list[Path]:
    """Groups in which this controller (`memory`) may limit us, the nearest first."""
    with contextlib.suppress(OSError, ValueError):
        places = dict[str, str]()
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(",") or not controllers:
                places["cgroup" if controllers else "cgroup2"] = path
        found = []
        for line in (proc / "self/mountinfo").read_text().splitlines():
            about, _, kind = line.partition(" - ")
            root, point = about.split()[3:5]
            fstype, _, options = kind.split()[:3]
            if fstype in places and (fstype == "cgroup2" or controller in options.split(",")):
                # A container may see its own cgroup as the root, but its path as seen from outside.
                inside = places[fstype].removeprefix(root if root != "/" else "").strip("/")
                here = Path(point, "" if inside.startswith("..") else inside)
                found += [here, *(folder for folder in here.parents if folder.is_relative_to(point))]
        return found
    return []


def _figures(controller: str, files: tuple[str, ...], proc: Path) -> Iterator[int]:
    for folder in folders(controller, proc):
        for name in files:
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                yield int((folder / name).read_text())


def _cpus(proc: Path) -> Iterator[float]:
    for folder in folders("cpu", proc):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            yield int(quota) / int(period)
        with contextlib.suppress(OSError, ValueError):
            quota_us, period_us = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota_us > 0:
                yield quota_us / period_us


# Detects kernel out-of-memory kills, and makes ranks their first victims.
#
# before = out_of_memory_kills()
# ...                                   # a process was killed by SIGKILL
# out_of_memory_kills() > before        # then memory is the likely cause

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
