"""Where this process's control groups lie, and how much they let it have.

folders("memory")     # [Path("/sys/fs/cgroup/user.slice/..."), ..., Path("/sys/fs/cgroup")]: the nearest first
limits()              # {"memory_bytes": 8589934592, "pids": None, "cpus": 4.0}: None where nothing limits it
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NO_LIMIT_BYTES = 1 << 60
"""cgroup v1 has no word for "no limit", and writes a number about so large."""


def limits(proc: Path = Path("/proc")) -> dict[str, Any]:
    """The tightest of all groups that this process is in."""
    memory = [
        size for size in _figures("memory", ("memory.max", "memory.limit_in_bytes"), proc) if size < NO_LIMIT_BYTES
    ]
    return {
        "memory_bytes": min(memory, default=None),
        "pids": min(_figures("pids", ("pids.max",), proc), default=None),
        "cpus": min(_cpus(proc), default=None),
    }


def folders(controller: str, proc: Path = Path("/proc")) -> list[Path]:
    """Those of the groups in which this controller (`memory`) may act on us, the nearest first; v1 or v2."""
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
                # A container may be shown its own cgroup as the root, and know its path from outside.
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
